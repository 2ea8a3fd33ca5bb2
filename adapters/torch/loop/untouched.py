"""Detects a loop that writes to the weights between the backward passes of one iteration, outside of any step.

Loops around sharpness-aware optimizers do this (SAM: ``first_step()`` moves the weights to where the second gradient is
taken). No hook reports it, and a checkpoint made in between would hold weights of no version. So samples of the weights
are compared in a few iterations after the first one, in which layers may still initialise themselves; and in all
iterations if an optimizer has a ``first_step()`` and a ``second_step()``. torch's version counter alone shows nothing:
layers write values to their weights that they have already (they clamp them, or move them to other memory).

In the same iterations it is noted which parameters are frozen and trained again within an iteration (a GAN's networks).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.tensor_memory import sample_of
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

_STEPS_WATCHED = range(1, 6)
_FREEZING_WATCHED = 50
"""Number of first steps in which parameters that were frozen once may be trained again: a generator's turn is rare."""

_Mark = list[tuple[int, Tensor]]


class Untouched:
    """Compares the weights between the backward passes of one iteration. For the training thread.

    Args:
        optimizers: the optimizers as the user gave them; their parameters are compared.
        on_host: returns whether a tensor is on the host. Others are compared only if the version counter has moved,
            because that waits for their device.
    """

    def __init__(self, optimizers: Sequence[Optimizer], on_host: Callable[[Tensor], bool]) -> None:
        self._every = [*parameters_of(*optimizers)]
        self._parameters = [p for p in self._every if p.requires_grad and p.numel() and not is_distributed(p)]
        self._on_host = on_host
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
        turns = self._steps <= _FREEZING_WATCHED and 1 in self._changes.values()
        return self._always or turns or self._steps <= _STEPS_WATCHED[-1]

    def backward(self) -> None:
        """Check the weights at the beginning of a backward pass outside of any step.

        Raises:
            UsageError: the weights have changed since the last backward pass, with no step in between.
        """
        self._look_at_freezing()
        if self._steps not in _STEPS_WATCHED and not self._always:
            return
        try:
            mark, last = self._look(), self._mark
            changed = last is not None and any(map(self._has_changed, self._parameters, last, mark))
        except Exception:
            log.warning("ttp does not see whether the weights change between steps; training goes on", exc_info=True)
            self._always, self._steps = False, _STEPS_WATCHED.stop
            return
        if changed:
            raise UsageError(
                "the weights were changed between two backward passes of one iteration, outside of optimizer.step(): a "
                "checkpoint made in between would hold weights of no version. With SAM and similar optimizers, call "
                "optimizer.step(closure), which does both halves inside of one step, instead of first_step() and "
                "second_step(). A loop that changes weights itself has to do so right after the step() of the optimizer"
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
        return [(p._version, sample_of(p)) for p in self._parameters]

    def _has_changed(self, parameter: Tensor, before: tuple[int, Tensor], now: tuple[int, Tensor]) -> bool:
        look = before[0] != now[0] or self._on_host(parameter)
        return look and not torch.equal(before[1], now[1])
