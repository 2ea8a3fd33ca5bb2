"""The controller's protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
A *job* is a world of ranks that said hello. The first evidence of a fault opens an *incident*, and the world is frozen
at once, because freezing is reversible and waiting is not. From then on the incident moves through stages, each of
which only depends on what is known and can be entered again when more ranks are lost:

``FREEZING``   every rank that can be spoken to is told to close its gate. Each answers what it can still materialise. A
               rank that is updating acknowledges first and answers when the update has ended.
``SAVING``     a plan exists; its savers write their pieces. A saver that is lost or fails is replaced: back to
               ``FREEZING``, where the plan is made again for the pieces that are missing (generation + 1).
``COMMITTING`` all pieces are durable; one rank renames the draft. If it is lost another one is asked; the commit is
               idempotent.
``PROGRAM``    instead of both, where it is for the program itself to save or to repair (``program_recovery``).
``SAVED``      the checkpoint exists. What is left is to learn whether the fault is real: a stream that broke and came
               back within the grace was a false alarm, and the world is thawed.
``RELEASED``   everybody was told to exit (75 saved, 70 could not save). The incident ends when the streams have ended.

A rank that is lost loses its answer with its stream: its gate may be open when it comes back, so it is asked again. If
it then turns out to hold a newer version than the planned one, the plan is made again.

The controller holds soft state only. After a takeover it hears from every rank's ``Hello`` whether it is frozen and for
which incident, opens that incident again under a higher term and goes through the same stages. If every rank comes back
and nothing is broken, the world is thawed. While ranks are still coming back nothing is decided.

Cost: constant time per event, O(world size) per stage of an incident.

Files: ``membership`` says who belongs to the job, ``rescue`` moves an incident through its stages, ``saving`` turns a
plan into a checkpoint, ``restoring`` makes all ranks restore the same one, ``hangs`` notices that nothing moves,
``silence`` doubts hosts from which nothing comes, ``witnesses`` asks a second host about a silent one, ``standby`` sees
to it that there are controllers to take over, ``layouts`` asks what the digest of a layout stands for, ``mirrors`` says
which pages other hosts keep, ``buddies`` says where copies of shards go. This file ties them to events.

Takeover: a controller that knows nothing and is asked by a rank of a running job sends it on to the controllers that
stand by, unless the rank says that it has come to be taken over. ``gathering`` waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.events import (
    Accused,
    Action,
    ConnectionId,
    ControllerTimeouts,
    Event,
    LauncherSaid,
    LookedAt,
    ProgramEvent,
    RankWasWrong,
    Received,
    Remembered,
    SaveRequested,
    Stop,
    StreamEnded,
    Tick,
    in_queue,
)
from ttp.core.controller.gathering import Gathering
from ttp.core.controller.hangs import HangWatch
from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.indirect_probe import Witnesses
from ttp.core.controller.job_verdict import Verdict
from ttp.core.controller.layout_exchange import Layouts
from ttp.core.controller.membership import Member, Membership, Refusal
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import MakeRecovery, no_recovery
from ttp.core.controller.rescue import OUTSIDER, Rescue
from ttp.core.controller.restore_agreement import Restoring
from ttp.core.controller.silence import Silence
from ttp.core.controller.standby import Standby
from ttp.core.layout import Rank, Version, compact_ranks
from ttp.core.layout_messages import LayoutPart
from ttp.core.replication import Buddies
from ttp.errors import EXIT_BAD_CONFIG

STACKS_MAX = 8
"""Suspects whose stacks are asked for."""


class ControllerMachine:
    """The protocol. ``on_event`` is the only way in; ``deadline`` says when the next ``Tick`` is due.

    Args:
        patience: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number; injected, so that runs can be repeated.
        now: the time at which the machine starts, in seconds of the clock that ``on_event`` is given.
        host: where it runs, as ranks name their hosts.
        port: where it listens; 0: that is of no interest.
        program: leads jobs that save and repair themselves.
    """

    def __init__(
        self,
        patience: ControllerTimeouts,
        new_id: Callable[[int], str],
        now: float,
        host: str = "",
        port: int = 0,
        program: MakeRecovery = no_recovery,
    ) -> None:
        self.patience = patience
        self.job = Membership()
        self.finished_at: float | None = None
        self.stopped = False
        self._outbox = Outbox(self.job)
        self._layouts = Layouts(self.job, self._outbox)
        self._mirrors = Mirrors(self.job, self._outbox)
        self._buddies = Buddies(self.job, self._outbox)
        self._rescue = Rescue(self.job, self._outbox, patience, new_id, self._mirrors, program)
        self._restoring = Restoring(self.job, self._outbox)
        self._hangs = HangWatch(patience.hang_s, patience.heartbeat_s)
        self._silence = Silence(self.job, self._outbox, self._rescue, patience, host)
        self._witnesses = Witnesses(self.job, self._outbox, patience, host)
        self._standby = Standby(self.job, self._outbox, host, patience.standbys, port)
        self._quiet_since = now
        self._suspected = 0  # at one time, at most, since there was no suspect
        self._gathering = Gathering(self.job, self._rescue, patience, self._abdicate, now)

    # ------------------------------------------------------------------------------------------------------- entrance

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Take one event, return what has to be done, in order. Late and duplicate events change nothing."""
        self._rescue.program.at(now)
        match event:
            case Received(connection, m.Hello() as hello):
                self._hello(connection, hello, now)
            case Received(connection, LayoutPart() as part):
                for waited_on, hello in self._layouts.told(connection, part, now):
                    self._hello(waited_on, hello, now)
            case Received(connection, m.Heartbeat() as beat):
                if not self._heartbeat(connection, beat, now):
                    return self._outbox.take()  # nothing can follow from it
            case Received(connection, report):
                self._report(connection, report, now)
            case StreamEnded(connection):
                self._stream_ended(connection, now)
            case Accused():
                self._accused(event, now)
            case SaveRequested():
                self._rescue.request(event, now)
            case LauncherSaid() | RankWasWrong() | Remembered():
                self._about_the_end(event)
            case ProgramEvent():
                self._rescue.program.happened(event, incident=self.incident is not None)
            case LookedAt():
                self._silence.looked(event, now)
            case Tick():
                self._look_for_hangs(now)
        frozen = self.incident is not None
        self._expire(now)
        self._rescue.advance(now)
        if self.incident is None:
            self._rescue.program.advance()
        if frozen and self.incident is None:
            self._hangs.restart(now)  # nobody could move, and that was no hang
        self._maybe_finished(now)
        self._maybe_stop(now)
        return self._outbox.take()

    def deadline(self) -> float | None:
        """When ``on_event(Tick(), ...)`` should be called at the latest; ``None``: not before the next event."""
        return None if self.stopped else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        if self.finished_at is not None:
            yield self.finished_at + self.patience.linger_s
        if not self.job.live:
            yield self._quiet_since + self.patience.abandoned_s
        yield from self._gathering.deadlines()
        if self.job.suspects:
            yield next(iter(self.job.suspects.values())) + self._grace_s
        quiet = self._silence.deadline()
        if quiet is not None:
            yield quiet
        if self.incident is None and self.stage == "training":
            due = self._hangs.deadline()
            if due is not None:
                yield due
        yield from self._layouts.deadlines()
        yield from self._rescue.deadlines()
        if self.incident is None:
            yield from self._rescue.program.deadlines()

    # --------------------------------------------------------------------------------------------------- what is known

    @property
    def term(self) -> int:
        """Which controller this is; orders of an older term are ignored."""
        return self.job.term

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self._rescue.incident

    @property
    def last_incident(self) -> Incident | None:
        """The last one that was closed."""
        return self._rescue.last

    @property
    def incidents_total(self) -> int:
        """Incidents since this controller started."""
        return self._rescue.total

    @property
    def false_alarms(self) -> int:
        """Incidents that ended with a thaw, as nothing was broken."""
        return self._rescue.false_alarms

    @property
    def standbys(self) -> tuple[str, ...]:
        """Controllers that stand by (host:port)."""
        return self._standby.addresses

    @property
    def copied_version(self) -> Version | None:
        """The newest version of which every rank keeps a copy in another host's memory; None: copies are not kept."""
        return self._buddies.whole if self._buddies.named else None

    @property
    def base_version(self) -> Version:
        """What this incarnation started from; it is on disk already."""
        return self._rescue.base_version

    @property
    def last_commit(self) -> tuple[Version, str] | None:
        """The last checkpoint of this incarnation: version and path."""
        return self._rescue.saving.last_commit

    @property
    def verdict(self) -> Verdict:
        """One exit code for the whole job, as far as it is known."""
        return self._rescue.verdict.now

    @property
    def unheard_hosts(self) -> list[str]:
        """Hosts whose ranks have left in good order, and whose launcher has not asked for the verdict."""
        left = {mb.hello.host for mb in self.job.members.values() if mb.left}
        return sorted(left - self._rescue.verdict.asked)

    @property
    def save_dir(self) -> str:
        """Where the job saves, as its ranks say."""
        return self.job.save_dir

    @property
    def stage(self) -> str:
        """One word for what is going on."""
        if self.incident is not None:
            return self.incident.stage.value
        if self.finished_at is not None:
            return "finished"
        if self.job.ended:
            return "waiting"
        return "training" if self.job.training else "forming"

    # ----------------------------------------------------------------------------------------------------- membership

    def _hello(self, connection: ConnectionId, hello: m.Hello, now: float) -> None:
        unknown = hello.layout_digest not in self.job.layouts
        abdicates = hello.takeover and hello.term_seen > self.term and self.job.may_have_moved(hello)
        if abdicates and not unknown:
            self._abdicate(now)
        refusal = self._elsewhere(hello) or self.job.malformed(hello)
        if refusal is None and not (abdicates and unknown):
            refusal = self.job.refusal(hello) or self._busy(hello)
        if refusal is not None:
            self._outbox.refuse(connection, hello, *refusal)
            return
        if unknown:
            self._layouts.wait(connection, hello, now)
            return
        if self.job.starts_incarnation(hello):
            self._new_incarnation(hello, now)
        known = self.job.members.get(hello.rank)
        if known is not None and known.connection is not None and connection < known.connection:
            return  # it came late: the rank has opened another stream since
        if known is not None and known.hello.nonce != hello.nonce:
            text = f"rank {hello.rank} was started again as pid {hello.pid} on {hello.host}"
            self._outbox.send_to(hello.rank, m.Refused(hello.rank, m.RefusalCode.FENCED, text))
            self._forget(hello.rank)
        self._rescue.base_version = max(self._rescue.base_version, hello.base_version)
        first = hello.rank not in self.job.members
        if known is not None and known.hello.host != hello.host:
            self._silence.lost(hello.rank)  # on the host that it was on
        self.job.join(connection, hello, now)
        self._outbox.send(connection, m.Welcome(hello.rank, self.term, self.job.incarnation, hello.ttp_version))
        if first:  # one that comes back has not moved
            self._hangs.observed(hello.rank, hello.version, 0, hello.phase, "", now)
        self._silence.heard(hello.rank, now)
        self._standby.joined(hello.rank)
        self._buddies.joined(hello.rank)
        self._mirrors.joined(hello.rank)
        kind = "reconnected" if hello.resume else "joined"
        self._outbox.record(kind, rank=hello.rank, host=hello.host, pid=hello.pid, version=hello.version)
        self._gathering.joined(new=first, resumes=hello.resume, now=now)
        if self.job.complete and first:
            self._outbox.record("formed", world_size=hello.world_size, incarnation=self.job.incarnation)
        self._joined(hello, now)

    def _joined(self, hello: m.Hello, now: float) -> None:
        if self.finished_at is not None:
            self._finish(hello.rank)
            return
        self._rescue.joined(hello, now)
        if hello.broken:
            self._rescue.fault(hello.rank, m.FaultKind.EXCEPTION, hello.broken, now)

    def _busy(self, hello: m.Hello) -> Refusal | None:
        incident = self.incident
        saving = incident is not None and incident.stage is not Stage.RELEASED and bool(self.job.live)
        newcomer = not hello.incarnation and hello.rank not in self.job.members
        if saving and (newcomer or self.job.starts_incarnation(hello)):
            return m.RefusalCode.BUSY, "the last incarnation of this job is still being saved; try again in a moment"
        return None

    def _elsewhere(self, hello: m.Hello) -> Refusal | None:
        """This controller is new and the rank's job is not: there are others who are to take over."""
        if self.job.layout is None and hello.resume and hello.standbys and not hello.takeover:
            text = f"this controller has just been started; {hello.standbys[0]} stands by for this job"
            return m.RefusalCode.MOVED, text
        return None

    def _abdicate(self, now: float) -> None:
        """Another controller has led the job meanwhile: what this one knows is of the past."""
        self._outbox.record("abdicated", term=self.term)
        self._rescue.close()
        for connection in sorted(self.job.by_connection):
            self._outbox.send(connection, m.Refused(Rank(-1), m.RefusalCode.MOVED, "another controller leads this job"))
        self.job.abdicate()
        self._quiet_since = now
        self._forget_incarnation()

    def _forget_incarnation(self) -> None:
        self._restoring.reset()
        self._standby.reset()
        self._mirrors.reset()
        self._buddies.reset()
        self._rescue.program.reset()
        self._silence.reset()
        self.finished_at = None

    def _new_incarnation(self, hello: m.Hello, now: float) -> None:
        self._rescue.close()
        for rank in sorted(self.job.live):
            text = "a new incarnation of the job has started"
            self._outbox.send_to(rank, m.Refused(rank, m.RefusalCode.FENCED, text))
        same_job = (hello.run_id, hello.save_dir) == (self.job.run_id, self.job.save_dir)
        self._restoring.expect(self._rescue.saving.last_commit, same_job=same_job)
        self.job.start_incarnation(hello)
        self._forget_incarnation()
        self._hangs.reset(now)
        if not hello.resume:
            self._rescue.verdict.launch_begins(same_job=same_job)
        self._rescue.base_version, self._rescue.saving.last_commit = hello.base_version, None
        self._outbox.record(
            "incarnation",
            incarnation=self.job.incarnation,
            run_id=hello.run_id,
            world_size=hello.world_size,
            save_dir=hello.save_dir,
            resumed=hello.resume,
            groups={
                shard: compact_ranks(ranks) for shard, ranks in self.job.layouts[hello.layout_digest].groups.items()
            },
        )

    def _stream_ended(self, connection: ConnectionId, now: float) -> None:
        self._layouts.ended(connection, now)
        for rank in sorted(self.job.by_connection.get(connection, set())):
            member, first_of_host = self.job.members[rank], self._first_of_host(rank)
            self._rank_lost(member, now)
            if member.left:
                continue
            if self.job.formed:
                self._stream_lost(member, now, first_of_host=first_of_host)
            else:
                self._outbox.record("gone", rank=rank, host=member.hello.host, pid=member.hello.pid)
        if not self.job.live:
            self._quiet_since = now

    def _rank_lost(self, member: Member, now: float) -> None:
        """A rank cannot be spoken to any more: here all who keep something of it hear that, in this order.

        The rescue gives up what the rank was writing; nobody doubts its host for its sake; the job remembers it as gone
        in good order, as never there (before the job was formed), or as lost; its steps are not compared any more.
        """
        rank = member.hello.rank
        self._rescue.lost(rank)
        self._silence.lost(rank)
        if member.left:
            self.job.detach(rank)
            return
        if not self.job.formed:
            self.job.forget(rank)
            self._forget(rank)
        else:
            self.job.lose(rank, now)
            self._hangs.forget(rank)

    def _forget(self, rank: Rank) -> None:
        """The process was never part of a whole job: nothing that it said holds for its successor."""
        self._restoring.forget(rank)
        self._hangs.forget(rank)

    def _first_of_host(self, rank: Rank) -> bool:
        return not self.job.suspects_on[self.job.members[rank].hello.host]

    def _stream_lost(self, member: Member, now: float, *, first_of_host: bool) -> None:
        rank, silent_s = member.hello.rank, now - member.last_seen
        text = f"{member.name} was lost: its stream ended without a goodbye"
        cut_off = silent_s > self.patience.silent_s
        if cut_off:
            text += f", after {silent_s:.1f} s of silence"
        self._rescue.fault(rank, m.FaultKind.LOST, text, now)
        if cut_off and first_of_host:
            self._witnesses.ask(rank)

    def _look_for_hangs(self, now: float) -> None:
        if self.incident is not None or self.stage != "training":
            return
        suspicion = self._hangs.check(now, self.job.live)
        if suspicion is None:
            return
        for rank in suspicion.subjects or (OUTSIDER,):
            self._rescue.fault(rank, suspicion.kind, suspicion.text, now)
        for rank in suspicion.subjects[:STACKS_MAX]:
            self._ask_for_stack(rank)

    def _ask_for_stack(self, subject: Rank) -> None:
        """Of another rank of its host, which runs for sure; of itself if there is none."""
        hello = self.job.members[subject].hello
        others = (r for r in self.job.live if r != subject and self.job.members[r].hello.host == hello.host)
        witness = min(others, default=subject)
        incident = self.incident.id if self.incident is not None else ""
        self._outbox.send_to(witness, m.TakeStack(witness, self.term, incident, subject, hello.pid))

    def _about_the_end(self, event: LauncherSaid | RankWasWrong | Remembered) -> None:
        verdict = self._rescue.verdict
        before = verdict.now
        match event:
            case LauncherSaid(_, True, _):
                verdict.starts()
            case LauncherSaid(host, False, code):
                verdict.asks(host, code)
            case RankWasWrong(text):
                verdict.is_wrong(text)
            case Remembered(fruitless, progress):
                verdict.remember(fruitless, progress)
        if verdict.now.code == EXIT_BAD_CONFIG != before.code:
            self._outbox.record("wrong", text=verdict.now.text)

    def _accused(self, event: Accused, now: float) -> None:
        for index, rank in enumerate(event.ranks):
            member = self.job.members.get(rank)
            if member is None or member.left or not self.job.formed:
                continue  # before it is formed a job has nothing to lose
            if event.pids and event.pids[index] not in (0, member.hello.pid):
                continue  # an earlier process of this rank
            text = f"{member.name}: {event.reason}"
            if event.kind is m.FaultKind.EXITED:
                self._exited(member, text, now)
            else:
                self.job.condemn(rank, text)
            self._rescue.fault(rank, event.kind, text, now, witness=OUTSIDER)
        for page in event.pages:
            self._mirrors.hand_over(page)
        if not self.job.live:
            self._quiet_since = now

    def _exited(self, member: Member, text: str, now: float) -> None:
        """Somebody who knows says that the process has ended: no grace, and no way back."""
        rank = member.hello.rank
        refused = m.Refused(rank, m.RefusalCode.FENCED, f"{text}; its state is not used any more")
        self._outbox.send_to(rank, refused)  # should it be alive after all
        self._rank_lost(member, now)
        self.job.fence(rank, text)

    # -------------------------------------------------------------------------------------------------------- reports

    def _member(self, connection: ConnectionId, rank: Rank) -> Member | None:
        """The rank, if this stream is the one that speaks for it."""
        member = self.job.members.get(rank)
        return member if member is not None and member.connection == connection else None

    def _heartbeat(self, connection: ConnectionId, beat: m.Heartbeat, now: float) -> bool:
        """Whether anything may follow from it."""
        member = self._member(connection, beat.rank)
        if member is None:
            return False
        self._formed_by(member.version, beat.version)
        member.last_seen, member.version, member.phase = now, beat.version, beat.phase
        member.mark, member.activity = beat.mark, beat.activity
        self._hangs.observed(beat.rank, beat.version, beat.mark, beat.phase, beat.activity, now)
        self._rescue.program.moved(beat.version)
        if self.incident is not None:
            self._rescue.saving.written(self.incident, beat.rank, beat.written, now)
        return self._silence.heard(beat.rank, now)

    def _formed_by(self, known: Version, version: Version) -> None:
        """An update needs every rank: those that have not said hello exist too, and train without protection.

        The first change of a version may be a restore that nobody has told of; the next one is an update.
        """
        job = self.job
        if job.formed or not version > known > self.base_version or job.layout is None:
            return
        job.formed = True
        missing = compact_ranks(Rank(rank) for rank in range(job.layout.world_size) if rank not in job.members)
        self._outbox.record(
            "formed", world_size=job.layout.world_size, incarnation=job.incarnation, unprotected_ranks=missing
        )

    def _report(self, connection: ConnectionId, report: m.Report, now: float) -> None:
        member = self._member(connection, report.rank)
        if member is None:
            return  # said before hello, or by somebody who was replaced
        member.last_seen = now
        self._silence.heard(report.rank, now)
        match report:
            case m.Fault():
                self._fault_reported(report, now)
            case m.Frozen():
                member.version, member.phase = report.version, report.phase
                self._rescue.answered(report, now)
            case m.RestoreView():
                self._viewed(report)
            case m.Goodbye():
                self._goodbye(member, report)
            case m.StackTaken(_, incident, subject, text):
                self._outbox.record("stack", rank=subject, witness=report.rank, text=text, of=incident)
            case m.Probed():
                self._witnesses.said(report, now)
            case m.StandbyUp():
                self._standby.answered(report)
            case m.Copied():
                self._buddies.copied(report)
            case m.ProgramReport():
                self._rescue.program.reported(report)
            case _ if self.incident is not None:
                self._saving_reported(self.incident, report, now)

    def _saving_reported(self, incident: Incident, report: m.Report, now: float) -> None:
        saving = self._rescue.saving
        match report:
            case m.Saved():
                saving.saved(incident, report)
            case m.SaveFailed():
                saving.save_failed(incident, report)
            case m.Committed():
                saving.committed(incident, report, now)
            case m.CommitFailed():
                saving.commit_failed(incident, report)

    def _fault_reported(self, report: m.Fault, now: float) -> None:
        subject = self.job.members.get(report.subject)
        if subject is None or (report.nonce and report.nonce != subject.hello.nonce):
            return
        if report.subject == report.rank:
            self.job.condemn(report.subject, report.text)
        elif report.kind is m.FaultKind.EXITED:
            report = replace(report, text=f"{subject.name}: {report.text}")
            witness = self.job.members[report.rank]
            if not report.nonce or witness.hello.host != subject.hello.host or subject.left or not self.job.formed:
                return  # only a neighbour can know, and it knows which process it was
            self._exited(subject, report.text, now)
        self._rescue.fault(report.subject, report.kind, report.text, now, detail=report.detail, witness=report.rank)

    def _viewed(self, view: m.RestoreView) -> None:
        self._restoring.viewed(view)
        if self._restoring.decision is not None and not self._restoring.decision.error:
            self._rescue.base_version = max(self._rescue.base_version, self._restoring.decision.version)

    def _goodbye(self, member: Member, report: m.Goodbye) -> None:
        member.version = report.version
        if report.reason is not m.GoodbyeReason.DONE:
            member.left = True
        if report.reason is not m.GoodbyeReason.RELEASED:
            self.job.mark_done(report.rank)
            self._outbox.record(report.reason.value, rank=report.rank, version=report.version)

    # ------------------------------------------------------------------------------------------------------------ time

    @property
    def _grace_s(self) -> float:
        """How long a rank whose stream has ended may take to open another one."""
        return in_queue(self.patience.grace_s, self._suspected)

    def _expire(self, now: float) -> None:
        self._layouts.expire(now)
        self._suspected = max(self._suspected, len(self.job.suspects)) if self.job.suspects else 0
        while self.job.suspects:
            rank, since = next(iter(self.job.suspects.items()))
            if now < since + self._grace_s:
                break
            self.job.fence(rank, f"its stream did not come back within {self._grace_s:g} s")
        self._gathering.expire(now)
        self._silence.check(now)
        self._rescue.expire(now)

    # ------------------------------------------------------------------------------------------------------------ end

    def _maybe_finished(self, now: float) -> None:
        """The job is over when every rank has left its loop; nobody waits for one that has never said hello."""
        if self.incident is not None or not self.job.training or self.job.ended:
            return
        if len(self.job.done) < len(self.job.members):
            return
        self.finished_at, self.job.ended = now, True
        self._rescue.verdict.finished()
        for rank in self.job.members:
            self._finish(rank)
        self._outbox.record("finished", version=max(mb.version for mb in self.job.members.values()))

    def _finish(self, rank: Rank) -> None:
        self.job.members[rank].left = True
        self._outbox.send_to(rank, m.Finished(rank, self.term))

    def _maybe_stop(self, now: float) -> None:
        if self.stopped:
            return
        if self.finished_at is not None and (not self.job.live or now >= self.finished_at + self.patience.linger_s):
            self._stop("the job is over")
        elif not self.job.live and now >= self._quiet_since + self.patience.abandoned_s:
            self._stop(f"nobody spoke to this controller for {self.patience.abandoned_s:g} s")

    def _stop(self, reason: str) -> None:
        self.stopped = True
        self._outbox.record("stopped", reason=reason)
        self._outbox.add(Stop(reason))
