"""Detects a loop that writes to the weights between the backward passes of one iteration, or between the last of them
and the step, outside of any step.

Loops around sharpness-aware optimizers do the first (SAM: ``first_step()`` moves the weights to where the second
gradient is taken). Adversarial trainings and binary networks do the second: they change the weights for the forward and
the backward pass, and put them back before the step. No hook reports it, and a checkpoint made in between would hold
weights of no version. So the weights are compared in a few iterations after the first one, in which layers may still
initialise themselves; and in all iterations if an optimizer has a ``first_step()`` and a ``second_step()``. torch's
version counter alone shows nothing: layers write values to their weights that they have already (they clamp them, or
move them to other memory).

Between backward passes samples are compared where the next forward pass begins, as that may change weights itself: it
shortens rows of an embedding (``max_norm``), or normalises weights (EDM2). A loop that skips a step, and then clips or
normalises the weights as after each step, changes them between two backward passes too, but seldom. So a few iterations
have to show such a change. Before the step nothing may have changed, so each weight on the host is compared as a whole.

In the same iterations it is noted which parameters are frozen and trained again within an iteration (a GAN's networks),
and whether gradients outlive the step, set to zero instead of None. The first forward pass shows whether the program
has loaded other weights over those that were restored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.exchange import tells
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.tensor_memory import is_plain, sample_of
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

_STEPS_WATCHED = range(1, 6)
_SEEN_MAX = 3
"""Number of iterations with a change between their backward passes after which the loop is refused."""
_FREEZING_WATCHED = 50
"""Number of first steps in which parameters that were frozen once may be trained again: a generator's turn is rare."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BETWEEN = "the weights were changed between two backward passes of one iteration, "
_SKIPPED = (
    "the weights were changed between two backward passes, and no step was made there. If the loop has skipped it (a "
    "gradient that is not finite), and changes weights in such an iteration too, a run that resumes in it may change "
    "them once more. A loop that does so in every iteration is refused soon"
)
_OVERWRITTEN = (
    "%d of %d weights were changed between ttp.restore() and the first forward pass: if the program has loaded others "
    "(a pretrained model, a checkpoint of its own), training goes on from those, and not from the checkpoint that was "
    "restored. Load them before ttp.restore(), or only if it returns 0"
)
_NO_VERSION = (
    "outside of optimizer.step(): a checkpoint made in between would hold weights of no version. With SAM and similar "
    "optimizers, call optimizer.step(closure), which does both halves inside of one step, instead of first_step() and "
    "second_step(). A loop that changes weights itself has to do so right after the step() of the optimizer. One that "
    "changes them for a forward and a backward pass only can call the model with other ones instead: "
    "torch.func.functional_call(model, changed, inputs)"
)


class _Look(NamedTuple):
    """A parameter at one moment.

    Args:
        version: torch's version counter.
        sample: some of its bytes.
        whole: a sum that stands for all of them.
    """

    version: int
    sample: Tensor
    whole: Tensor


@dataclass
class Habits:
    """What a loop does with its parameters, as far as its first iterations have shown it.

    Args:
        toggled: identities of the parameters whose ``requires_grad`` it changes to and fro.
        zeroes: whether the gradients of a step are still there when the next forward pass begins, as those that
            ``zero_grad(set_to_none=False)`` sets to zero; None: not known yet.
    """

    toggled: set[int] = field(default_factory=set)
    zeroes: bool | None = None


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
        self._mark: list[_Look] | None = None
        self._seen = set[int]()  # the iterations with a change between backward passes
        self._trained = [p.requires_grad for p in self._every]
        self._changes: Counter[int] = Counter()
        self._with_gradient: list[Tensor] = []  # at the last step, until the next forward pass
        self._restored: list[_Look] | None = None  # the weights after a restore, until the first pass or step
        self.habits = Habits()

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

    def restored(self, zeroed: bool) -> None:
        """Note that a restore has written the weights.

        Args:
            zeroed: whether the loop was known to set gradients to zero: a save may come before it has shown it again.
        """
        self.habits.zeroes = zeroed or None
        with suppress(Exception):  # not all weights can be read, and this is only for a message
            self._restored = self._look(whole=False)

    def forward(self) -> None:
        """Check the weights at the beginning of a forward pass outside of any step. What it changes itself is its own.

        Raises:
            UsageError: as ``backward`` does.
        """
        if self._mark is not None:
            self._compare()
            self._mark = None
        if self._restored is not None:
            self._look_for_other_weights(self._restored)
            self._restored = None
        if self._with_gradient:
            left = all(p.grad is not None for p in self._with_gradient)
            self.habits.zeroes, self._with_gradient = left and self.habits.zeroes is not False, []

    def backward(self) -> None:
        """Check the weights at the beginning of a backward pass outside of any step.

        Raises:
            UsageError: in several iterations they have changed since the last backward pass, with no step in between.
                The first time is enough for an optimizer that has both halves of a step.
        """
        self._look_at_freezing()
        if self._steps in _STEPS_WATCHED or self._always:
            self._compare()

    def _compare(self) -> None:
        if not self._changed(whole=False):
            return
        said = bool(self._seen)
        self._seen.add(self._steps)
        if self._always or len(self._seen) >= _SEEN_MAX:
            raise UsageError(_BETWEEN + _NO_VERSION)
        if not said and tells():
            log.warning(_SKIPPED)

    def before_step(self) -> None:
        """Check the weights when a step begins, or has evaluated its closure.

        Raises:
            UsageError: the weights have changed since the last backward pass, with no step in between.
        """
        self._with_gradient = [p for p in self._every if p.grad is not None]
        self._restored = None  # a loop that calls no ``forward`` changes the weights by its step now
        if self._mark is not None and self._changed(whole=True):
            raise UsageError(f"the weights were changed between the backward pass and the step, {_NO_VERSION}")

    def _changed(self, *, whole: bool) -> bool:
        """Return whether the weights have changed since the last look, and keep what they are now."""
        try:
            last, self._mark = self._mark, self._look()
            pairs = [] if last is None else [*zip(self._parameters, last, self._mark, strict=True)]
            return any(self._has_changed(p, before, now, whole=whole) for p, before, now in pairs)
        except Exception:
            log.warning("ttp does not see whether the weights change between steps; training goes on", exc_info=True)
            self._always, self._steps, self._mark = False, _STEPS_WATCHED.stop, None
            return False

    def _look_for_other_weights(self, restored: Sequence[_Look]) -> None:
        with suppress(Exception):
            changed = [*map(self._has_changed, self._parameters, restored, self._look(whole=False))]
            if any(changed) and tells():
                log.error(_OVERWRITTEN, sum(changed), len(changed))

    def _look_at_freezing(self) -> None:
        now = [p.requires_grad for p in self._every]
        if now != self._trained:
            changed = (id(p) for p, one, other in zip(self._every, now, self._trained, strict=True) if one != other)
            self._changes.update(changed)
            self._trained = now
            self.habits.toggled.update(each for each, count in self._changes.items() if count > 1)

    def _look(self, *, whole: bool = True) -> list[_Look]:
        samples = [(p, sample_of(p)) for p in self._parameters]
        return [_Look(p._version, sample, self._whole(p, sample) if whole else sample) for p, sample in samples]

    def _whole(self, parameter: Tensor, sample: Tensor) -> Tensor:
        """Return the sum of all elements as whole numbers, which does not depend on their order, or only the sample.

        The sum wraps around: one in more bits than the elements have takes several times as long.
        """
        kind = _INTEGERS.get(parameter.element_size())
        if kind is None or not is_plain(parameter) or not self._on_host(parameter):
            return sample
        return parameter.detach().view(kind).sum(dtype=kind)

    def _has_changed(self, parameter: Tensor, before: _Look, now: _Look, *, whole: bool = False) -> bool:
        if before.version == now.version and not self._on_host(parameter):
            return False  # without a wait for the device
        if before.sample.shape != now.sample.shape:
            return False  # it is in lower precision for the passes only
        return not torch.equal(before.sample, now.sample) or (whole and not torch.equal(before.whole, now.whole))
