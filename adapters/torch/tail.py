"""The tail of an update: what changes just after ``optimizer.step()`` and belongs to the version all the same.

A version is finished when the optimizer's step is. ``scheduler.step()``, ``scaler.update()`` and an average of the
weights follow. So after each update the state of scheduler and scaler, and the param groups that the scheduler writes
into, are kept as they were when the tail was through; and the tail is *settled* when nothing of it is missing.

When that is, depends on the loop, and is learned from it. A scheduler stepped once after each update has settled with
that step. One that is stepped before the update (leading) is not part of the tail. For what cannot be watched (an
average of the weights, a scheduler stepped now and then) the next forward pass, or standing at the gate, is the proof.
When a save comes before the tail is through, the state says what was due.

An iteration that makes no version (a skipped step of the scaler) is repeated after a restore, so what it did to
scheduler and scaler is not kept: only the first tail after an update counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.job_state import JobState, Schedule
from ttp.adapters.torch.watch import watch_method
from ttp.errors import UsageError
from ttp.store.encoding import EncodingError, encode

log = logging.getLogger("ttp.adapters.torch")

Groups = list[dict[str, Any]]
"""The hyperparameters of an optimizer's param groups, without the parameters."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of one version.

    Args:
        version: finished updates.
        schedulers: ``state_dict()`` of each, containers copied.
        scaler: the scaler's numbers; on a device still tensors.
        groups: of each optimizer.
        scheduler_steps: how many of them are in it, of each scheduler.
        scaler_updates: the same.
    """

    version: int
    schedulers: tuple[dict[str, Any], ...]
    scaler: dict[str, Any] | None
    groups: list[Groups]
    scheduler_steps: tuple[int, ...]
    scaler_updates: int = 0


@dataclass(slots=True)
class _Habit:
    """What the loop does with one scheduler, as far as it is learned.

    Args:
        scheduler: the object.
        inside: its step, which belongs to the last version, is running.
        leading: it is stepped before the update.
        single_steps: the last so many tails had exactly one step.
        steps_expected: as many as the last tail had.
        watched: its steps are seen.
        stale: it was stepped since its state was last taken.
    """

    scheduler: Any
    inside: bool = False
    leading: bool = False
    single_steps: int = 0
    steps_expected: int = 0
    watched: bool = False
    stale: bool = True

    def settled(self, steps: int) -> bool:
        """Whether nothing more of it follows the last update, after so many steps."""
        if self.inside:
            return False
        return steps >= self.steps_expected if self.steps_expected else self.leading

    def learned(self, tails: int) -> bool:
        """Whether every update, or at least the last two, had exactly one step of it behind it."""
        return tails > 0 and self.single_steps >= min(2, tails)

    def state(self) -> Any:
        """Its ``state_dict()``, to keep."""
        return copied(self.scheduler.state_dict())


class Tail:
    """Follows one training loop. Methods of the training thread store to memory only; the others run on any thread.

    Args:
        optimizers: whose param groups belong to the version.
        scheduler: an LR scheduler, anything with ``step`` and ``state_dict``; or a list of them.
        scaler: a ``GradScaler``.
        averages: whether modules that follow the weights (EMA) are part of the tail.
        version: finished updates now.

    Raises:
        UsageError: the scheduler's state cannot be stored.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        averages: bool = False,
        version: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._habits = tuple(map(_Habit, listed(scheduler)))
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._averages = averages
        self._check()
        self._open = False  # what is stepped now belongs to the last version
        self._entered = True  # the next forward pass has begun since, or the thread stands at the gate
        self._tails = 0  # that have ended
        self._updates_expected = True
        self._previous = self._snapshot = self._take(version)
        self._unwatch = [self._watch(number, habit) for number, habit in enumerate(self._habits)]
        self._unwatch.append(watch_method(self._scaler, "update", lambda: None, self._scaler_updated))

    def _watch(self, number: int, habit: _Habit) -> Callable[[], None]:
        kind = type(habit.scheduler)
        undo = watch_method(
            habit.scheduler,
            "step",
            lambda: self._scheduler_begins(habit),
            lambda: self._scheduler_stepped(number, habit),
        )
        habit.watched = type(habit.scheduler) is not kind
        return undo

    @property
    def wants_forward(self) -> bool:
        """Whether ``forward_entered`` tells it anything."""
        return self._averages or bool(self._habits) or self._scaler is not None

    # --------------------------------------------------------------------------------------------- training thread

    def restored(self, version: int) -> None:
        """The objects hold the state of ``version``."""
        self._open, self._entered = False, True
        for habit in self._habits:
            habit.stale, habit.leading = True, False  # a step that loading made says nothing of the loop
        self._previous = self._snapshot = self._take(version)

    def forward_entered(self, training: bool) -> None:
        """A forward pass of the model begins; one for evaluation may come before the scheduler's step."""
        if self._open and training:
            self._end_tail()
        self._entered = True

    def at_gate(self) -> None:
        """The next update is about to begin, or to wait."""
        if self._open:
            self._end_tail()
        self._entered = True

    def update_finished(self, version: int, *, whole: bool = False) -> None:
        """The copy is of ``version`` now.

        Args:
            version: finished updates.
            whole: the tail is through too: the user says when a step is done.
        """
        self._previous, self._snapshot = self._snapshot, self._take(version)
        for habit in self._habits:
            habit.inside = False
        self._entered, self._open = whole, not whole

    def step_done(self) -> None:
        """The tail of the last version is through: the user says so."""
        last = self._snapshot
        for habit in self._habits:
            habit.stale = True
        self._snapshot = self._take(last.version, last.scheduler_steps, last.scaler_updates)
        self._open, self._entered = False, True

    def _end_tail(self) -> None:
        self._open = False
        self._tails += 1
        for habit, steps in zip(self._habits, self._snapshot.scheduler_steps, strict=True):
            habit.single_steps = habit.single_steps + 1 if steps == 1 else 0
            habit.steps_expected = steps
        self._updates_expected = self._snapshot.scaler_updates > 0

    def _scheduler_begins(self, habit: _Habit) -> None:
        habit.inside, habit.stale = self._open, True
        if not self._open and self._scaler is None:  # with a scaler it may be the step after a skipped update
            habit.leading = True

    def _scheduler_stepped(self, number: int, habit: _Habit) -> None:
        if self._open:
            last = self._snapshot
            steps = list(last.scheduler_steps)
            steps[number] += 1
            self._snapshot = self._take(last.version, tuple(steps), last.scaler_updates)
        habit.inside = False

    def _scaler_updated(self) -> None:
        if self._open:
            last = self._snapshot
            self._snapshot = self._take(last.version, last.scheduler_steps, last.scaler_updates + 1)

    # -------------------------------------------------------------------------------------------------- any thread

    def settled(self) -> bool:
        """Whether everything that follows the last update has been done."""
        if self._entered:
            return True
        last = self._snapshot
        schedules = all(h.settled(steps) for h, steps in zip(self._habits, last.scheduler_steps, strict=True))
        return schedules and self._scaler_settled(last) and not self._averages

    def foreseen(self) -> bool:
        """Whether what is still to follow the last update is known, so that a save can say what is due."""
        return not self._averages and all(habit.leading or habit.learned(self._tails) for habit in self._habits)

    def _scaler_settled(self, last: _Snapshot) -> bool:
        return self._scaler is None or last.scaler_updates > 0 or (self._tails > 0 and not self._updates_expected)

    def job_state(self, version: int) -> JobState:
        """Scheduler and scaler as they belong to ``version``, with what was still due.

        Of another version than the last two, the state is that of now.
        """
        entered, inside = self._entered, [habit.inside for habit in self._habits]  # before what may follow them
        found = self._of(version)
        open_ended = found.version == self._snapshot.version and not entered
        schedules = [
            Schedule(state, open_ended and steps == 0 and (now or habit.learned(self._tails)))
            for state, steps, now, habit in zip(
                found.schedulers, found.scheduler_steps, inside, self._habits, strict=True
            )
        ]
        scaler_pending = open_ended and not self._scaler_settled(found)
        return JobState.of(version, schedules, _scaler_state(found.scaler), scaler_pending)

    def param_groups(self, version: int) -> list[Groups]:
        """The hyperparameters of ``version``, per optimizer: a leading scheduler has changed the live ones already."""
        return self._of(version).groups

    def skipped(self) -> bool:
        """Whether the scaler has left out a step at its last update. Waits for the device: for rare cases."""
        if self._scaler is None:
            return False
        now, before = _scaler_state(_scaler_numbers(self._scaler)), _scaler_state(self._snapshot.scaler)
        assert now is not None and before is not None
        return bool(now["_growth_tracker"] == 0 and now["scale"] <= before["scale"])

    def close(self) -> None:
        """Let go of scheduler and scaler."""
        for undo in self._unwatch:
            undo()

    # ----------------------------------------------------------------------------------------------------- snapshots

    def _of(self, version: int) -> _Snapshot:
        for found in (self._snapshot, self._previous):
            if found.version == version:
                return found
        log.warning("the schedule of version %d is not kept; the present one is taken", version)
        return self._take(version)

    def _take(self, version: int, scheduler_steps: tuple[int, ...] = (), scaler_updates: int = 0) -> _Snapshot:
        schedulers = tuple(map(self._scheduler_state, range(len(self._habits))))
        scaler = None if self._scaler is None else _scaler_numbers(self._scaler)
        groups = [[_without_parameters(group) for group in opt.param_groups] for opt in self._optimizers]
        steps = scheduler_steps or (0,) * len(self._habits)
        return _Snapshot(version, schedulers, scaler, groups, steps, scaler_updates)

    def _scheduler_state(self, number: int) -> Any:
        habit = self._habits[number]
        kept: Any = None if habit.stale or not habit.watched else self._snapshot.schedulers[number]
        habit.stale = False
        return habit.state() if kept is None else kept

    def _check(self) -> None:
        for habit in self._habits:
            try:
                encode(habit.state(), "scheduler.state_dict()")
            except EncodingError as problem:
                raise UsageError(f"the state of the scheduler cannot be stored: {problem}") from problem


def listed(one_or_several: Any) -> list[Any]:
    """What was given where one object, None, or a list of both may be: the objects."""
    if isinstance(one_or_several, (list, tuple)):
        return [each for each in one_or_several if each is not None]
    return [] if one_or_several is None else [one_or_several]


_PLAIN = frozenset({float, int, bool, str, type(None)})


def copied(value: Any) -> Any:
    """``value`` with its containers and tensors copied, so that it stays as it is; nothing waits for a device."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: item if type(item) in _PLAIN else copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _PLAIN else copied(item) for item in value]
    if kind is tuple:
        return tuple([item if type(item) in _PLAIN else copied(item) for item in value])
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (dict, list, set)) else value


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value if type(value) in _PLAIN else copied(value) for key, value in group.items() if key != "params"}


def _scaler_numbers(scaler: Any) -> dict[str, Any]:
    """What ``state_dict()`` shows, before it waits for the device to show it."""
    try:
        scale, tracker = scaler._scale, scaler._growth_tracker
        return {
            "scale": scaler._init_scale if scale is None else scale.detach().clone(),
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker.detach().clone(),
        }
    except AttributeError:  # another torch
        return dict(scaler.state_dict())


def _scaler_state(numbers: dict[str, Any] | None) -> dict[str, Any] | None:
    if numbers is None:
        return None
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in numbers.items()}
