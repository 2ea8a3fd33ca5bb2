"""A rank's side of the protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
The processor keeps one stream to the controller. Losing the stream changes nothing for the training: it is re-opened,
and the first message repeats everything a new controller has to know. Orders of an older term are ignored.

A freeze closes the gate; the answer goes out at once if the state is quiet, else when the running update ends. While
frozen the processor saves and commits what it is told to. The version before (undo) is written by the saver, from what
was kept of it; to go on to a newer one (redo) the training thread, which stands at the gate with the reduced gradient,
is let through once. A freeze ends by a thaw or by the release, which ends the process. Two rules keep a healthy job
healthy without a controller: a freeze for a mere snapshot is thawed as soon as the stream is lost, and a rank that was
frozen for a fault but is never released leaves with code 70 after the patience of the job (``TTP_OT``), as it could not
train on anyway.

When the controller is lost, ``ttp.core.rank.failover`` says where to look for another one.

An order that comes twice, because the stream broke after it, is carried out once; its result is said again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Version
from ttp.core.layout_messages import LayoutPart, Parts, TellLayout
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.failover import HOME, Route
from ttp.core.rank.program import RankProgram
from ttp.errors import EXIT_NOT_SAVED

OVER_MAX = 64
"""Incidents that were thawed last: a freeze for one of them that is still on its way is late."""


@dataclass(frozen=True, slots=True)
class RankTimeouts:
    """Waits of a processor, in seconds."""

    heartbeat_s: float = 1.0
    rescue_s: float = 360.0
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    alone_s: float = 20.0
    """A rank that is broken or done waits so long for a controller that cannot be reached."""
    start_controller_after: int = 2
    """Failed attempts after which a controller is started, if it may run on this host."""
    failover_s: float = 0.5
    """A lost controller is tried again for so long before a standby controller is asked to take over."""
    connect_s: float = 1.0
    """How long a controller may take to answer while others could take over; twice as long each round."""
    redo_s: float = 30.0
    """How long an update that is made on request may take."""


class ProcessorMachine:
    """The protocol of one rank. ``on_event`` is the only way in; ``deadline`` says when ``Observed`` is due.

    Args:
        hello: who this rank is; version, phase and the like are filled in whenever it is sent.
        timeouts: see ``RankTimeouts``.
        now: the time at which the machine starts.
        layout: of the job, cut for messages (``ttp.core.controller.layout_exchange.in_parts``).
    """

    def __init__(self, hello: m.Hello, timeouts: RankTimeouts, now: float, layout: Parts = ()) -> None:
        self.timeouts = timeouts
        self.term = 0
        self.incarnation = 0
        self.incident = ""
        self.generation = 0
        self.gone = False
        self._hello, self._layout = hello, layout
        self._snapshot = False
        self._welcomed = False
        self._attempts = 0
        self._connect_at: float | None = now
        self._beat_at = now
        self._down_since: float | None = now
        self._frozen_since = 0.0
        self._over: deque[tuple[int, str]] = deque(maxlen=OVER_MAX)
        self._order: m.Save | m.Commit | None = None
        self._results: dict[tuple[type[m.Save | m.Commit], int], m.Report] = {}
        self._broken: ev.Raised | None = None
        self._returned: ev.Returned | None = None
        self._view: m.RestoreView | None = None
        self._undecided = False
        self._version = hello.version
        self._phase = hello.phase
        self._observed = ev.Observed(hello.version, hello.phase)
        self._preimage = False
        self._redo_until: float | None = None
        self._redoing: Version | None = None  # the update that was asked for, until it is over; whoever asked for it
        self._route = Route(timeouts.failover_s)
        self._noted: act.NoteRing | None = None
        self._copy: m.Copied | None = None
        self._unsettled = False
        self._skipped = Version(0)
        self.program = RankProgram()
        """Speaks for a program that saves and repairs itself."""
        self._actions: list[act.Action] = []

    # ------------------------------------------------------------------------------------------------------- entrance

    def on_event(self, event: ev.Event, now: float) -> list[act.Action]:
        """Take one event, return what has to be done, in order."""
        self._actions = []
        if self.gone:
            return []
        match event:
            case ev.StreamUp():
                self._do(act.Send(self._greeting()))
            case ev.StreamDown():
                self._stream_down(now)
            case ev.OrderReceived(order):
                self._ordered(order, now)
            case ev.Quiet():
                self._quiet(event, now)
            case ev.NotRedone(text):
                self._redoing = None
                self._redo_failed(text)
            case ev.PiecesWritten() | ev.WriteFailed() | ev.CommitDone() | ev.CommitBroken():
                self._worked(event)
            case ev.Raised():
                self._raised(event)
            case ev.Returned():
                self._left(event)
            case ev.RestoreWanted(candidates, skipped, readings):
                self._view, self._undecided = m.RestoreView(self._hello.rank, candidates, skipped, readings), True
                self._report(self._view)
            case ev.Based(version):
                self._hello = replace(self._hello, base_version=version)
                self._version = version
            case ev.Observed():
                self._observe(event, now)
            case ev.NeighbourDied(rank, nonce, text):
                self._report(m.Fault(self._hello.rank, rank, m.FaultKind.EXITED, text, nonce=nonce))
            case ev.StackSeen(incident, subject, text):
                self._report(m.StackTaken(self._hello.rank, incident, subject, text))
            case ev.HostProbed(subject, reachable, text):
                self._report(m.Probed(self._hello.rank, subject, reachable, text))
            case ev.StandbyStarted(address):
                self._route.knows(address)  # whether or not the announcement arrives
                self._note_ring()
                self._report(m.StandbyUp(self._hello.rank, address))
            case ev.CopyMade() | ev.CopySkipped():
                self._copied(event)
            case ev.ProgramEvent():
                for said in self.program.happened(event):
                    self._report(said)
        if not self.gone:
            self._on_time(now)
        return self._actions

    def deadline(self) -> float | None:
        """When ``on_event(Observed(...), ...)`` should be called at the latest."""
        return None if self.gone else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        if self._connect_at is not None:
            yield self._connect_at
        if self._welcomed:
            yield self._beat_at
        if self._redo_until is not None:
            yield self._redo_until
        if self.incident and not self._snapshot:
            yield self._frozen_since + self.timeouts.rescue_s
        if self._down_since is not None and not self.incident and self._waits:
            yield self._down_since + self.timeouts.alone_s

    def _on_time(self, now: float) -> None:
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            start = self._attempts >= self.timeouts.start_controller_after
            home = self._route.address == HOME
            self._do(act.Connect(start and home and self._route.went_round, self._route.address, self._within_s(now)))
        if self._welcomed and now >= self._beat_at:
            self._beat_at = now + self.timeouts.heartbeat_s
            o = self._observed
            self._report(m.Heartbeat(self._hello.rank, self._version, self._phase, o.mark, o.activity, o.written))
        if self._redo_until is not None and now >= self._redo_until:
            self._redo_failed("the update that was asked for does not end")
        if self.incident and not self._snapshot and now >= self._frozen_since + self.timeouts.rescue_s:
            self._exit(EXIT_NOT_SAVED, f"frozen for {self.timeouts.rescue_s:g} s (TTP_OT) without being released")
        alone = self._down_since is not None and now >= self._down_since + self.timeouts.alone_s
        if alone and not self.incident and self._waits:
            self._do(act.LetGo(rescued=False))
            self.gone = True

    @property
    def _may_not_redo(self) -> bool:
        """A snapshot is written from what there is, where the pieces may be of ranks that stand differently."""
        return self._snapshot and not self.program.updates_for_snapshot

    @property
    def _waits(self) -> bool:
        """Whether the training thread has left its loop, and stands there until somebody says something."""
        return bool(self._broken or self._returned or self.program.waits)

    def _within_s(self, now: float) -> float | None:
        """How long an attempt may take, where there are others to ask; None: as long as it takes.

        The lost controller may not use up more than its respite: all ranks should come to the next one at about the
        same time, and an attempt at a host that does not answer ends with nothing but its time.
        """
        m_ = self.timeouts
        if not self._route.standbys:
            return None
        if self._route.takeover or self._down_since is None:
            return float(m_.connect_s * 2**self._route.rounds)
        respite_s = max(m_.failover_s, m_.connect_s)  # a host that is cut off for a moment answers again
        return max(m_.retry_min_s, self._down_since + respite_s - now)

    # --------------------------------------------------------------------------------------------------------- stream

    def _observe(self, observed: ev.Observed, now: float) -> None:
        self._version, self._phase, self._observed = observed.version, observed.phase, observed
        if observed.urgent:
            self._beat_at = now

    def _greeting(self) -> m.Hello:
        return replace(
            self._hello,
            incarnation=self.incarnation,
            version=self._version,
            phase=m.Phase.DONE if self._returned else self._phase,
            term_seen=self.term,
            incident=self.incident,
            resume=self.incarnation > 0,
            broken=self._broken.text if self._broken else "",
            standbys=self._route.standbys,
            takeover=self._route.takeover,
        )

    def _stream_down(self, now: float) -> None:
        self._welcomed = False
        if self._down_since is None:
            self._down_since = now
        self._route.lost(now - self._down_since)
        m_ = self.timeouts
        in_vain = 0 if self._route.takeover and not self._route.rounds else min(self._attempts, 10)  # there: not yet
        self._connect_at = now + min(m_.retry_max_s, m_.retry_min_s * 2**in_vain)
        self._attempts += 1
        if self.incident and self._snapshot:
            self._thaw()

    def _ordered(self, order: m.Order, now: float) -> None:
        match order:
            case m.Welcome():
                self._welcome(order, now)
                return
            case m.Refused(_, code, text):
                self._refused(code, text, now)
                return
            case TellLayout(_, digest):
                self._tell_layout(digest)
                return
        if order.term < self.term or not self._welcomed:
            return  # of a controller that was replaced, or left over from the last stream
        self.term = order.term
        match order:
            case m.Freeze(_, term, incident, _) if (term, incident) not in self._over:
                self._freeze(order, now)
            case m.Thaw(_, term, incident, _) if incident == self.incident:
                self._over.append((term, incident))
                self._thaw()
            case m.Save() | m.Commit() if order.incident == self.incident and order.generation >= self.generation:
                self._start(order, now)
            case m.Release(_, _, _, exit_code, text):
                self._report(m.Goodbye(self._hello.rank, m.GoodbyeReason.RELEASED, self._version))
                self._exit(exit_code, text)
            case m.RestoreDecision() if self._undecided:
                self._undecided = False
                self._do(act.Decided(order))
            case m.Finished():
                self._do(act.LetGo(rescued=True))
                self.gone = True
            case m.TakeStack() | m.Probe() | m.StandBy() | m.Standbys() | m.Keep() | m.CopyTo() | m.MirrorTo():
                self._serve(order)
            case m.Settled():
                self._settled(order)
            case m.ProgramOrder():
                self._ordered_program(order)
            case _:
                pass  # late: of an incident or a generation that is over

    def _tell_layout(self, digest: str) -> None:
        if digest == self._hello.layout_digest:
            for index, groups in enumerate(self._layout):
                self._do(act.Send(LayoutPart(self._hello.rank, digest, index, len(self._layout), groups)))

    def _serve(self, order: m.TakeStack | m.Probe | m.StandBy | m.Standbys | m.Keep | m.CopyTo | m.MirrorTo) -> None:
        """What a rank does for others."""
        match order:
            case m.TakeStack():
                self._do(act.TakeStack(order))
            case m.Probe():
                self._do(act.ProbeHost(order))
            case m.StandBy():
                self._do(act.StartStandby())
            case m.Standbys(_, _, addresses):
                self._route.announced(addresses)
                self._note_ring()
            case m.Keep():
                self._do(act.KeepPage(order))
            case m.CopyTo():
                self._do(act.NameBuddy(order))
            case m.MirrorTo():
                self._do(act.NameKeeper(order))

    def _note_ring(self) -> None:
        """Said only where there is more than one controller to choose from, and once."""
        ring = act.NoteRing(self.term, self._route.current, self._route.standbys)
        if ring.standbys and ring != self._noted:
            self._noted = ring
            self._do(ring)

    def _welcome(self, order: m.Welcome, now: float) -> None:
        if order.term < self.term:
            return  # a controller that does not know it was replaced
        first = self.incarnation == 0
        self.term, self.incarnation = order.term, order.incarnation
        self._welcomed, self._attempts, self._down_since = True, 0, None
        self._route.connected()
        self._note_ring()
        self._beat_at = now + self.timeouts.heartbeat_s
        self._do(act.Joined(order.incarnation, first))
        if self._view is not None and (self._undecided or self._version <= self._hello.base_version):
            self._report(self._view)  # others may still wait for the decision, and this controller may be new
        if self._copy is not None:
            self._report(self._copy)  # this controller may be new
        for report in self.program.repeated():
            self._report(report)
        if self._broken is not None:
            self._report_broken(self._broken)
        if self._returned is not None:
            self._report(m.Goodbye(self._hello.rank, self._returned.reason, self._version))

    def _refused(self, code: m.RefusalCode, text: str, now: float) -> None:
        if code is m.RefusalCode.BUSY:
            return  # the stream ends; the next attempt asks again
        if code is m.RefusalCode.MOVED:
            self._route.moved()
            return
        if self.incarnation:  # it was part of the job: whatever it holds is of no use any more
            self._exit(EXIT_NOT_SAVED, f"the controller refused this rank ({code.value}): {text}")
        else:
            self.gone = True
            self._do(act.Rejected(code, text))

    # ------------------------------------------------------------------------------------------------------ incidents

    def _freeze(self, order: m.Freeze, now: float) -> None:
        if order.incident != self.incident:
            self._cancel()
            self._results = {}
            self.generation = 0
            self._frozen_since = now
        self.incident, self._snapshot = order.incident, order.snapshot
        self._do(act.HoldLease(self._frozen_since + self.timeouts.rescue_s))
        self._do(act.CloseGate(hurry=not order.snapshot))

    def _quiet(self, quiet: ev.Quiet, now: float) -> None:
        self._version, self._phase, self._preimage = quiet.version, quiet.phase, quiet.has_preimage
        if self._redoing is not None and (quiet.version >= self._redoing or quiet.phase is m.Phase.TORN):
            self._redoing = None
        if not self.incident:
            return
        if self._redo_until is not None and not self._redone(quiet):
            return  # the update is still being made
        self._report(
            m.Frozen(
                rank=self._hello.rank,
                incident=self.incident,
                version=quiet.version,
                phase=quiet.phase,
                final=quiet.phase is not m.Phase.UPDATING,
                stuck=not (quiet.parked or self._broken or self._returned),
                settled=quiet.settled,
                has_gradient=quiet.has_gradient and not self._may_not_redo,
                # A snapshot takes no detour, but for those who stand between two steps of one version: for a moment
                # there is nothing else, and thawed they go on.
                has_preimage=quiet.has_preimage and (not self._snapshot or quiet.phase is m.Phase.TORN),
                digests=quiet.digests,
                bad=quiet.bad,
                kept=quiet.kept,
            )
        )

    def _start(self, order: m.Save | m.Commit, now: float) -> None:
        key, running = (type(order), order.generation), self._order
        if key in self._results:
            self._report(self._results[key])
            return
        if running is not None and key == (type(running), running.generation):
            return
        self._cancel()
        self._order, self.generation = order, order.generation
        if isinstance(order, m.Commit):
            self._do(act.StartCommit(order))
        elif not order.order.shards or self._holds(order):  # pages alone can be collected by anybody
            self._do(act.StartSave(_as_it_is(order) if order.order.how is How.REDO else order))
        elif order.order.how is How.REDO and order.version == self._version + 1 and self._phase is m.Phase.IDLE:
            self._redo_until, self._redoing = now + self.timeouts.redo_s, order.version
            self._do(act.Redo(order.version))
        else:
            state = self._phase.value if self._redoing is None else f"on its way to {self._redoing}"
            text = f"asked for version {order.version}, holds {self._version} ({state})"
            ahead = order.version < self._version and self._phase in (
                m.Phase.IDLE,
                m.Phase.DONE,
            )  # it may save that one
            self._finish(order, m.SaveFailed(self._hello.rank, self.incident, order.generation, text, ahead))

    def _holds(self, order: m.Save) -> bool:
        """Whether the saver can write the version; the one before from what was kept of it, if that was asked for."""
        if self._redoing is not None:
            return False  # an order that came before this one has let the training thread go
        torn = self._phase is m.Phase.TORN
        if order.order.how is How.UNDO and self._preimage:
            return order.version == (self._version if torn else self._version - 1)
        return order.version == self._version and not torn and self._phase is not m.Phase.UPDATING

    def _redone(self, quiet: ev.Quiet) -> bool:
        """The update was asked for: is it over, for good or bad?"""
        order = self._order
        assert isinstance(order, m.Save)
        if quiet.version == order.version and quiet.phase is m.Phase.IDLE:
            self._redo_until = None
            self._do(act.StartSave(_as_it_is(order)))
        elif quiet.phase in (m.Phase.IDLE, m.Phase.UPDATING):
            return False
        else:
            self._redo_failed(f"the update that was asked for ended {quiet.phase.value}")
        return True

    def _redo_failed(self, text: str) -> None:
        if self._redo_until is not None and isinstance(self._order, m.Save):
            self._redo_until = None
            failed = m.SaveFailed(self._hello.rank, self.incident, self._order.generation, text)
            self._finish(self._order, failed)

    def _cancel(self) -> None:
        """Forget the order that is being carried out; a save is given up, a commit is harmless."""
        if isinstance(self._order, m.Save):
            self._do(act.CancelSave())
        self._order = self._redo_until = None

    def _worked(self, event: ev.PiecesWritten | ev.WriteFailed | ev.CommitDone | ev.CommitBroken) -> None:
        kind = m.Save if isinstance(event, (ev.PiecesWritten, ev.WriteFailed)) else m.Commit
        order = self._order
        if not isinstance(order, kind) or (event.incident, event.generation) != (order.incident, order.generation):
            return
        rank, incident, generation = self._hello.rank, event.incident, event.generation
        match event:
            case ev.PiecesWritten(_, _, pieces):
                self._finish(order, m.Saved(rank, incident, generation, pieces))
            case ev.WriteFailed(_, _, text, may_pass):
                self._finish(order, m.SaveFailed(rank, incident, generation, text, may_pass))
            case ev.CommitDone(_, _, path, size):
                self._finish(order, m.Committed(rank, incident, generation, path, size))
            case ev.CommitBroken(_, _, text, may_pass):
                self._finish(order, m.CommitFailed(rank, incident, generation, text, may_pass))

    def _finish(self, order: m.Save | m.Commit, result: m.Report) -> None:
        self._order, self._results[type(order), order.generation] = None, result
        self._report(result)

    def _thaw(self) -> None:
        self._cancel()
        self.incident, self._snapshot, self._redoing = "", False, None
        self._do(act.OpenGate())
        self._do(act.DropLease())

    # --------------------------------------------------------------------------------------------------------- program

    def _ordered_program(self, order: m.ProgramOrder) -> None:
        answer = self.program.ordered(order)
        if isinstance(answer, act.ProgramAction):
            self._do(answer)
        elif answer is not None:
            self._report(answer)

    # ---------------------------------------------------------------------------------------------------------- copies

    def _copied(self, event: ev.CopyMade | ev.CopySkipped) -> None:
        """See ``replication``. Of a turn that was skipped nothing is said before the one before it is settled."""
        if isinstance(event, ev.CopyMade):
            whole = self._copy.whole if self._copy is not None else Version(0)
            self._copy = m.Copied(self._hello.rank, event.version, event.stored, event.text, whole)
            self._unsettled = True
        else:
            self._skipped = event.version
        if self._copy is not None and (self._unsettled or isinstance(event, ev.CopyMade)):
            self._report(self._copy)

    def _settled(self, order: m.Settled) -> None:
        copy = self._copy
        if copy is None or order.version != copy.version or not self._unsettled:
            return
        whole = order.version if order.whole else copy.whole
        self._copy, self._unsettled = replace(copy, whole=whole), False
        self._do(act.SettleCopy(order.version, order.whole))
        if self._skipped > order.version:
            text = f"the copy of version {order.version} was not through yet"
            self._copy = m.Copied(self._hello.rank, self._skipped, False, text, whole)
            self._report(self._copy)

    # ------------------------------------------------------------------------------------------------------- training

    def _raised(self, event: ev.Raised) -> None:
        self._broken = self._broken or event
        self._report_broken(event)

    def _report_broken(self, event: ev.Raised) -> None:
        rank = self._hello.rank
        self._report(m.Fault(rank, rank, event.kind, event.text, event.detail, self._hello.nonce))

    def _left(self, event: ev.Returned) -> None:
        self._returned = event
        self._phase = m.Phase.DONE
        self._report(m.Goodbye(self._hello.rank, event.reason, self._version))
        if event.reason is m.GoodbyeReason.LEFT:
            self._do(act.LetGo(rescued=True))  # the user is not kept waiting for the others
            self.gone = True

    # --------------------------------------------------------------------------------------------------------- output

    def _exit(self, code: int, text: str) -> None:
        self.gone = True
        self._do(act.Exit(code, text))

    def _report(self, report: m.Report) -> None:
        if self._welcomed:
            self._do(act.Send(report))

    def _do(self, action: act.Action) -> None:
        self._actions.append(action)


def _as_it_is(order: m.Save) -> m.Save:
    """The rank holds the version now, whatever it took."""
    return replace(order, order=replace(order.order, how=How.AS_IS))
