"""What training may stand between: the steps of several optimizers that make one version, with learning in between.

A GAN steps its critic, learns again, and steps its generator. A rank may be killed in that second pass; those that are
left have one network of version n + 1 and one of version n. Nothing can be saved of that, and waiting does not help:
they wait for the dead one. So before each step but the last of a version, what it is going to change (parameters and
optimizer state) is copied, as ``undo="preimage"`` does for all; and who stands between is gone back to version n.

The step that ends a version makes what was kept worthless when it begins. It is copied too where the way back may lead
from the finished version, because other shards may not be able to make it, and where the loop says itself when a
version ends.

A step that evaluates its closure when it may have written (LBFGS, sharpness-aware optimizers) is stood in likewise, and
what it changes is copied before it.

A loop of one optimizer that steps several times before it says that a version is done (the epochs of PPO over its
buffer) stands between these steps likewise.

Until it is known whether the loop learns between the steps, copies are made; where it does not, they are given up.
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
        turns: of the optimizers.
        owners: of each of them, those that keep the state.
        whole: the last step of a version is copied too.
        make: a ``PreImage`` without memory.
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
            number: of the optimizer, from 0.
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
        """A version is finished."""
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
