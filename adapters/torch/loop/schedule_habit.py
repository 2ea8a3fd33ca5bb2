"""Learns when a training loop steps an LR scheduler: before or after the update, and how often.

No hook reports the steps of a scheduler, and its class and methods must stay as they are. So its attributes are read.
Schedulers of torch count their steps, and a step ends by making a new list of the rates that it has set (``_last_lr``).
So a finished step can be told from one that still runs or that raised.
"""

from __future__ import annotations

from operator import sub
from typing import Any, NamedTuple

from torch import Tensor

PLAIN = frozenset({float, int, bool, str, type(None)})
"""Types of immutable values, which need no copy."""


class Reading(NamedTuple):
    """The state of a scheduler at one moment.

    Args:
        state: its ``state_dict()``, with copies of the containers in it.
        counters: the attributes in which it counts its steps; empty: it does not count them.
        rates: the list of rates that its last step has made; None: it makes no such list.
    """

    state: dict[str, Any]
    counters: tuple[int, ...]
    rates: Any

    def moved(self, now: Reading) -> bool:
        """Return whether a step began between this reading and ``now``, as far as can be told."""
        return now.counters != self.counters or now.rates is not self.rates


class Habit:
    """Learns how a loop steps one scheduler.

    Only the training thread may call ``post_step_ended`` and set ``leading``; other methods may be called on any.

    Args:
        scheduler: anything with ``step`` and ``state_dict``.
    """

    __slots__ = ("_form", "_inner", "leading", "scheduler", "single_steps", "steps_expected")

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._form: tuple[list[Any], list[type]] = [], []
        self._inner: list[Any] = []
        self.leading = False
        """Whether the loop steps the scheduler before the update."""
        self.single_steps = 0
        """Number of post-steps in a row, up to the last one, that had exactly one step of the scheduler."""
        self.steps_expected = 0
        """Number of steps of the scheduler in the last post-step."""

    def look(self, before: Reading | None = None) -> Reading:
        """Read the scheduler. Returns ``before`` itself if counters and rates show no step since."""
        counters, rates = counters_of(self.scheduler), getattr(self.scheduler, "_last_lr", None)
        tells = bool(counters) or rates is not None
        if before is not None and tells and rates is before.rates and counters == before.counters:
            return before
        return Reading(self._state(), counters, rates)

    def _state(self) -> dict[str, Any]:
        """Return a copy of the ``state_dict()``; later calls copy only those entries that can change in place."""
        state: dict[str, Any] = self.scheduler.state_dict()
        if type(state) is not dict:
            other: dict[str, Any] = copied(state)
            return other
        form = [*state], [*map(type, state.values())]
        if form != self._form:
            self._form, self._inner = form, [key for key, value in state.items() if type(value) not in PLAIN]
        found = state.copy()
        for key in self._inner:
            found[key] = copied(found[key])
        return found

    def steps_since(self, before: Reading, now: Reading | None = None) -> int:
        """Return the number of steps between ``before`` and ``now`` (None: this moment); 0 if they are not counted."""
        if now is before:
            return 0
        counters = counters_of(self.scheduler) if now is None else now.counters
        grown = max(map(sub, counters, before.counters), default=0)
        return 1 if grown > 1 and _counts_samples(self.scheduler) else grown

    def began(self, before: Reading) -> bool:
        """Return whether a step has begun since ``before``, as far as can be told."""
        return counters_of(self.scheduler) != before.counters or self.through(before)

    def through(self, before: Reading) -> bool:
        """Return whether a step that began since ``before`` has ended."""
        return getattr(self.scheduler, "_last_lr", None) is not before.rates

    def post_step_ended(self, steps: int) -> None:
        """Note that a post-step is over, in which the loop has stepped the scheduler ``steps`` times."""
        self.leading = self.leading and not steps
        self.single_steps = self.single_steps + 1 if steps == 1 else 0
        self.steps_expected = steps

    def learned(self, ended: int) -> bool:
        """Return whether the last two of ``ended`` updates (or the only one) were followed by exactly one step each."""
        return ended > 0 and self.single_steps >= min(2, ended)

    def done(self, before: Reading) -> bool:
        """Return whether the loop has made the scheduler's steps that follow an update.

        Args:
            before: the reading at the end of the last update.
        """
        if self.began(before) and not self.through(before):
            return False
        return self.steps_since(before) >= self.steps_expected if self.steps_expected else self.leading


def counters_of(scheduler: Any) -> tuple[int, ...]:
    """Return the counters of a scheduler's steps; for a container of schedulers, those of the first one."""
    steps, epoch = getattr(scheduler, "_step_count", None), getattr(scheduler, "last_epoch", None)
    if type(steps) is int:
        return (steps, epoch) if type(epoch) is int else (steps,)
    if type(epoch) is int:
        return (epoch,)
    if _counts_samples(scheduler):
        return (scheduler.num_steps,)
    for name in ("_schedulers", "schedulers", "scheduler"):
        inner = getattr(scheduler, name, None)
        first = inner[0] if isinstance(inner, (list, tuple)) and inner else inner
        if hasattr(first, "state_dict"):
            return counters_of(first)
    return ()


def _counts_samples(scheduler: Any) -> bool:
    """Return whether the scheduler is Megatron's, whose counter grows by the batch size in each step."""
    return type(getattr(scheduler, "num_steps", None)) is int and not hasattr(scheduler, "last_epoch")


def copied(value: Any) -> Any:
    """Return a copy of ``value``, with its containers and tensors copied too. Waits for no device."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is dict:
        return {key: item if type(item) in PLAIN else copied(item) for key, item in value.items()}
    if kind is list:
        return value.copy() if PLAIN.issuperset(map(type, value)) else [*map(copied, value)]
    if kind is tuple:
        return tuple([item if type(item) in PLAIN else copied(item) for item in value])
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (dict, list, set)) or kind.__module__ == "numpy" else value
