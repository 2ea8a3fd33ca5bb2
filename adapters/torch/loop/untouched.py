"""Detects a loop that writes to the weights between the backward passes of one iteration, outside of any step.

Loops around sharpness-aware optimizers do this (SAM: ``first_step()`` moves the weights to where the second gradient is
taken). No hook reports it, and a checkpoint made in between would hold weights of no version. So the weights are
compared in a few iterations after the first one, in which layers may still initialise themselves; and in all
iterations if an optimizer has a ``first_step()`` and a ``second_step()``.

In the same iterations it is noted which parameters are frozen and trained again within an iteration (a GAN's networks).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import copied_bytes
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

_STEPS_WATCHED = range(1, 6)
_COPIED = 4
_COPIED_BYTES_MAX = 1 << 16

_Mark = tuple[list[int], list[bytes]]


class Untouched:
    """Compares the weights between the backward passes of one iteration. For the training thread.

    Args:
        optimizers: the optimizers as the user gave them; their parameters are compared.
        on_host: returns whether a tensor is on the host: only there can its values be compared without waiting for a
            device.
    """

    def __init__(self, optimizers: Sequence[Optimizer], on_host: Callable[[Tensor], bool]) -> None:
        self._every = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        self._parameters = [p for p in self._every if p.requires_grad and not is_distributed(p)]
        small = [p for p in self._parameters if on_host(p) and 0 < p.nbytes <= _COPIED_BYTES_MAX]
        self._small = sorted(small, key=lambda p: p.nbytes)[:_COPIED]
        self._always = any(hasattr(each, "first_step") and hasattr(each, "second_step") for each in optimizers)
        self._steps = 0
        self._mark: _Mark | None = None
        self._trained = [p.requires_grad for p in self._every]
        self._changes: Counter[int] = Counter()
        self.toggled: set[int] = set()
        """Identities of the parameters whose ``requires_grad`` the loop changes to and fro."""

    def stepped(self) -> bool:
        """Note that a step has changed the weights.

        Returns:
            Whether ``backward`` still has to be called from now on.
        """
        self._mark = None
        self._steps += 1
        self._look_at_freezing()
        return self._always or self._steps <= _STEPS_WATCHED[-1]

    def backward(self) -> None:
        """Check the weights at the beginning of a backward pass outside of any step.

        Raises:
            UsageError: the weights have changed since the last backward pass, with no step in between.
        """
        self._look_at_freezing()
        if self._steps not in _STEPS_WATCHED and not self._always:
            return
        try:
            mark = self._look()
        except Exception:
            log.warning("ttp does not see whether the weights change between steps; training goes on", exc_info=True)
            self._always, self._steps = False, _STEPS_WATCHED.stop
            return
        if self._mark not in (None, mark):
            raise UsageError(
                "the weights were changed between two backward passes of one iteration, outside of optimizer.step(): a "
                "checkpoint made in between would hold weights of no version. With SAM and similar optimizers, call "
                "optimizer.step(closure), which does both halves inside of one step, instead of first_step() and "
                "second_step(). A loop that changes weights itself has to do so in the step() of an optimizer"
            )
        self._mark = mark

    def _look_at_freezing(self) -> None:
        now = [p.requires_grad for p in self._every]
        if now != self._trained:
            changed = (id(p) for p, one, other in zip(self._every, now, self._trained, strict=True) if one != other)
            self._changes.update(changed)
            self._trained = now
            self.toggled.update(each for each, count in self._changes.items() if count > 1)

    def _look(self) -> _Mark:
        return [p._version for p in self._parameters], [copied_bytes(p) for p in self._small]
