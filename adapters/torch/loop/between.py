"""Copies state before optimizer steps, so that a rank between two steps of one version can go back to the last version.

A GAN steps its critic, makes a second backward pass, and steps its generator. If a rank is killed in that second pass,
the others hold one network of version n + 1 and one of version n. Then neither version can be saved, and waiting does
not help, because they wait for the dead rank. So before each step of a version but the last, the parameters and the
optimizer state that the step will change are copied, as ``undo="preimage"`` does for the whole state. A rank between
two steps is saved from these copies, as version n.

The last step of a version needs no copies, and those made before it are dropped when it begins, except in two cases:
where ranks may have to go back from the finished version because other shards cannot be brought to it, and where the
loop itself declares the end of a version (``step_done()``). Then the last step is copied too.

The same copies serve two more kinds of loops: a step that evaluates its closure after it may have written (LBFGS,
sharpness-aware optimizers), so that a rank may have to stop inside of the step; and one optimizer that steps several
times before the loop calls ``step_done()`` (the epochs of PPO over its buffer).

Copies are made until the first version is over. If it had no backward pass between its steps, they are given up.
See decision 27.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.saving.preimage import PreImage

log = logging.getLogger("ttp.adapters.torch")


class BetweenSteps:
    """Makes and drops the copies from which the last version can be saved. For the training thread.

    Args:
        turns: knows which optimizers step in a version, and in which order.
        owners: for each of these optimizers, the optimizers that keep its state.
        whole: whether to copy before the last step of a version too.
        make: returns a ``PreImage`` that has not allocated memory yet.
    """

    def __init__(
        self, turns: Turns, owners: Sequence[Sequence[Optimizer]], whole: bool, make: Callable[[], PreImage]
    ) -> None:
        self.turns, self._owners, self._whole, self._make = turns, owners, whole, make
        self.preimage: PreImage | None = None
        self._told = False

    def before_turn(self, version: int, number: int, within: bool) -> bool:
        """Copy the state that an optimizer is about to change in the update after ``version``. Never raises.

        Args:
            version: finished updates.
            number: number of the optimizer, from 0.
            within: whether training may have to stop inside of its step too.

        Returns:
            Whether training can go back to ``version``.
        """
        whole, owners = self._whole or self.turns.by_hand, self._owners[number]
        if not owners or (self.turns.is_last(number) and not (whole or within)):
            if self.preimage is not None:
                self.preimage.forget()
            return False
        if self.preimage is None:
            self.preimage = self._make()
        self.preimage.take(version, owners, modules=whole)
        return not self.preimage.broken

    def after_update(self) -> None:
        """Note that a version is finished; drop the copies if the loop has no backward pass between its steps."""
        if not (self.turns.several or self.turns.interleaved):
            return
        if not self.turns.stands_between:
            self.preimage = None
        elif self.turns.interleaved and self.preimage is not None and not self._told:
            self._told = True
            log.info(
                "the loop makes a backward pass between the optimizer steps of an iteration: %s bytes are copied in "
                "every iteration, so that the last version can be saved if a rank is lost between these steps",
                f"{self.preimage.nbytes:,}",
            )
