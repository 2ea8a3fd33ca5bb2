"""Keeps the state of schedulers and scaler after each update's post-step, as part of the version.

A version is finished when the optimizer's step is. The *post-step* follows, up to the next forward pass:
``scheduler.step()``, ``scaler.update()``, an average of the weights. After each update the state of schedulers and
scaler, and the param groups that the schedulers write into, are kept as they were after the last of these calls.

Which calls a loop makes is learned from the loop. If it steps a scheduler once after each update, the post-step is over
with that step. A scheduler that is stepped before the update (*leading*) is not part of the post-step. Calls that leave
no trace (an average of the weights) or are irregular (a scheduler that is stepped now and then) are known to be over
when the next forward pass begins, or the thread waits at the gate. If a save comes earlier, the saved state names the
calls that were still due.

An iteration in which no optimizer steps makes no version (``GradScaler`` skips the step). It is repeated after a
restore, so its changes to scheduler and scaler are not kept: only the first post-step after an update counts. An
optimizer that applies the scale itself (``fused=True``) steps in such an iteration too, and its device decides to
write nothing. That is a version like any other, in which only the scale differs from the version before.

A wrapper may set a hyperparameter for the step of the optimizer inside, and put it back behind that step: LARC takes
the weight decay away. The first iterations show which those are: they have one value in two forward passes, and another
when the step between them has ended. That is the value of neither version, so the one of the forward pass is kept: of
the one that follows the update, once that has begun, as a schedule may write the same hyperparameter.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ttp.adapters.torch.device.accelerator import (
    AHEAD_MAX,
    NUMBER_S,
    AllEvents,
    Event,
    Fence,
    Numbers,
    Runtime,
    holder,
    poll,
)
from ttp.adapters.torch.local_state.hyperparameters import Hyperparameters, ParamGroups, PutBack, hyperparameters_of
from ttp.adapters.torch.loop.scaler_reading import ScalerReading, read_scaler
from ttp.adapters.torch.loop.schedule_habit import Habit, Reading
from ttp.adapters.torch.loop.unwrap_optimizer import listed
from ttp.adapters.torch.saving.job_state import JobState, Schedule
from ttp.errors import CheckpointError, ToldAs, UsageError
from ttp.store.encoding import EncodingError, encode

_READS_MAX = 20
_LEARNING_UPDATES = 5
"""Number of updates of a launch in which it is learned which hyperparameters are put back behind each step."""


class PostStep(enum.Enum):
    """How far the loop is behind its last update."""

    OPEN = "schedulers and scaler may still follow the update"
    ENTERED = "an evaluation has begun: they may follow, but a save does not wait for them"
    OVER = "what they do now does not belong to the update"


_OPEN, _ENTERED, _OVER = PostStep  # looking them up in the class takes longer


class _Snapshot(NamedTuple):
    """The states of schedulers, scaler and param groups that belong to one version.

    Args:
        version: finished updates.
        schedules: a reading of each scheduler.
        groups: the hyperparameters of each optimizer.
        scale: the reading of the scaler; None: there is none.
        usual: the hyperparameters of the forward pass before the update, or after it if that was seen; None: of none.
        copied: the event behind the copies of hyperparameters and of schedules' tensors on a device; None: none are.
    """

    version: int
    schedules: tuple[Reading, ...]
    groups: Hyperparameters
    scale: ScalerReading | None = None
    usual: Hyperparameters | None = None
    copied: Event | None = None


class PostStepState:
    """Follows the post-steps of one training loop.

    The methods for the training thread only write to memory. The others may be called on any thread.

    Args:
        optimizers: the optimizers whose param groups belong to the version.
        scheduler: an LR scheduler (anything with ``step`` and ``state_dict``), or a list of them; None: none.
        scaler: a ``GradScaler``, or None.
        averages: whether averages of the weights (EMA) are part of the post-step.
        runtimes: the devices of the training.

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
        runtimes: Sequence[Runtime] = (),
    ) -> None:
        self._runtimes, self._numbers, self._followed = runtimes, Numbers(runtimes), Fence(runtimes)
        self._optimizers = tuple(optimizers)
        self._habits = tuple(map(Habit, listed(scheduler)))
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._averages = averages
        self._check()
        self._stage = _OVER
        self._ended = 0  # number of post-steps whose end was seen
        self._updates_expected = True  # scaler.update() was called in the last post-step
        self._older: deque[_Snapshot] = deque(maxlen=AHEAD_MAX)
        self._put_back = PutBack()
        self._snapshot = self._take(0)

    # --------------------------------------------------------------------------------------------- training thread

    def followed(self) -> None:
        """Note that the program changes tensors after updates, as an average of the weights does."""
        self._averages = True

    def restored(self, version: int) -> None:
        """Note that the objects hold the state of ``version``."""
        for habit in self._habits:
            habit.leading = False  # a step that was made while loading says nothing about the loop
        self._older.clear()
        self._put_back.begin()
        self._snapshot = self._take(version)
        self._stage = _OVER
        self._followed.record(version)

    def forward_entered(self, training: bool) -> None:
        """Note that a forward pass begins. An evaluation may precede the scheduler's step: it ends no post-step."""
        queues = self._runtimes and (self._stage is not _OVER or self._snapshot.copied is not None)
        if queues and any(runtime.capturing() for runtime in self._runtimes):
            return  # what is queued on a device now would become part of the CUDA graph: the gate is early enough
        if training and self._put_back.looked not in (None, self._snapshot.version):
            self._look_at_settings()
        if self._stage is _OVER:
            return
        if training:
            self._end_post_step()
        elif self._stage is _OPEN:
            self._followed.record(self._snapshot.version)
            self._stage = _ENTERED

    def _look_at_settings(self) -> None:
        """Note the hyperparameters of the iteration that begins: a schedule may have changed them too."""
        last = self._snapshot
        now = hyperparameters_of(self._optimizers, last.groups)
        self._snapshot = last._replace(usual=now)
        self._put_back.look(now, last.groups, last.version, learning=self._ended < _LEARNING_UPDATES)

    def at_gate(self) -> None:
        """Note that the next update is about to begin."""
        if self._stage is not _OVER:
            self._end_post_step()

    def update_finished(self, version: int, whole: bool = False) -> None:
        """Note that an update is finished.

        Args:
            version: number of finished updates.
            whole: whether its post-step is over too, because the user's loop declares when a step is done.
        """
        last = self._snapshot
        self._older.append(last)
        if whole:
            self._put_back.end()  # what was changed for the step only has been put back
        now = self._snapshot = self._take(version, last)
        if self._stage is _OVER and not whole and self._scaler is None:  # a scaler may have skipped an update before
            for habit, before, after in zip(self._habits, last.schedules, now.schedules, strict=True):
                habit.leading = habit.leading or before.moved(after)
        self._stage = _OVER if whole else _OPEN

    def step_done(self) -> None:
        """Note that the user's loop has declared the step done, post-step included."""
        self._followed.record(self._snapshot.version)
        self._snapshot = self._after(self._snapshot, training=True)
        self._stage = _OVER

    def _end_post_step(self) -> None:
        last = self._snapshot
        self._followed.record(last.version)  # before the stage, by which a thread that saves knows that it was queued
        now = self._after(last, training=True)
        for habit, before, after in zip(self._habits, last.schedules, now.schedules, strict=True):
            habit.post_step_ended(habit.steps_since(before, after))
        self._updates_expected = now.scale is not None and now.scale.updated
        self._ended += 1
        self._stage = _ENTERED  # before the snapshot: a thread that reads the new one must find no call due after it
        self._snapshot = now
        self._stage = _OVER

    # -------------------------------------------------------------------------------------------------- any thread

    def done(self) -> bool:
        """Return whether the post-step of the last update is over."""
        if self._stage is not _OPEN:
            return True
        last = self._snapshot
        schedules = all(habit.done(before) for habit, before in zip(self._habits, last.schedules, strict=True))
        scaled = last.scale is None or last.scale.was_updated() or self._never_updates
        return schedules and scaled and not (self._averages or self._in_doubt)

    def done_on_devices(self, version: int) -> bool:
        """Return whether devices that have finished ``version`` have done what follows it, if that was queued.

        An average of the weights is queued there, behind the event of the version. If the loop is not known to change
        tensors there, a device that hangs behind the version has all of it.
        """
        return not self._averages or self._followed.passed(version)

    def foreseen(self) -> bool:
        """Return whether it is known which calls follow an update, so that a save can record them as due."""
        known = all(habit.leading or habit.learned(self._ended) for habit in self._habits)
        return known and not (self._averages or self._in_doubt)

    @property
    def _in_doubt(self) -> bool:
        """Whether the first step has changed hyperparameters: the next forward pass shows whether they are put back."""
        usual = self._snapshot.usual
        return not (self._ended or self._habits or usual is None or self._snapshot.groups is usual)

    @property
    def _never_updates(self) -> bool:
        """Whether the loop was seen not to call ``scaler.update()`` after an update."""
        return self._ended > 0 and not self._updates_expected

    def job_state(self, version: int) -> JobState:
        """Return the states of scheduler and scaler that belong to ``version``, with the calls that are still due.

        Tensors in them may be on a device.

        Raises:
            CheckpointError: the state of that version is not kept, or numbers did not arrive from the device.
        """
        stage = self._stage  # read before the snapshot, which may be replaced meanwhile
        found, due = self._read(version)
        _wait_for(found)
        schedules = [Schedule(each.state, now) for each, now in zip(found.schedules, due, strict=True)]
        if (scale := found.scale) is None:
            return JobState.of(version, schedules)
        pending = found.version == self._snapshot.version and self._update_is_due(scale, stage)
        job = JobState.of(version, schedules, scale.state(), pending)
        return replace(job, scaler_skipped=pending and scale.skips())

    def _update_is_due(self, scale: ScalerReading, stage: PostStep) -> bool:
        """Return whether a ``scaler.update()`` follows the last update, or has followed it and is not in ``scale``."""
        if scale.updated:
            return False
        return (stage is _OPEN and not self._never_updates) or (scale.elsewhere and scale.was_updated())

    def param_groups(self, version: int, job: JobState | None = None) -> list[ParamGroups]:
        """Return the hyperparameters of ``version``, per optimizer.

        The live ones may be newer: a leading scheduler may have changed them already.

        Args:
            version: number of finished updates.
            job: a result of ``job_state``, to get the groups of the same moment; None: those of this moment.
        """
        found = self._of(version)
        if job is not None and found.schedules and job.schedules[0].state is found.schedules[0].state:
            return self._groups(found)
        return self._groups(self._read(version)[0])

    def _groups(self, found: _Snapshot) -> list[ParamGroups]:
        _wait_for(found)
        groups = [each.groups() for each in found.groups]
        return groups if found.usual is None else self._put_back.applied(groups, found.usual)

    def _read(self, version: int) -> tuple[_Snapshot, list[bool]]:
        """Return the snapshot of ``version``, and for each scheduler whether a step is due after it.

        During the post-step the training thread may be changing the objects that are read here. So the result is either
        a reading that is known to be of one moment, or the snapshot that was taken when the update ended.
        """
        for _ in range(_READS_MAX):
            last, stage = self._snapshot, self._stage
            found = self._of(version)
            if found is not last or stage is _OVER:
                return found, [False] * len(self._habits)
            due = self._due(last, stage)
            if any(due):
                return self._after(last, schedules=False), due
            now = self._after(last)
            moment = self._snapshot is last and self._stage is not _OVER
            if moment and not any(map(Habit.began, self._habits, now.schedules)):
                return now, due
        return self._snapshot, [False] * len(self._habits)

    def _due(self, last: _Snapshot, stage: PostStep) -> list[bool]:
        """Return for each scheduler whether a step is due after ``last``; all False: they can be read as they are.

        They cannot if one is in the middle of its step, has set rates on a device, or has not begun a step that the
        loop is known to make. Then a step that was begun is due too, because ``last`` has the state before it.
        """
        pairs = [*zip(self._habits, last.schedules, strict=True)]
        began = [habit.began(before) for habit, before in pairs]
        half = any(habit.began(before) and not habit.through(before) for habit, before in pairs)
        on_device = last.copied is not None and any(began)  # a thread that saves does not read rates on a device
        expected = [stage is _OPEN and habit.learned(self._ended) for habit in self._habits]
        due = [one or other for one, other in zip(began, expected, strict=True)]
        return due if half or on_device or due != began else [False] * len(due)

    def skipped(self) -> bool:
        """Return whether the scaler skipped the last step. Waits for the device."""
        scale = self._snapshot.scale
        return scale is not None and scale.skipped_since()

    # ----------------------------------------------------------------------------------------------------- snapshots

    def _of(self, version: int) -> _Snapshot:
        for found in (self._snapshot, *reversed(tuple(self._older))):
            if found.version == version:
                return found
        raise CheckpointError(
            f"the schedule of version {version} is not kept: this rank is at {self._snapshot.version}"
        )

    def _take(self, version: int, last: _Snapshot | None = None) -> _Snapshot:
        """Return a snapshot of this moment. Parts that have not changed are shared with ``last``."""
        if last is None:
            schedules, groups = tuple(map(Habit.look, self._habits)), hyperparameters_of(self._optimizers)
        else:
            schedules = tuple(map(Habit.look, self._habits, last.schedules))
            groups = hyperparameters_of(self._optimizers, self._put_back.usual or last.groups)
        event = self._event(groups, schedules) if self._runtimes else None
        scale = None if self._scaler is None else read_scaler(self._scaler, self._numbers, self._optimizers)
        return _Snapshot(version, schedules, groups, scale, self._put_back.usual, event)

    def _after(self, last: _Snapshot, *, schedules: bool = True, training: bool = False) -> _Snapshot:
        """Return ``last`` brought up to now: with the scaler's update and the schedulers' steps that followed it.

        Args:
            last: the snapshot of the version.
            schedules: whether to read the schedulers.
            training: whether this is the training thread; see ``ScalerReading.brought_up``.
        """
        if last.scale is not None and (scale := last.scale.brought_up(training=training)) is not last.scale:
            last = last._replace(scale=scale)
        if not schedules or not self._habits:
            return last
        now = tuple(map(Habit.look, self._habits, last.schedules))
        if all(map(is_, now, last.schedules)):
            return last
        groups = hyperparameters_of(self._optimizers, last.groups)
        return last._replace(schedules=now, groups=groups, copied=self._event(groups, now) if self._runtimes else None)

    def _event(self, groups: Hyperparameters, schedules: Sequence[Reading]) -> Event | None:
        """Return an event behind this thread's copies, on devices, of what these hold; None: there are none."""
        leaves = tree_leaves([[each.copies for each in groups], [each.state for each in schedules]])
        found = {id(r): r for v in leaves if isinstance(v, Tensor) and (r := holder(self._runtimes, v)) is not None}
        return AllEvents([runtime.event(side=False) for runtime in found.values()]) if found else None

    def _check(self) -> None:
        for habit in self._habits:
            with ToldAs(UsageError, "the state of the scheduler cannot be stored", EncodingError):
                encode(habit.look().state, "scheduler.state_dict()")


def _wait_for(found: _Snapshot) -> None:
    if found.copied is not None and not poll(found.copied.query, NUMBER_S):
        raise CheckpointError(f"a learning rate or its schedule was not set on the device within {NUMBER_S:g} s")
