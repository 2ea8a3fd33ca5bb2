"""A rank's part in an incident: closes the gate, reports the state behind it, and saves and commits as ordered.

An order that comes twice, because the stream broke after it, is carried out once; its result is reported again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.outbox import RankOutbox
from ttp.core.rank.program import RankProgram

OVER_MAX = 64
"""Number of thawed incidents that are remembered, because a freeze for one of them may still arrive late."""


@dataclass(slots=True)
class RankState:
    """A rank's own state, as last observed.

    Args:
        hello: the rank's ``Hello``; a restore changes its ``base_version``.
        version: finished updates of the rank's copy.
        phase: the state of the copy between two versions.
        program: represents a program that saves and repairs itself.
        broken: why the rank cannot train on; None if it can.
        returned: why its training loop has ended; None if it has not.
    """

    hello: m.Hello
    version: Version
    phase: m.Phase
    program: RankProgram
    broken: ev.Raised | None = None
    returned: ev.Returned | None = None

    @property
    def rank(self) -> Rank:
        """The rank's number."""
        return self.hello.rank

    @property
    def over(self) -> bool:
        """Whether the training thread has left its loop. After a SIGTERM it runs on, see ``Quiet.parked``."""
        raised = self.broken is not None and self.broken.kind is not m.FaultKind.PREEMPTED
        return raised or self.returned is not None


class _Stage(enum.Enum):
    """What an order that is being carried out waits for.

    ::

        commit ──────────────────────────────────> WRITING ──> its result is reported
        save ──┬─────────────────────────────────> WRITING
               ├──> REDOING ─────────────────────> WRITING, or its failure is reported
               └──> LOOKING or AFTER_REDO ───────> the save begins anew, with what is known then
    """

    WRITING = "the saver thread"
    REDOING = "the update that makes the ordered version"
    LOOKING = "the look at the state behind the gate, because the training thread has moved"
    AFTER_REDO = "the end of an update for an earlier order, which decides what can be saved"


@dataclass(frozen=True, slots=True)
class _Task:
    """An order that is being carried out. ``until``: the time at which it stops to wait for a redo."""

    order: m.Save | m.Commit
    stage: _Stage = _Stage.WRITING
    until: float | None = None


@dataclass(frozen=True, slots=True)
class _Redo:
    """The update that the training thread was let through for and has not ended yet."""

    version: Version  # after the update
    until: float  # the time at which it should be over


class RankRescue:
    """A rank's work between a freeze and the thaw. The machine handles the release, which ends the process.

    Args:
        state: the state of this rank.
        outbox: takes reports and actions.
        timeouts: of these, how long a rescue and an update for a redo may take.
    """

    def __init__(self, state: RankState, outbox: RankOutbox, timeouts: ev.RankTimeouts) -> None:
        self.incident = ""
        """The incident that this rank is frozen for; empty if it is not frozen."""
        self._state, self._outbox, self._timeouts = state, outbox, timeouts
        self._snapshot = False
        self._generation = 0
        self._gives_up_at = 0.0  # until then a rank that is frozen for a fault waits for its release
        self._over: deque[tuple[int, str]] = deque(maxlen=OVER_MAX)
        self._task: _Task | None = None
        self._redo: _Redo | None = None  # it may outlast its order
        self._looking = False  # the state behind the gate is being looked at: the result follows
        self._results: dict[tuple[type[m.Save | m.Commit], int], m.Report] = {}
        self._results_of = ""  # the incident that the results belong to
        self.failure = ""
        """Why the last save or commit of this rank in the incident failed; empty: it did not."""
        self._preimage = False

    # ----------------------------------------------------------------------------------------------------------- time

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``expire`` has something to do."""
        if self._task is not None and self._task.until is not None:
            yield self._task.until
        if self.incident and not self._snapshot:
            yield self._gives_up_at

    def expire(self, now: float) -> bool:
        """Give up a redo that does not end. Return whether the whole rescue takes too long."""
        task = self._task
        if task is not None and task.until is not None and now >= task.until:
            self._redo_failed("the ordered update does not end")
        return bool(self.incident) and not self._snapshot and now >= self._gives_up_at

    # --------------------------------------------------------------------------------------------------------- orders

    def ordered(self, order: m.Freeze | m.Thaw | m.Save | m.Commit, now: float) -> None:
        """Carry out an order; an order of an incident or a generation that is over changes nothing."""
        match order:
            case m.Freeze(_, term, incident, _) if (term, incident) not in self._over:
                self._freeze(order, now)
            case m.Thaw(_, term, incident, _) if incident == self.incident:
                self._over.append((term, incident))
                self._thaw()
            case m.Save() | m.Commit() if order.incident == self.incident and order.generation >= self._generation:
                self._start(order, now)

    def stream_lost(self) -> None:
        """Thaw a freeze for a snapshot, because the stream is lost, so no controller can thaw this rank now."""
        if self.incident and self._snapshot and not self._outbox.answers_aside:
            self._thaw()

    def hung_up(self) -> None:
        """Thaw a freeze of the stand-in, because the stream to the stand-in is closed."""
        if self._outbox.answers_aside:
            self._thaw()

    def _freeze(self, order: m.Freeze, now: float) -> None:
        if order.incident != self.incident:
            self._cancel()
            if order.incident != self._results_of:  # a thawed incident may freeze again: its results stay
                self._results, self._results_of, self._generation, self.failure = {}, order.incident, 0, ""
        if order.incident != self.incident or (self._snapshot and not order.snapshot):
            self._gives_up_at = now + self._timeouts.rescue_s  # anew if a fault turns the snapshot into a rescue
        self.incident, self._snapshot = order.incident, order.snapshot
        self._outbox.do(act.CloseGate(self._gives_up_at, hurry=not order.snapshot))

    def _thaw(self) -> None:
        self._cancel()
        self.incident, self._snapshot, self._redo, self._looking = "", False, None, False
        self._outbox.answers_aside = False
        self._outbox.do(act.OpenGate())

    def _start(self, order: m.Save | m.Commit, now: float) -> None:
        key, task = (type(order), order.generation), self._task
        if key in self._results:
            self._outbox.answer(self._results[key])
            return
        if task is not None and key == (type(task.order), task.order.generation):
            return
        self._cancel()
        self._generation = order.generation
        if isinstance(order, m.Commit):
            self._task = _Task(order)
            self._outbox.do(act.StartCommit(order))
        else:
            self._save(order, now)

    def _save(self, order: m.Save, now: float) -> None:
        """Begin a save, let it wait, or report that this rank cannot make it."""
        state, redo, redoes = self._state, self._redo, order.order.how is How.REDO
        if not order.order.shards:
            self._write(order)  # any rank can collect pages
        elif redo is not None and not redoes and now < redo.until:
            self._task = _Task(order, _Stage.AFTER_REDO, redo.until)
        elif self._looking and redo is None:
            self._task = _Task(order, _Stage.LOOKING)
        elif self._holds(order):
            self._write(order)
        elif redoes and order.version == state.version + 1 and state.phase is m.Phase.IDLE:
            until = now + self._timeouts.redo_s
            self._task = _Task(order, _Stage.REDOING, until)
            if redo is None:  # else the update is on its way, or its refusal, which would name no order
                self._redo = _Redo(order.version, until)
                self._outbox.do(act.Redo(order.version))
        else:
            how = state.phase.value if redo is None else f"on its way to {redo.version}"
            text = f"version {order.version} was ordered, but this rank holds version {state.version} ({how})"
            may_pass = order.version < state.version and state.phase in (m.Phase.IDLE, m.Phase.DONE)  # the newer one
            self._failed(order, text, may_pass=may_pass)

    def _holds(self, order: m.Save) -> bool:
        """Return whether the saver can write the ordered version: from the live state, or from a pre-image (undo)."""
        if self._redo is not None:
            return False  # it has let the training thread through and is not over
        state = self._state
        torn = state.phase is m.Phase.TORN
        if order.order.how is How.UNDO and self._preimage:
            return order.version == (state.version if torn else state.version - 1)
        return order.version == state.version and not torn and state.phase is not m.Phase.UPDATING

    def _write(self, order: m.Save) -> None:
        self._task = _Task(order)
        if order.order.how is How.REDO:  # its update is made, so the live state is saved
            order = replace(order, order=replace(order.order, how=How.AS_IS))
        self._outbox.do(act.StartSave(order))

    def _cancel(self) -> None:
        """Forget the order that is being carried out. A save is cancelled; a commit may go on.

        The saver thread may still be writing, so a repeated order is answered with a failure: it would use the same
        files.
        """
        if self._task is not None and isinstance(order := self._task.order, m.Save):
            self._outbox.do(act.CancelSave())
            failed = m.SaveFailed(self._state.rank, order.incident, order.generation, "it was cancelled", may_pass=True)
            self._results[m.Save, order.generation] = failed
        self._task = None

    # -------------------------------------------------------------------------------------------------------- answers

    def quiet(self, quiet: ev.Quiet, now: float) -> None:
        """Answer the freeze with the state behind the closed gate, and begin a save that waits for it."""
        self._looking = quiet.phase is m.Phase.UPDATING
        self._answer(quiet)
        self._save_anew(now)

    def _save_anew(self, now: float) -> bool:
        """Begin a save that has waited for what is known now. Return whether there was one."""
        task = self._task
        if task is None or task.stage not in (_Stage.LOOKING, _Stage.AFTER_REDO):
            return False
        assert isinstance(task.order, m.Save)
        self._save(task.order, now)
        return True

    def _answer(self, quiet: ev.Quiet) -> None:
        state = self._state
        state.version, state.phase, self._preimage = quiet.version, quiet.phase, quiet.has_preimage
        if self._redo is not None and (quiet.version >= self._redo.version or quiet.phase is m.Phase.TORN):
            self._redo = None
        if not self.incident or not self._redone(quiet):
            return
        self._outbox.answer(
            m.Frozen(
                rank=state.rank,
                incident=self.incident,
                version=quiet.version,
                phase=quiet.phase,
                final=quiet.phase is not m.Phase.UPDATING,
                main_thread_blocked=not (quiet.parked or state.over),
                post_step_done=quiet.post_step_done,
                has_gradient=quiet.has_gradient and not self._may_not_redo,
                # A snapshot uses no pre-image, except on ranks in the middle of an update that takes several calls:
                # they have no other complete version now, and go on after the thaw.
                has_preimage=quiet.has_preimage and (not self._snapshot or quiet.phase is m.Phase.TORN),
                digests=quiet.digests,
                bad=quiet.bad,
                kept=quiet.kept,
                hold_dir="" if self._snapshot else quiet.hold_dir,
                held=quiet.held,
                cannot_continue=quiet.cannot_continue,
            )
        )

    @property
    def _may_not_redo(self) -> bool:
        """Whether no redo may be offered: a snapshot saves states as they are, unless the program allows updates."""
        return self._snapshot and not self._state.program.updates_for_snapshot

    def _redone(self, quiet: ev.Quiet) -> bool:
        """Return whether no redo is running for the order, or not any more; start the save after a success."""
        task = self._task
        if task is None or task.stage is not _Stage.REDOING:
            return True
        order = task.order
        assert isinstance(order, m.Save)
        if quiet.version == order.version and quiet.phase in (m.Phase.IDLE, m.Phase.DONE):  # DONE: it was the last one
            self._write(order)
        elif quiet.phase in (m.Phase.IDLE, m.Phase.UPDATING):
            return False
        else:
            self._redo_failed(f"the ordered update ended {quiet.phase.value}")
        return True

    def not_redone(self, text: str, now: float) -> None:
        """Report that the redo cannot be made, which was not begun, or begin the save that waits for its end."""
        self._redo = None
        if not self._save_anew(now):
            self._redo_failed(text)

    def _redo_failed(self, text: str) -> None:
        if self._task is not None and self._task.until is not None:
            self._failed(self._task.order, text)

    # -------------------------------------------------------------------------------------------------------- results

    def worked(self, result: m.Saved | m.SaveFailed | m.Committed | m.CommitFailed) -> None:
        """Report the result of a save or commit, if its order still holds."""
        kind = m.Save if isinstance(result, (m.Saved, m.SaveFailed)) else m.Commit
        order = None if self._task is None else self._task.order
        if isinstance(order, kind) and (result.incident, result.generation) == (order.incident, order.generation):
            self._finish(order, result)

    def _failed(self, order: m.Save | m.Commit, text: str, *, may_pass: bool = False) -> None:
        self._finish(order, m.SaveFailed(self._state.rank, self.incident, order.generation, text, may_pass))

    def _finish(self, order: m.Save | m.Commit, result: m.Report) -> None:
        self._task, self._results[type(order), order.generation] = None, result
        self.failure = result.text if isinstance(result, (m.SaveFailed, m.CommitFailed)) else ""
        self._outbox.answer(result)
