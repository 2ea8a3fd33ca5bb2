"""Copies state so that a rank that stands between two steps of one version can go back to the version before.

A GAN steps its critic, learns again, and steps its generator. If a rank is killed in that second pass, the others hold
one network of version n + 1 and one of version n. Neither version can be saved then, and waiting does not help: they
wait for the dead rank. So before each step but the last of a version, what it is going to change (parameters and
optimizer state) is copied, as ``undo="preimage"`` does for everything; a rank between two steps goes back to version n.

When the step that ends a version begins, the copies are worthless. That step is copied too in two cases: where ranks
may have to go back from the finished version, because other shards may be unable to make it; and where the loop itself
says when a version ends.

Two more kinds of loops are treated alike: a step that evaluates its closure after it may have written (LBFGS,
sharpness-aware optimizers), inside of which a rank may stand; and one optimizer that steps several times before the
loop says that a version is done (the epochs of PPO over its buffer).

Until it is known whether the loop learns between the steps, copies are made; if it does not, they are given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.saving.preimage import PreImage

log = logging.getLogger("ttp.adapters.torch")


class BetweenSteps:
    """Copies what is needed to go back to the last version between two steps of the next. For the training thread.

    Args:
        turns: says which optimizers step in a version, and in which order.
        owners: for each of these optimizers, the optimizers that keep its state.
        whole: whether the last step of a version is copied too.
        make: returns a ``PreImage`` that has not allocated memory.
    """

    def __init__(
        self, turns: Turns, owners: Sequence[Sequence[Optimizer]], whole: bool, make: Callable[[], PreImage]
    ) -> None:
        self.turns, self._owners, self._whole, self._make = turns, owners, whole, make
        self.preimage: PreImage | None = None
        self._told = False

    def before_turn(self, version: int, number: int, within: bool) -> bool:
        """Copy what this optimizer is about to change, in the update after ``version``. Never raises.

        Args:
            version: finished updates.
            number: number of the optimizer, from 0.
            within: training may also be interrupted inside of its step.

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
        """Note that a version is finished, and drop the copies if the loop does not learn between its steps."""
        if not (self.turns.several or self.turns.interleaved):
            return
        if not self.turns.stands_between:
            self.preimage = None
        elif self.turns.interleaved and self.preimage is not None and not self._told:
            self._told = True
            log.info(
                "the loop learns between the steps of an iteration: %.1f MB are copied in every iteration, so that a "
                "rank that stands between them can be gone back to the last version",
                self.preimage.nbytes / 1e6,
            )
