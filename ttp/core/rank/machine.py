"""A rank's side of the protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
The processor keeps one stream to the controller. A lost stream does not disturb the training: the processor opens it
again, and the first message repeats everything that a new controller has to know. Orders of an older term are ignored.

A freeze closes the gate. The answer is sent at once if no update is running, else when it ends. While frozen the
processor carries out orders to save and to commit. To save the version before (undo) the saver writes the pre-image; to
save the next version (redo) the training thread, which stands at the gate with the reduced gradient, is let through
for one update. A freeze ends with a thaw or with the release, which ends the process. Two rules hold without a
controller: a freeze for a snapshot is thawed as soon as the stream is lost; and a rank that was frozen for a fault but
is not released within ``TTP_OT`` exits with code 70, because it could not train on anyway.

Files: ``rescue`` does a rank's work between freeze and thaw, ``failover`` chooses the controller to connect to,
``stand_in`` has another controller save while the present one is silent, ``copy_turns`` reports second copies,
``program`` is the interface for programs that save themselves. This file keeps the stream and passes events on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo, Settled
from ttp.core.layout_messages import LayoutPart, Parts, TellLayout
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.copy_turns import CopyTurns
from ttp.core.rank.failover import HOME, Route
from ttp.core.rank.outbox import RankOutbox
from ttp.core.rank.program import RankProgram
from ttp.core.rank.rescue import RankRescue, RankState
from ttp.core.rank.stand_in import StandInStream
from ttp.core.restore_messages import Restored, RestoreDecision, RestoreView
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED


class ProcessorMachine:
    """The protocol of one rank: ``on_event`` takes every event; ``deadline`` tells when the next ``Observed`` is due.

    Args:
        hello: the rank's ``Hello``; version, phase and other changing fields are filled in whenever it is sent.
        timeouts: see ``ttp.core.rank.events.RankTimeouts``.
        now: the time at which the machine starts, in seconds of the clock that ``on_event`` is given.
        layout: the layout of the job in parts, from ``ttp.core.layout_messages.in_parts``.
    """

    def __init__(self, hello: m.Hello, timeouts: ev.RankTimeouts, now: float, layout: Parts = ()) -> None:
        self.timeouts = timeouts
        self.term = 0
        self.incarnation = 0
        self.gone = self._guest = False
        self._outbox = RankOutbox()
        self.state = RankState(hello, hello.version, hello.phase, RankProgram())
        self._rescue = RankRescue(self.state, self._outbox, timeouts)
        self._copies = CopyTurns(hello.rank, self._outbox)
        self._layout = layout
        self._attempts = 0
        self._connect_at: float | None = now
        self._beat_at = now
        self._down_since: float | None = now
        self._view: RestoreView | None = None
        self._restored: Restored | None = None
        self._standby: m.StandbyUp | None = None
        self._undecided = False
        self._observed = ev.Observed(hello.version, hello.phase)
        self._route = Route(timeouts.failover_s)
        parts = self.state, self._outbox, self._rescue, self._route
        self._aside = StandInStream(*parts, timeouts, self._greeting, self._tell_layout)
        self._noted: act.NoteRing | None = None

    @property
    def incident(self) -> str:
        """The incident that this rank is frozen for; empty if it is not frozen."""
        return self._rescue.incident

    # ----------------------------------------------------------------------------------------------------------- events

    def on_event(self, event: ev.Event, now: float) -> list[act.Action]:
        """Take one event; return the actions to be done, in order."""
        if self.gone:
            return []
        match event:
            case ev.StreamUp():
                self._outbox.do(act.Send(self._greeting()))
            case ev.StreamDown():
                self._stream_down(now)
            case ev.OrderReceived(order):
                self._ordered(order, now)
            case ev.Quiet():
                self._rescue.quiet(event, now)
            case ev.NotRedone(text):
                self._rescue.not_redone(text, now)
            case ev.Worked(result):
                self._rescue.worked(result)
            case ev.Raised():
                self._raised(event)
            case ev.Returned():
                self._left(event)
            case ev.RestoreWanted(candidates, skipped, readings):
                self._view, self._undecided = RestoreView(self.state.rank, candidates, skipped, readings), True
                self._outbox.report(self._view)
            case ev.Based(version, size):
                self.state.hello, self.state.version = replace(self.state.hello, base_version=version), version
                if version:  # at version 0 nothing was read
                    self._restored = Restored(self.state.rank, version, size)
                    self._outbox.report(self._restored)
            case ev.Observed():
                self._observe(event, now)
            case ev.Tell(report):
                self._outbox.report(report)
            case ev.StandbyStarted(address):
                self._note_ring(address)  # the controller's announcement may be lost
                self._standby = m.StandbyUp(self.state.rank, address)
                self._outbox.report(self._standby)
            case ev.CopyMade() | ev.CopySkipped():
                self._copies.happened(event)
            case ev.AsideEvent():
                self._aside.happened(event, now)
            case ev.ProgramEvent():
                for said in self.state.program.happened(event):
                    self._outbox.report(said)
        if not self.gone:
            self._on_time(now)
        return self._outbox.take()

    def deadline(self) -> float | None:
        """Return when ``on_event(Observed(...), ...)`` should be called at the latest."""
        return None if self.gone else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        if self._connect_at is not None:
            yield self._connect_at
        if self._outbox.welcomed or self._aside.welcomed:
            yield self._beat_at
        yield from self._rescue.deadlines()
        yield from self._aside.deadlines()
        if self._down_since is not None and not self.incident and self._waits:
            yield self._down_since + self.timeouts.alone_s

    def _on_time(self, now: float) -> None:
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            start = self._attempts >= self.timeouts.start_controller_after and self._route.address == HOME
            self._outbox.do(act.Connect(start and self._route.went_round, self._route.address, self._within_s(now)))
        if (self._outbox.welcomed or self._aside.welcomed) and now >= self._beat_at:
            self._beat_at = now + self.timeouts.heartbeat_s
            o, state = self._observed, self.state
            beat = m.Heartbeat(state.rank, state.version, state.phase, o.mark, o.activity, o.written)
            self._outbox.report(beat)
            self._aside.say(beat)
        self._aside.on_time(now)
        if self._rescue.expire(now):
            why = f"; it could not write: {failure}" if (failure := self._rescue.failure) else ""
            text = f"frozen for {self.timeouts.rescue_s:g} s (TTP_OT) without being released{why}{self._at_stake}"
            self._exit(EXIT_NOT_SAVED, text)
        alone = self._down_since is not None and now >= self._down_since + self.timeouts.alone_s
        if alone and not self.incident and self._waits:
            self._outbox.do(act.LetGo(rescued=False))
            self.gone = True

    @property
    def _at_stake(self) -> str:
        """What an end that no controller has ordered may cost, as a clause to append."""
        first, newest = self.state.hello.base_version + 1, self.state.version
        if newest > first:
            return f"; unless a checkpoint has them, versions {first} to {newest} are lost"
        return f"; unless a checkpoint has it, version {newest} is lost" if newest == first else ""

    @property
    def _waits(self) -> bool:
        """Whether the training thread has left its loop and waits for the controller."""
        return bool(self.state.broken or self.state.returned or self.state.program.waits)

    def _within_s(self, now: float) -> float | None:
        """Return the seconds that an attempt to connect may take; None: no limit, as there is no other controller.

        Attempts at the lost controller end with its respite, so that all ranks come to the next controller at about the
        same time: an attempt at a host that does not answer ends only by this limit.
        """
        times = self.timeouts
        if not self._route.standbys:
            return None
        if self._route.takeover or self._down_since is None:
            return float(times.connect_s * 2**self._route.rounds)
        respite_s = max(times.failover_s, times.connect_s)  # a host that is cut off for a moment answers again
        return max(times.retry_min_s, self._down_since + respite_s - now)

    # --------------------------------------------------------------------------------------------------------- stream

    def _observe(self, observed: ev.Observed, now: float) -> None:
        self.state.version, self.state.phase, self._observed = observed.version, observed.phase, observed
        if observed.urgent:
            self._beat_at = now

    def _greeting(self) -> m.Hello:
        return replace(
            self.state.hello,
            incarnation=self.incarnation,
            version=self.state.version,
            phase=m.Phase.DONE if self.state.returned else self.state.phase,
            term_seen=self.term,
            incident="" if self._outbox.answers_aside else self.incident,  # without an incident of a stand-in
            resume=self.incarnation > 0,
            broken=self.state.broken.text if self.state.broken else "",
            standbys=self._route.standbys,
            takeover=self._route.takeover,
        )

    def _stream_down(self, now: float) -> None:
        if self._guest:  # the next controller might take it for the living rank
            self._exit(EXIT_SAVED, "the controller is lost, and this process was not part of the job yet")
            return
        self._outbox.welcomed = False
        if self._down_since is None:
            self._down_since = now
        self._route.lost(now - self._down_since)
        # Attempts at the lost controller do not delay the first one at its successor.
        in_vain = 0 if self._route.takeover and not self._route.rounds else min(self._attempts, 10)
        self._connect_at = now + min(self.timeouts.retry_max_s, self.timeouts.retry_min_s * 2**in_vain)
        self._attempts += 1
        self._aside.controller_lost()
        self._rescue.stream_lost()

    def _ordered(self, order: m.Order, now: float) -> None:
        match order:
            case m.Welcome():
                self._welcome(order, now)
                self._aside.watch(now)
                return
            case m.Refused(_, code, text):
                self._refused(code, text)
                return
            case TellLayout(_, digest):
                self._tell_layout(digest, act.Send)
                return
        assert isinstance(order, m.LedOrder), order
        if order.term < self.term or not self._outbox.welcomed:
            return  # from a controller that was replaced, or from the last stream
        self.term = order.term
        self._aside.led(order)
        match order:
            case m.Freeze() | m.Thaw() | m.Save() | m.Commit():
                self._rescue.ordered(order, now)
            case m.Release():
                self._released(order)
            case RestoreDecision() if self._undecided:
                self._undecided = False
                self._outbox.do(act.Decided(order))
            case m.Finished():
                self._outbox.do(act.LetGo(rescued=True))
                self.gone = True
            case m.TakeStack() | m.Probe() | m.StandBy() | Keep() | CopyTo() | MirrorTo():
                self._outbox.do(act.Serve(order))
            case m.Standbys(_, _, addresses):
                self._route.standbys = addresses
                self._note_ring()
            case Settled():
                self._copies.settled(order)
            case m.ProgramOrder():
                self._ordered_program(order)
            case _:
                pass  # late: of an incident or a generation that is over

    def _released(self, order: m.Release) -> None:
        """Exit the process, or let it go on (``again``). A rank that has raised an error of its own exits."""
        state = self.state
        self._outbox.report(m.Goodbye(state.rank, m.GoodbyeReason.RELEASED, state.version))
        own_fault = state.broken is not None and state.broken.kind is not m.FaultKind.COLLECTIVE
        if not (order.again and state.hello.can_continue) or own_fault:
            self._exit(order.exit_code, order.text)
        else:
            self.gone = True
            self._outbox.do(act.GoOn(order.text))

    def _tell_layout(self, digest: str, send: type[act.Send | act.SendAside]) -> None:
        if digest == self.state.hello.layout_digest:
            for index, groups in enumerate(self._layout):
                self._outbox.do(send(LayoutPart(self.state.rank, digest, index, len(self._layout), groups)))

    def _note_ring(self, standby: str = "") -> None:
        """Add a standby controller, if one is given, and have the ring of controllers recorded if it has changed."""
        self._route.knows(standby)
        ring = act.NoteRing(self.term, self._route.current, self._route.standbys)
        if ring.standbys and ring != self._noted:
            self._noted = ring
            self._outbox.do(ring)

    def _welcome(self, order: m.Welcome, now: float) -> None:
        if order.term < self.term:
            return  # from a controller that was replaced and does not know it
        first = self.incarnation == 0
        self.term, self.incarnation, self._guest = order.term, order.incarnation, order.guest
        self._outbox.welcomed, self._attempts, self._down_since = True, 0, None
        self._route.connected()
        self._note_ring()
        self._beat_at = now + self.timeouts.heartbeat_s
        self._outbox.do(act.Joined(order.incarnation, first, order.ttp_version, order.joins, order.guest))
        if self._undecided or self.state.version <= self.state.hello.base_version:
            for said in filter(None, (self._view, self._restored if not self._undecided else None)):
                self._outbox.report(said)  # other ranks may still wait for the decision, and this controller may be new
        self._copies.repeat()
        for report in (*filter(None, (self._standby,)), *self.state.program.repeated()):
            self._outbox.report(report)
        if self.state.broken is not None:
            self._report_broken(self.state.broken)
        if self.state.returned is not None:
            self._outbox.report(m.Goodbye(self.state.rank, self.state.returned.reason, self.state.version))

    def _refused(self, code: m.RefusalCode, text: str) -> None:
        if code is m.RefusalCode.BUSY and not self.incarnation:
            self._outbox.do(act.Rejected(code, text))
        if code is m.RefusalCode.BUSY or (code is m.RefusalCode.OTHER_JOB and self._route.takeover):
            return  # the stream ends, and the next attempt says hello again, or to the next standby controller
        if code is m.RefusalCode.MOVED:
            self._route.moved()
            return
        if self.incarnation:  # the rank was part of the job, but its state is no longer used
            self._exit(EXIT_NOT_SAVED, f"the controller refused this rank ({code.value}): {text}")
        else:
            self.gone = True
            self._outbox.do(act.Rejected(code, text))

    # --------------------------------------------------------------------------------------------------------- program

    def _ordered_program(self, order: m.ProgramOrder) -> None:
        answer = self.state.program.ordered(order)
        if isinstance(answer, act.ProgramAction):
            self._outbox.do(answer)
        elif answer is not None:
            self._outbox.report(answer)

    # ------------------------------------------------------------------------------------------------------- training

    def _raised(self, event: ev.Raised) -> None:
        self.state.broken = self.state.broken or event
        self._report_broken(event)

    def _report_broken(self, event: ev.Raised) -> None:
        rank, nonce = self.state.rank, self.state.hello.nonce
        self._outbox.report(m.Fault(rank, rank, event.kind, event.text, event.detail, nonce, event.wrong))

    def _left(self, event: ev.Returned) -> None:
        self.state.returned = event
        self.state.phase = m.Phase.DONE
        self._outbox.report(m.Goodbye(self.state.rank, event.reason, self.state.version))
        if event.reason is not m.GoodbyeReason.DONE:
            self._outbox.do(act.LetGo(rescued=True))  # the user does not wait for the other ranks
            self.gone = True

    # --------------------------------------------------------------------------------------------------------- output

    def _exit(self, code: int, text: str) -> None:
        self.gone = True
        self._outbox.do(act.Exit(code, text))
