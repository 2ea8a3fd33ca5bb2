"""The controller's protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
A *job* is a world of ranks that said hello. The first evidence of a fault opens an *incident*, and all ranks are frozen
at once, because a freeze can be taken back and a lost step cannot. Then the incident moves through stages. Each depends
only on what is known now, and can be entered again when more ranks are lost:

``FREEZING``   every connected rank is ordered to close its gate, and answers with the versions that it can materialise.
               A rank that is updating acknowledges first, and answers when the update has ended.
``SAVING``     a plan exists; its savers write their pieces. If a saver is lost or fails, the incident goes back to
               ``FREEZING``, where the plan is made again for the missing pieces (generation + 1).
``COMMITTING`` all pieces are durable; one rank renames the draft. If that rank is lost, another one is ordered to do
               it; the commit is idempotent.
``PROGRAM``    replaces both if the program itself saves or repairs (``program_recovery``).
``SAVED``      the checkpoint exists, but the fault may not be real: if a stream that broke comes back within the grace,
               it was a false alarm, and all ranks are thawed.
``RELEASED``   all ranks were told to exit (75 saved, 70 could not save). The incident ends when the streams have ended.

If all evidence is withdrawn before a commit is ordered, all ranks are thawed at once: nobody needs the checkpoint.

When the stream of a rank ends its answer is dropped: its gate may be open when it comes back, so it is asked again. If
it then turns out to hold a newer version than the planned one, the plan is made again.

The controller holds only soft state. After a takeover each rank's ``Hello`` tells the new controller whether the rank
is frozen and for which incident. The controller opens that incident again under a higher term and goes through the same
stages. While ranks are coming back it makes no plan.

Cost: constant time per event, O(world size) per stage of an incident. Equal reports of the ranks of a host are one
event, and the consequences of the answers that came in one message are worked out once (``settle``).

Files: this one takes events, and passes each on. ``admission`` admits ranks (by ``hello_rules``), ``fault_reports``
decides what is evidence of a fault, ``rescue`` moves an ``incident`` (its ``evidence``, ``frozen_ranks`` and ``draft``)
through its stages (with ``freezing``, ``planning``, ``saving``, ``committing``, ``retries``), ``job_end`` ends the job.
``parts`` makes the rest: ``membership`` keeps the ranks of the job, ``restore_agreement`` makes all ranks restore the
same checkpoint, ``hangs`` detects that no rank makes progress, ``silence`` watches for silent hosts, ``indirect_probe``
asks a rank of a third host about a silent one, ``standby`` has standby controllers started, ``layout_exchange`` gets
the layout behind a digest, ``mirrors`` and ``ttp.core.replication`` choose which other hosts keep copies of pages and
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ttp.core import messages as m
from ttp.core.controller import events as ev
from ttp.core.controller.admission import Admission
from ttp.core.controller.fault_reports import FaultReports
from ttp.core.controller.incident import Incident
from ttp.core.controller.job_end import JobEnd
from ttp.core.controller.job_verdict import Verdict
from ttp.core.controller.membership import Member
from ttp.core.controller.parts import ControllerParts
from ttp.core.controller.program_recovery import MakeRecovery, no_recovery
from ttp.core.controller.stand_in import StandIn
from ttp.core.copy_messages import Copied
from ttp.core.layout import Rank, Version, compact_ranks
from ttp.core.layout_messages import LayoutPart
from ttp.core.restore_messages import Restored, RestoreView


class ControllerMachine:
    """The controller's machine: ``on_event`` takes every event; ``deadline`` tells when the next ``Tick`` is due.

    Args:
        timeouts: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number; injected, so that runs can be repeated.
        now: the time at which the machine starts, in seconds of the clock that ``on_event`` is given.
        host: the host it runs on, named as ranks name their hosts.
        port: the port it listens on; 0 if unknown.
        program: leads jobs that save and repair themselves.
    """

    def __init__(
        self,
        timeouts: ev.ControllerTimeouts,
        new_id: Callable[[int], str],
        now: float,
        host: str = "",
        port: int = 0,
        program: MakeRecovery = no_recovery,
    ) -> None:
        parts = self._parts = ControllerParts(timeouts, new_id, host, port, program)
        self.timeouts, self.job = timeouts, parts.job
        self._outbox, self.rescue = parts.outbox, parts.rescue
        self._end = JobEnd(parts, now)
        self._admission = Admission(parts, self._end, now)
        self._faults = FaultReports(parts, self._end)
        self.stand_in = StandIn(timeouts, new_id, parts.rescue.meanwhile)
        """Saves for ranks whose own controller is silent, independently of the job that this controller leads."""
        self._late = 0  # graces in a row at whose end this controller was late
        self._suspected = 0  # the most suspects at one time since there last were none
        self._unsettled = False

    # ----------------------------------------------------------------------------------------------------------- events

    def on_event(self, event: ev.Event, now: float, *, more: bool = False) -> list[ev.Action]:
        """Take one event; return the actions to be done, in order. Late and duplicate events change nothing.

        Args:
            event: the event.
            now: the time, in seconds.
            more: more answers to a freeze follow: the caller calls ``settle`` after them, which does the rest.
        """
        meanwhile, rest = self.stand_in.split(event)
        if meanwhile is not None:
            waits = self.incident is not None and self.incident.deferred
            actions = self.stand_in.on_event(meanwhile, now)
            others = self.on_event(rest, now, more=more) if rest is not None else []
            return [*others, *(self._settle(now) if waits else ()), *actions]  # a freeze is sent before a thaw
        self.rescue.program.at(now)
        match event:
            case ev.Received(connection, m.Hello() as hello):
                self._admission.hello(connection, hello, now)
            case ev.Received(connection, LayoutPart() as part):
                for waited_on, hello in self._parts.layouts.told(connection, part, now):
                    self._admission.hello(waited_on, hello, now)
            case ev.Received(connection, m.Heartbeat() | m.Frozen() as report):
                return self.on_event(ev.ReceivedAlike(((connection, report.rank),), report), now, more=more)
            case ev.ReceivedAlike(who, m.Heartbeat() as beat):
                if not self._heartbeats(who, beat, now):
                    return self._outbox.take()  # nothing else can change
            case ev.ReceivedAlike(who, m.Frozen() as answer):
                self._answered(who, answer, now)
                if more:
                    self._unsettled = True
                    return self._outbox.take()
            case ev.Received(connection, report):
                self._report(connection, report, now)
            case ev.StreamEnded(connection):
                self._faults.stream_ended(connection, now)
            case ev.Accused():
                self._faults.accused(event, now)
            case ev.SaveRequested():
                self.rescue.request(event, now)
            case ev.LauncherSaid() | ev.HostsDrained() | ev.RankWasWrong() | ev.Remembered():
                self._end.told(event)
                if isinstance(event, ev.Remembered):
                    base = self.rescue.committing.base if event.present else None
                    self._parts.hangs.remember(event.stood_s, now, base)
            case ev.ProgramEvent():
                self.rescue.program.happened(event, incident=self.incident is not None)
            case ev.LookedAt():
                self._parts.silence.looked(event, now)
            case ev.LedElsewhere():
                self._admission.led_elsewhere(event, now)
            case ev.Tick():
                if self.stage == "training":
                    self._faults.look_for_hangs(now)
        return self._settle(now)

    def settle(self, now: float) -> list[ev.Action]:
        """Return the actions that follow from the events that came with ``more``."""
        return self._settle(now) if self._unsettled else []

    def _settle(self, now: float) -> list[ev.Action]:
        self._unsettled = False
        meanwhile = self.stand_in.on_event(ev.Tick(), now)
        frozen, alarms = self.incident is not None, self.rescue.false_alarms
        self._expire(now)
        self.rescue.advance(now)
        if self.job.guests and self._admission.seat_guests(now):
            self.rescue.advance(now)
        if self.incident is None:
            self.rescue.program.advance()
        if frozen and self.incident is None:
            false = self.rescue.false_alarms > alarms
            self._parts.hangs.restart(now, was_false=false)  # ranks were frozen until now, which was no hang
        self._end.advance(now, incident=self.incident is not None)
        return [*self._outbox.take(), *meanwhile]

    def deadline(self) -> float | None:
        """Return when ``on_event(Tick(), ...)`` should be called at the latest; ``None``: not before the next event."""
        return None if self._end.stopped else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        yield from self._end.deadlines()
        yield from self._admission.gathering.deadlines()
        if self.job.suspects:
            yield self._grace_ends
        yield from self._parts.silence.deadlines()
        if self.stage == "training":
            due = self._parts.hangs.deadline()
            if due is not None:
                yield due
        yield from self._parts.layouts.deadlines()
        yield from self.rescue.deadlines()
        if self.incident is None:
            yield from self.rescue.program.deadlines()
        yield from self.stand_in.deadlines()

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self.rescue.incident

    @property
    def standbys(self) -> tuple[str, ...]:
        """Addresses of the standby controllers (host:port)."""
        return self._parts.standby.addresses

    @property
    def copied_version(self) -> Version | None:
        """The newest version that every rank has copied to another host's memory; None: no copies are kept."""
        return self._parts.buddies.whole if self._parts.buddies.named else None

    @property
    def verdict(self) -> Verdict:
        """The exit code of the whole job, as far as it is known."""
        return self.rescue.verdict.now

    @property
    def drained_hosts(self) -> list[str]:
        """Hosts whose launchers must not start ranks again."""
        return sorted(self.rescue.verdict.drained)

    @property
    def unheard_hosts(self) -> list[str]:
        """Hosts whose ranks have left in good order but whose launcher has not asked for the verdict."""
        verdict = self.rescue.verdict
        return sorted(verdict.left - verdict.asked)

    @property
    def stage(self) -> str:
        """The stage of the job, in one word."""
        if self.incident is not None:
            return self.incident.stage.value
        if self._end.finished_at is not None:
            return "finished"
        if self.job.ended:
            return "waiting"
        return "training" if self.job.training else "forming"

    # -------------------------------------------------------------------------------------------------------- reports

    def _heartbeats(self, who: ev.Who, beat: m.Heartbeat, now: float) -> bool:
        """Take heartbeats. Return whether anything may follow from them."""
        speaking = self._speaking(who)
        for member in speaking.values():
            if not self.job.formed and beat.version > member.version > self.rescue.committing.base:
                self._trains(member, now)  # the first change of a version may be an unreported restore
            member.last_seen, member.version, member.phase = now, beat.version, beat.phase
            member.mark, member.activity = beat.mark, beat.activity
        if not speaking:
            return False
        self._parts.hangs.observed(speaking, beat, now)
        self._faults.record_lesson()
        self.rescue.program.moved(beat.version)
        if self.incident is not None:
            for rank in speaking:
                self.rescue.saving.written(self.incident, rank, beat.written, now)
        return self._heard(speaking, now)

    def _answered(self, who: ev.Who, answer: m.Frozen, now: float) -> None:
        speaking = self._speaking(who)
        self._heard(speaking, now)
        for member in speaking.values():
            member.last_seen, member.version, member.phase = now, answer.version, answer.phase
        if speaking:
            self.rescue.answered(list(speaking), answer, now)

    def _speaking(self, who: ev.Who) -> dict[Rank, Member]:
        """Return the ranks of ``who`` whose stream is their current one."""
        members = self.job.members
        return {
            rank: member
            for connection, rank in who
            if (member := members.get(rank)) is not None and member.connection == connection
        }

    def _heard(self, speaking: Mapping[Rank, Member], now: float) -> bool:
        """Note that ranks have been heard. Return whether that ends a doubt about their host."""
        ends_a_doubt = False
        for host in dict.fromkeys(member.hello.host for member in speaking.values()):
            ends_a_doubt |= self._parts.silence.heard(host, now)
        return ends_a_doubt

    def _trains(self, member: Member, now: float) -> None:
        """Note that the job is formed once a rank has made an update, which needs all ranks: others are unprotected.

        Ranks of a program without collectives train alone, so a rank may have come, and been lost, before others came.
        """
        job = self.job
        assert job.layout is not None
        job.formed, missed = True, job.missed(member.hello.launch)
        for lost in missed:
            job.members[lost.hello.rank] = lost
            job.lose(lost.hello.rank, now)
        missing = compact_ranks(Rank(rank) for rank in range(job.layout.world_size) if rank not in job.members)
        facts = {"world_size": job.layout.world_size, "incarnation": job.incarnation, "hosts": job.hosts_told()}
        self._outbox.record("formed", **facts, unprotected_ranks=missing)
        for lost in missed:
            text = f"{lost.name} was lost before all ranks had joined: its stream ended without a goodbye"
            self.rescue.fault(lost.hello.rank, m.FaultKind.LOST, text, now)

    def _report(self, connection: ev.ConnectionId, report: m.Report, now: float) -> None:
        member = self._speaking(((connection, report.rank),)).get(report.rank)
        if member is None:  # sent before hello, by a replaced process, or by a guest
            self._admission.guest_said(connection, report)
            return
        member.last_seen = now
        self._parts.silence.heard(member.hello.host, now)
        match report:
            case m.Fault():
                self._faults.reported(report, now)
            case RestoreView():
                self._viewed(report)
            case Restored():
                self._parts.restoring.restored(report)
            case m.Goodbye():
                self._goodbye(member, report, now)
            case m.StackTaken(_, incident, subject, text):
                self._outbox.record("stack", rank=subject, witness=report.rank, text=text, of=incident)
            case m.Probed():
                self._parts.indirect_probe.said(report, now)
            case m.StandbyUp():
                self._parts.standby.answered(report)
            case Copied():
                self._parts.buddies.copied(report)
            case m.ProgramReport():
                self.rescue.program.reported(report)
            case _ if self.incident is not None:
                self.rescue.saving.reported(self.incident, report, now)

    def _viewed(self, view: RestoreView) -> None:
        self._parts.restoring.viewed(view)
        if self._parts.restoring.decision is not None and not self._parts.restoring.decision.error:
            self.rescue.committing.restored(self._parts.restoring.decision.version)

    def _goodbye(self, member: Member, report: m.Goodbye, now: float) -> None:
        member.version = report.version
        self.rescue.program.moved(report.version)
        if report.reason is not m.GoodbyeReason.DONE:
            member.left = True
            self.rescue.verdict.left.add(member.hello.host)
        self.rescue.verdict.leaves(report)
        if report.reason is not m.GoodbyeReason.RELEASED:
            self.job.mark_done(report.rank)
            self._outbox.record(report.reason.value, rank=report.rank, version=report.version)
        known = member.left or self.job.formed or self.job.ended
        if member.done and not known and self.job.missed(member.hello.launch):
            self._trains(member, now)

    # ------------------------------------------------------------------------------------------------------------ time

    @property
    def _grace_s(self) -> float:
        """Return the seconds that a rank whose stream has ended may take to open another; more if no rank was left."""
        grace_s = self.timeouts.grace_s
        if not self.job.live or self._suspected == len(self.job.members):
            grace_s = max(grace_s, self.timeouts.partition_s)
        return ev.in_queue(grace_s, self._suspected)

    @property
    def _grace_ends(self) -> float:
        """Return when the rank that was lost first counts as dead.

        If very many were lost at once, not while others come back: their hellos may wait unread, behind one another.
        """
        since, most_s = next(iter(self.job.suspects.values())), ev.in_queue(self.timeouts.partition_s, self._suspected)
        many = self._suspected > ev.QUEUE_FROM
        longer = min(self.job.back_at + self.timeouts.grace_s, since + most_s) if many else since
        return max(since + self._grace_s, longer)

    def _expire(self, now: float) -> None:
        self._parts.layouts.expire(now)
        self._suspected = max(self._suspected, len(self.job.suspects)) if self.job.suspects else 0
        if self.job.suspects and now >= self._grace_ends:
            self._late = self._late + 1 if now > self._grace_ends + ev.TIMER_LATE_S else 0
            if 0 < self._late <= ev.LATE_MAX:  # it did not run: hellos may wait unread
                for rank, since in list(self.job.suspects.items()):
                    self.job.wait_longer(rank, max(since, now))
        while self.job.suspects and now >= self._grace_ends:
            self.job.fence(next(iter(self.job.suspects)), f"its stream did not come back within {self._grace_s:g} s")
        self._late = self._late if self.job.suspects else 0
        self._admission.gathering.expire(now)
        self._parts.silence.check(now)
        self.rescue.expire(now)
