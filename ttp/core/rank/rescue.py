"""A rank's part in an incident: closes the gate, reports the state behind it, and saves and commits as ordered.

An order that comes twice, because the stream broke after it, is carried out once; its result is reported again.
"""

from __future__ import annotations

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
        self._order: m.Save | m.Commit | None = None
        self._looking = False  # the state behind the gate is being looked at: the result follows
        self._waits = False  # the order is a save that waits for that result, or for the end of a redo
        self._results: dict[tuple[type[m.Save | m.Commit], int], m.Report] = {}
        self._results_of = ""  # the incident that the results belong to
        self.failure = ""
        """Why the last save or commit of this rank in the incident failed; empty: it did not."""
        self._preimage = False
        self._redo_until: float | None = None  # the order waits for a redo, at most until then
        self._redoing: Version | None = None  # the version that a redo makes, until that update is over
        self._redo_ends = 0.0  # when that update should be over

    # ----------------------------------------------------------------------------------------------------------- time

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``expire`` has something to do."""
        if self._redo_until is not None:
            yield self._redo_until
        if self.incident and not self._snapshot:
            yield self._gives_up_at

    def expire(self, now: float) -> bool:
        """Give up a redo that does not end. Return whether the whole rescue takes too long."""
        if self._redo_until is not None and now >= self._redo_until:
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
        self.incident, self._snapshot, self._redoing, self._looking = "", False, None, False
        self._outbox.answers_aside = False
        self._outbox.do(act.OpenGate())

    def _start(self, order: m.Save | m.Commit, now: float) -> None:
        key, running = (type(order), order.generation), self._order
        if key in self._results:
            self._outbox.answer(self._results[key])
            return
        if running is not None and key == (type(running), running.generation):
            return
        self._cancel()
        self._order, self._generation = order, order.generation
        if isinstance(order, m.Commit):
            self._outbox.do(act.StartCommit(order))
        else:
            self._save(order, now)

    def _save(self, order: m.Save, now: float) -> None:
        """Begin a save. If the state is being looked at again, because the training thread has moved, wait for that.

        Wait for the end of a redo too, which an earlier order has begun: whether it is made decides what can be saved.
        """
        version, phase, redoes = self._state.version, self._state.phase, order.order.how is How.REDO
        on_its_way = self._redoing is not None and not redoes and now < self._redo_ends
        self._waits = bool(order.order.shards) and (on_its_way or (self._looking and self._redoing is None))
        self._redo_until = self._redo_ends if self._waits and on_its_way else None
        if self._waits:
            return
        if not order.order.shards or self._holds(order):  # any rank can collect pages
            self._outbox.do(act.StartSave(_as_it_is(order) if redoes else order))
        elif redoes and order.version == version + 1 and phase is m.Phase.IDLE:
            self._redo_until = now + self._timeouts.redo_s
            if self._redoing is None:  # else the update is on its way, or its refusal, which would name no order
                self._redoing, self._redo_ends = order.version, self._redo_until
                self._outbox.do(act.Redo(order.version))
        else:
            how = phase.value if self._redoing is None else f"on its way to {self._redoing}"
            text = f"version {order.version} was ordered, but this rank holds version {version} ({how})"
            ahead = order.version < version and phase in (m.Phase.IDLE, m.Phase.DONE)  # it can save the newer version
            rank = self._state.rank
            self._finish(order, m.SaveFailed(rank, self.incident, order.generation, text, ahead))

    def _holds(self, order: m.Save) -> bool:
        """Return whether the saver can write the ordered version: from the live state, or from a pre-image (undo)."""
        if self._redoing is not None:
            return False  # a redo has let the training thread through and is not over
        state = self._state
        torn = state.phase is m.Phase.TORN
        if order.order.how is How.UNDO and self._preimage:
            return order.version == (state.version if torn else state.version - 1)
        return order.version == state.version and not torn and state.phase is not m.Phase.UPDATING

    def _cancel(self) -> None:
        """Forget the order that is being carried out. A save is cancelled; a commit may go on.

        The saver thread may still be writing, so a repeated order is answered with a failure: it would use the same
        files.
        """
        if isinstance(order := self._order, m.Save):
            self._outbox.do(act.CancelSave())
            failed = m.SaveFailed(self._state.rank, order.incident, order.generation, "it was cancelled", may_pass=True)
            self._results[m.Save, order.generation] = failed
        self._order, self._redo_until, self._waits = None, None, False

    # -------------------------------------------------------------------------------------------------------- answers

    def quiet(self, quiet: ev.Quiet, now: float) -> None:
        """Answer the freeze with the state behind the closed gate, and begin a save that waits for it."""
        self._looking = quiet.phase is m.Phase.UPDATING
        self._answer(quiet)
        if self._waits and isinstance(self._order, m.Save):
            self._save(self._order, now)

    def _answer(self, quiet: ev.Quiet) -> None:
        state = self._state
        state.version, state.phase, self._preimage = quiet.version, quiet.phase, quiet.has_preimage
        if self._redoing is not None and (quiet.version >= self._redoing or quiet.phase is m.Phase.TORN):
            self._redoing = None
        if not self.incident:
            return
        if self._redo_until is not None and not (self._waits or self._redone(quiet)):
            return  # the redo is still running
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
        """Return whether the redo is over, successfully or not; start the save after a success."""
        order = self._order
        assert isinstance(order, m.Save)
        if quiet.version == order.version and quiet.phase in (m.Phase.IDLE, m.Phase.DONE):  # DONE: it was the last one
            self._redo_until = None
            self._outbox.do(act.StartSave(_as_it_is(order)))
        elif quiet.phase in (m.Phase.IDLE, m.Phase.UPDATING):
            return False
        else:
            self._redo_failed(f"the ordered update ended {quiet.phase.value}")
        return True

    def not_redone(self, text: str, now: float) -> None:
        """Report that the redo cannot be made, which was not begun, or begin the save that waits for its end."""
        self._redoing = None
        if self._waits and isinstance(self._order, m.Save):
            self._save(self._order, now)
        else:
            self._redo_failed(text)

    def _redo_failed(self, text: str) -> None:
        if self._redo_until is not None and isinstance(self._order, m.Save):
            self._redo_until, self._waits = None, False
            failed = m.SaveFailed(self._state.rank, self.incident, self._order.generation, text)
            self._finish(self._order, failed)

    # -------------------------------------------------------------------------------------------------------- results

    def worked(self, result: m.Saved | m.SaveFailed | m.Committed | m.CommitFailed) -> None:
        """Report the result of a save or commit, if its order still holds."""
        kind = m.Save if isinstance(result, (m.Saved, m.SaveFailed)) else m.Commit
        order = self._order
        if isinstance(order, kind) and (result.incident, result.generation) == (order.incident, order.generation):
            self._finish(order, result)

    def _finish(self, order: m.Save | m.Commit, result: m.Report) -> None:
        self._order, self._results[type(order), order.generation] = None, result
        self.failure = result.text if isinstance(result, (m.SaveFailed, m.CommitFailed)) else ""
        self._outbox.answer(result)


def _as_it_is(order: m.Save) -> m.Save:
    """Return the order changed to save the live state, for a rank that has reached the version by a redo."""
    return replace(order, order=replace(order.order, how=How.AS_IS))
