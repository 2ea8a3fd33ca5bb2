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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.hyperparameters import PLAIN, Groups, Hyperparameters
from ttp.adapters.torch.job_state import JobState
from ttp.adapters.torch.watch import watch_method
from ttp.errors import UsageError
from ttp.store.encoding import EncodingError, encode

log = logging.getLogger("ttp.adapters.torch")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of one version.

    Args:
        version: finished updates.
        scheduler: its ``state_dict()``, containers copied.
        scaler: the scaler's numbers; on a device still tensors.
        groups: of each optimizer.
        scheduler_steps: how many of them are in it.
        scaler_updates: the same.
    """

    version: int
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    groups: list[Groups]
    scheduler_steps: int = 0
    scaler_updates: int = 0


class Tail:
    """Follows one training loop. Methods of the training thread store to memory only; the others run on any thread.

    Args:
        optimizers: whose param groups belong to the version.
        scheduler: an LR scheduler; anything with ``step`` and ``state_dict``.
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
        self._groups = Hyperparameters(tuple(optimizers), copied)
        self._scheduler = scheduler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._averages = averages
        self._check()
        self._open = False  # what is stepped now belongs to the last version
        self._entered = True  # the next forward pass has begun since, or the thread stands at the gate
        self._scheduler_inside = False
        self._leading = False
        self._tails = 0  # that have ended
        self._single_steps = 0  # the last so many of them had exactly one scheduler.step()
        self._steps_expected = 0
        self._updates_expected = True
        self._watched = False
        self._stale = True  # the scheduler was stepped since its state was last taken
        self._previous = self._snapshot = self._take(version, 0, 0)
        kind = type(scheduler)
        self._unwatch = [
            watch_method(self._scheduler, "step", self._scheduler_begins, self._scheduler_stepped),
            watch_method(self._scaler, "update", lambda: None, self._scaler_updated),
        ]
        self._watched = scheduler is None or type(scheduler) is not kind

    @property
    def wants_forward(self) -> bool:
        """Whether ``forward_entered`` tells it anything."""
        return self._averages or self._scheduler is not None or self._scaler is not None

    # --------------------------------------------------------------------------------------------- training thread

    def restored(self, version: int) -> None:
        """The objects hold the state of ``version``."""
        self._open, self._entered, self._stale = False, True, True
        self._leading = False  # a step that loading made says nothing of the loop
        self._previous = self._snapshot = self._take(version, 0, 0)

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
        self._previous, self._snapshot = self._snapshot, self._take(version, 0, 0)
        self._scheduler_inside = False
        self._entered, self._open = whole, not whole

    def step_done(self) -> None:
        """The tail of the last version is through: the user says so."""
        last = self._snapshot
        self._stale = True
        self._snapshot = self._take(last.version, last.scheduler_steps, last.scaler_updates)
        self._open, self._entered = False, True

    def _end_tail(self) -> None:
        steps = self._snapshot.scheduler_steps
        self._open = False
        self._tails += 1
        self._single_steps = self._single_steps + 1 if steps == 1 else 0
        self._steps_expected = steps
        self._updates_expected = self._snapshot.scaler_updates > 0

    def _scheduler_begins(self) -> None:
        self._scheduler_inside, self._stale = self._open, True
        if not self._open and self._scaler is None:  # with a scaler it may be the step after a skipped update
            self._leading = True

    def _scheduler_stepped(self) -> None:
        if self._open:
            last = self._snapshot
            self._snapshot = self._take(last.version, last.scheduler_steps + 1, last.scaler_updates)
        self._scheduler_inside = False

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
        return self._scheduler_settled(last) and self._scaler_settled(last) and not self._averages

    def foreseen(self) -> bool:
        """Whether what is still to follow the last update is known, so that a save can say what is due."""
        return not self._averages and (self._scheduler is None or self._leading or self._learned())

    def _learned(self) -> bool:
        """Whether every update, or at least the last two, had exactly one step of the scheduler behind it."""
        return self._tails > 0 and self._single_steps >= min(2, self._tails)

    def _scheduler_settled(self, last: _Snapshot) -> bool:
        if self._scheduler is None:
            return True
        if self._scheduler_inside:
            return False
        if self._steps_expected:
            return last.scheduler_steps >= self._steps_expected
        return self._leading

    def _scaler_settled(self, last: _Snapshot) -> bool:
        return self._scaler is None or last.scaler_updates > 0 or (self._tails > 0 and not self._updates_expected)

    def job_state(self, version: int) -> JobState:
        """Scheduler and scaler as they belong to ``version``, with what was still due.

        Of another version than the last two, the state is that of now.
        """
        entered, inside = self._entered, self._scheduler_inside  # before the snapshot, which may follow them
        found = self._of(version)
        open_ended = found.version == self._snapshot.version and not entered
        return JobState(
            version=version,
            scheduler=found.scheduler,
            scaler=_scaler_state(found.scaler),
            scheduler_pending=open_ended and found.scheduler_steps == 0 and (inside or self._learned()),
            scaler_pending=open_ended and not self._scaler_settled(found),
        )

    def param_groups(self, version: int) -> list[Groups]:
        """The hyperparameters of ``version``, per optimizer: a leading scheduler has changed the live ones already."""
        return self._of(version).groups

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
        return self._take(version, 0, 0)

    def _take(self, version: int, scheduler_steps: int, scaler_updates: int) -> _Snapshot:
        scheduler = self._snapshot.scheduler if self._watched and not self._stale else self._scheduler_state()
        self._stale = False
        scaler = None if self._scaler is None else _scaler_numbers(self._scaler)
        return _Snapshot(version, scheduler, scaler, self._groups.now(), scheduler_steps, scaler_updates)

    def _scheduler_state(self) -> Any:
        return None if self._scheduler is None else copied(self._scheduler.state_dict())

    def _check(self) -> None:
        try:
            encode(self._scheduler_state(), "scheduler.state_dict()")
        except EncodingError as problem:
            raise UsageError(f"the state of the scheduler cannot be stored: {problem}") from problem


def copied(value: Any) -> Any:
    """``value`` with its containers and tensors copied, so that it stays as it is; nothing waits for a device."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is dict:
        return {key: item if type(item) in PLAIN else copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in PLAIN else copied(item) for item in value]
    if kind is tuple:
        return tuple([item if type(item) in PLAIN else copied(item) for item in value])
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (dict, list, set)) else value


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
