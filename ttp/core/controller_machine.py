"""The controller's protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
A *job* is a world of ranks that said hello. The first evidence of a fault opens an *incident*, and the world is frozen
at once, because freezing is reversible and waiting is not. From then on the incident moves through stages, each of
which only depends on what is known and can be entered again when more ranks are lost:

``FREEZING``   every rank that can be spoken to is told to close its gate. Each answers what it can still materialise. A
               rank that is updating acknowledges first and answers when the update has ended.
``SAVING``     a plan exists; its savers write their pieces. A saver that is lost or fails is replaced: the plan is made
               again from the answers that are left (generation + 1).
``COMMITTING`` all pieces are durable; one rank renames the draft. If it is lost another one is asked; the commit is
               idempotent.
``SAVED``      the checkpoint exists. What is left is to learn whether the fault is real: a stream that broke and came
               back within the grace was a false alarm, and the world is thawed.
``RELEASED``   everybody was told to exit (75 saved, 70 could not save). The incident ends when the streams have ended.

The controller holds soft state only. After a takeover it hears from every rank's ``Hello`` whether it is frozen and for
which incident, opens that incident again under a higher term and goes through the same stages.

Cost: constant time per event, O(world size) per stage of an incident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ttp.core import messages as m
from ttp.core.agreement import agree
from ttp.core.controller_events import (
    Accused,
    Action,
    AnswerSave,
    ConnectionId,
    Event,
    Patience,
    Received,
    Record,
    SaveRequested,
    Send,
    Stop,
    StreamEnded,
    Tick,
)
from ttp.core.decide import Answer, How, NoPlan, Plan, decide
from ttp.core.incident import Evidence, Incident, Stage
from ttp.core.layout import Rank, Shard, Version, compact_ranks
from ttp.core.membership import Member, Membership
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

OUTSIDER = Rank(-1)
"""The witness or subject that is no rank of the job."""


class ControllerMachine:
    """The protocol. ``on_event`` is the only way in; ``deadline`` says when the next ``Tick`` is due.

    Args:
        patience: see ``Patience``.
        new_id: makes an incident's id from its number; injected, so that runs can be repeated.
        now: the time at which the machine starts, in seconds of the clock that ``on_event`` is given.
    """

    def __init__(self, patience: Patience, new_id: Callable[[int], str], now: float) -> None:
        self.patience = patience
        self.term = 1
        self.job = Membership()
        self.incident: Incident | None = None
        self.last_incident: Incident | None = None
        self.incidents_total = 0
        self.base_version = Version(0)
        self.last_commit: tuple[Version, str] | None = None
        self.finished_at: float | None = None
        self.stopped = False
        self._new_id = new_id
        self._quiet_since = now
        self._gather_until: float | None = None
        self._views: dict[Rank, m.RestoreView] = {}
        self._decision: m.RestoreDecision | None = None
        self._actions: list[Action] = []

    # ------------------------------------------------------------------------------------------------------- entrance

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Take one event, return what has to be done, in order. Late and duplicate events change nothing."""
        self._actions = []
        match event:
            case Received(connection, m.Hello() as hello):
                self._hello(connection, hello, now)
            case Received(_, m.Heartbeat() as beat):
                self._heartbeat(event.connection, beat, now)
                return self._actions  # nothing can follow from it
            case Received(connection, report):
                self._report(connection, report, now)
            case StreamEnded(connection):
                self._stream_ended(connection, now)
            case Accused():
                self._accused(event, now)
            case SaveRequested(request, reason):
                self._save_requested(request, reason, now)
            case Tick():
                pass
        self._advance(now)
        return self._actions

    def deadline(self) -> float | None:
        """When ``on_event(Tick(), ...)`` should be called at the latest; ``None``: not before the next event."""
        return None if self.stopped else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        p, incident = self.patience, self.incident
        if self.finished_at is not None:
            yield self.finished_at + p.linger_s
        if not self.job.live:
            yield self._quiet_since + p.abandoned_s
        if self._gather_until is not None:
            yield self._gather_until
        for rank in self.job.suspects:
            yield (self.job.members[rank].lost_at or 0.0) + p.grace_s
        if incident is None:
            return
        if incident.stage is Stage.RELEASED:
            yield (incident.released_at or 0.0) + p.exit_s
        elif incident.stage is not Stage.SAVED:
            yield incident.opened_at + p.rescue_s
        if incident.stage is Stage.FREEZING:
            if incident.gather_until is not None:
                yield incident.gather_until
            if incident.waiting:
                yield incident.expire_check_at

    # ----------------------------------------------------------------------------------------------------- membership

    def _hello(self, connection: ConnectionId, hello: m.Hello, now: float) -> None:
        refusal = self.job.refusal(hello) or self._busy(hello)
        if refusal is not None:
            code, text = refusal
            self._send(connection, m.Refused(hello.rank, code, text))
            self._record("refused", rank=hello.rank, host=hello.host, pid=hello.pid, code=code.value, text=text)
            return
        if self.job.starts_incarnation(hello):
            self._new_incarnation(hello, now)
        self.finished_at = None
        self.term = max(self.term, hello.term_seen + 1 if hello.term_seen > self.term else self.term)
        self.base_version = max(self.base_version, hello.base_version)
        first = hello.rank not in self.job.members
        self.job.join(connection, hello, now)
        self._send(connection, m.Welcome(hello.rank, self.term, self.job.incarnation, hello.ttp_version))
        kind = "reconnected" if hello.resume else "joined"
        self._record(kind, rank=hello.rank, host=hello.host, pid=hello.pid, version=hello.version)
        if self.job.complete:
            self._gather_until = None
            if first:
                self._record("formed", world_size=hello.world_size, incarnation=self.job.incarnation)
        elif first and hello.resume and self._gather_until is None:
            self._gather_until = now + self.patience.gather_s  # this controller is new, the job is not
        self._after_join(hello, now)

    def _busy(self, hello: m.Hello) -> tuple[m.RefusalCode, str] | None:
        incident = self.incident
        saving = incident is not None and incident.stage is not Stage.RELEASED and bool(self.job.live)
        if saving and self.job.starts_incarnation(hello):
            return m.RefusalCode.BUSY, "the last incarnation of this job is still being saved; try again in a moment"
        return None

    def _new_incarnation(self, hello: m.Hello, now: float) -> None:
        self._close_incident()
        for rank in sorted(self.job.live):
            self._send_to(rank, m.Refused(rank, m.RefusalCode.FENCED, "a new incarnation of the job has started"))
        self.job.start_incarnation(hello)
        self._views, self._decision, self._gather_until = {}, None, None
        self.base_version, self.last_commit = hello.base_version, None
        self._record(
            "incarnation",
            incarnation=self.job.incarnation,
            run_id=hello.run_id,
            world_size=hello.world_size,
            save_dir=hello.save_dir,
            groups={g.name: compact_ranks(g.ranks) for g in hello.groups},
        )

    def _after_join(self, hello: m.Hello, now: float) -> None:
        rank = hello.rank
        if self.incident is None and hello.incident:
            self._open(now, snapshot=False, incident_id=hello.incident).gather_until = now + self.patience.gather_s
        if hello.broken:
            self._fault(rank, m.FaultKind.EXCEPTION, hello.broken, now)
        incident = self.incident
        if incident is None:
            if self._decision is not None and hello.resume:
                self._send_decision(rank)
            return
        if incident.stage is Stage.RELEASED:
            self._send_release(rank)
            return
        self._retract(rank, m.FaultKind.LOST)
        if incident.stage is Stage.FREEZING or rank not in incident.answers:
            self._freeze(rank, now)
        if incident.stage is Stage.SAVING and rank in incident.pending:
            self._send_save(rank)
        if incident.stage is Stage.COMMITTING and incident.committer == rank:
            self._send_commit()

    def _stream_ended(self, connection: ConnectionId, now: float) -> None:
        for rank in sorted(self.job.by_connection.get(connection, set())):
            member = self.job.members[rank]
            if member.left:
                self.job.detach(rank)
                continue
            self.job.lose(rank, now)
            self._fault(rank, m.FaultKind.LOST, f"{member.name} was lost: its stream ended without a goodbye", now)
        if not self.job.live:
            self._quiet_since = now

    # -------------------------------------------------------------------------------------------------------- reports

    def _member(self, connection: ConnectionId, rank: Rank) -> Member | None:
        """The rank, if this stream is the one that speaks for it."""
        member = self.job.members.get(rank)
        return member if member is not None and member.connection == connection else None

    def _heartbeat(self, connection: ConnectionId, beat: m.Heartbeat, now: float) -> None:
        member = self._member(connection, beat.rank)
        if member is not None:
            member.last_seen, member.version, member.phase = now, beat.version, beat.phase

    def _report(self, connection: ConnectionId, report: m.Report, now: float) -> None:
        member = self._member(connection, report.rank)
        if member is None:
            return  # said before hello, or by somebody who was replaced
        member.last_seen = now
        match report:
            case m.Fault():
                self._fault_reported(report, now)
            case m.Frozen():
                self._frozen(member, report, now)
            case m.Saved():
                self._saved(report)
            case m.SaveFailed():
                self._save_failed(report)
            case m.Committed():
                self._committed(report, now)
            case m.CommitFailed():
                self._commit_failed(report)
            case m.RestoreView():
                self._restore_view(report)
            case m.Goodbye():
                self._goodbye(member, report)

    def _fault_reported(self, report: m.Fault, now: float) -> None:
        subject = self.job.members.get(report.subject)
        if subject is None or (report.nonce and report.nonce != subject.hello.nonce):
            return
        if report.subject == report.rank:
            self.job.condemn(report.subject, report.text)
        self._fault(report.subject, report.kind, report.text, now, detail=report.detail, witness=report.rank)

    def _accused(self, event: Accused, now: float) -> None:
        for index, rank in enumerate(event.ranks):
            member = self.job.members.get(rank)
            if member is None or member.left:
                continue
            if event.pids and event.pids[index] not in (0, member.hello.pid):
                continue  # an earlier process of this rank
            text = f"{member.name}: {event.reason}"
            if event.kind is m.FaultKind.EXITED:
                self.job.lose(rank, now)
            self.job.condemn(rank, text)
            self._fault(rank, event.kind, text, now, witness=OUTSIDER)

    def _goodbye(self, member: Member, report: m.Goodbye) -> None:
        member.version = report.version
        if report.reason is m.GoodbyeReason.RELEASED:
            member.left = True
            return
        if report.reason is m.GoodbyeReason.LEFT:
            member.left = True
        self.job.mark_done(report.rank)
        self._record(report.reason.value, rank=report.rank, version=report.version)

    def _maybe_finished(self, now: float) -> None:
        """The job is over when every rank has left its loop."""
        if self.incident is not None or self.finished_at is not None or not self.job.complete or self.job.ended:
            return
        if len(self.job.done) < len(self.job.members):
            return
        for rank, member in self.job.members.items():
            member.left = True
            self._send_to(rank, m.Finished(rank, self.term))
        self.finished_at = now
        self.job.ended = True
        self._record("finished", version=max(mb.version for mb in self.job.members.values()))

    # ------------------------------------------------------------------------------------------------------ restoring

    def _restore_view(self, view: m.RestoreView) -> None:
        assert self.job.layout is not None
        self._views[view.rank] = view
        if self._decision is None and len(self._views) == self.job.layout.world_size:
            verdict = agree(self._views.values())
            chosen, error = (m.Candidate(Version(0), "", ""), verdict) if isinstance(verdict, str) else (verdict, "")
            self._decision = m.RestoreDecision(
                OUTSIDER, self.term, chosen.version, chosen.name, chosen.manifest_digest, error
            )
            self.base_version = chosen.version
            self._record("restore", version=chosen.version, name=chosen.name, error=error)
            for rank in self._views:
                self._send_decision(rank)
        elif self._decision is not None:
            self._send_decision(view.rank)

    def _send_decision(self, rank: Rank) -> None:
        assert self._decision is not None
        self._send_to(rank, replace(self._decision, rank=rank, term=self.term))

    # -------------------------------------------------------------------------------------------------------- freezing

    def _fault(
        self, subject: Rank, kind: m.FaultKind, text: str, now: float, *, detail: str = "", witness: int | None = None
    ) -> None:
        if self.finished_at is not None or (self.job.ended and self.incident is None):
            return
        if self.incident is None:
            self._open(now, snapshot=False)
        assert self.incident is not None
        if self.incident.stage is Stage.RELEASED:
            return
        self.incident.snapshot = False
        self._add_evidence(subject, kind, text, now, detail=detail, witness=witness)

    def _open(self, now: float, *, snapshot: bool, incident_id: str = "") -> Incident:
        self.incidents_total += 1
        incident = Incident(incident_id or self._new_id(self.incidents_total), now, snapshot)
        self.incident = incident
        self._record(
            "opened",
            incarnation=self.job.incarnation,
            term=self.term,
            world_size=self.job.layout.world_size if self.job.layout else 0,
            save_dir=self.save_dir,
            snapshot=snapshot,
            recovered=bool(incident_id),
        )
        for rank in sorted(self.job.live):
            self._freeze(rank, now)
        return incident

    def _add_evidence(
        self, subject: Rank, kind: m.FaultKind, text: str, now: float, *, detail: str = "", witness: int | None = None
    ) -> None:
        incident = self.incident
        assert incident is not None
        if any(e.subject == subject and e.kind is kind and not e.retracted for e in incident.evidence):
            return
        incident.evidence.append(Evidence(subject, kind, text, now))
        self._record("evidence", rank=subject, evidence=kind.value, text=text, detail=detail, witness=witness)

    def _retract(self, rank: Rank, kind: m.FaultKind) -> None:
        assert self.incident is not None
        if self.job.members[rank].broken:
            return
        for evidence in self.incident.evidence:
            if evidence.subject == rank and evidence.kind is kind and not evidence.retracted:
                evidence.retracted = True
                self._record("retracted", rank=rank, evidence=kind.value)

    def _freeze(self, rank: Rank, now: float) -> None:
        incident = self.incident
        assert incident is not None
        incident.forget_answer(rank)
        incident.silent.discard(rank)
        incident.waiting.add(rank)
        incident.frozen_at[rank] = now
        due = now + self.patience.answer_s
        incident.expire_check_at = min(incident.expire_check_at, due) if len(incident.waiting) > 1 else due
        cause = incident.cause if incident.evidence else "evidence of a fault"
        self._send_to(rank, m.Freeze(rank, self.term, incident.id, cause, incident.snapshot))

    def _frozen(self, member: Member, answer: m.Frozen, now: float) -> None:
        incident = self.incident
        if incident is None or answer.incident != incident.id or incident.stage is Stage.RELEASED:
            return
        incident.accept(answer)
        self._retract(answer.rank, m.FaultKind.SILENT)
        member.version, member.phase = answer.version, answer.phase
        self._record(
            "answer" if answer.final else "acknowledged",
            rank=answer.rank,
            version=answer.version,
            phase=answer.phase.value,
            stuck=answer.stuck,
            settled=answer.settled,
            after_ms=round((now - incident.frozen_at.get(answer.rank, now)) * 1e3, 3),
        )

    # -------------------------------------------------------------------------------------------------------- advance

    def _advance(self, now: float) -> None:
        """Move on as far as what is known allows. Called after every event; a fixed point when nothing is new."""
        self._expire(now)
        steps: dict[Stage, Callable[[Incident, float], None]] = {
            Stage.FREEZING: self._maybe_plan,
            Stage.SAVING: self._check_savers,
            Stage.COMMITTING: self._check_committer,
            Stage.SAVED: self._maybe_end,
            Stage.RELEASED: self._maybe_close,
        }
        before = None
        while self.incident is not None and self.incident.stage is not before:
            before = self.incident.stage
            steps[before](self.incident, now)
        self._maybe_finished(now)
        self._maybe_stop(now)

    def _expire(self, now: float) -> None:
        if self._gather_until is not None and now >= self._gather_until:
            self._gather_until = None
            self._missing_after_takeover(now)
        for rank in sorted(self.job.suspects):
            if now >= (self.job.members[rank].lost_at or 0.0) + self.patience.grace_s:
                self.job.condemn(rank, f"its stream did not come back within {self.patience.grace_s:g} s")
        incident = self.incident
        if incident is None or incident.stage in (Stage.SAVED, Stage.RELEASED):
            return
        if incident.gather_until is not None and now >= incident.gather_until:
            incident.gather_until = None
        if incident.stage is Stage.FREEZING and incident.waiting and now >= incident.expire_check_at:
            self._expire_answers(incident, now)
        if now >= incident.opened_at + self.patience.rescue_s:
            self._release(EXIT_NOT_SAVED, f"nothing was saved within {self.patience.rescue_s:g} s (TTP_OT)", now)

    def _expire_answers(self, incident: Incident, now: float) -> None:
        dues: list[float] = []
        for rank in sorted(incident.waiting):
            acknowledged = rank in incident.answers
            patience_s = self.patience.freeze_s if acknowledged else self.patience.answer_s
            due = incident.frozen_at[rank] + patience_s
            if now < due:
                dues.append(due)
                continue
            incident.waiting.discard(rank)
            incident.silent.add(rank)
            what = "is still in an update" if acknowledged else "did not answer the freeze"
            self._add_evidence(rank, m.FaultKind.SILENT, f"rank {rank} {what} after {patience_s:g} s", now)
        incident.expire_check_at = min(dues, default=now)

    def _missing_after_takeover(self, now: float) -> None:
        assert self.job.layout is not None
        for rank in range(self.job.layout.world_size):
            if rank not in self.job.members:
                self._fault(Rank(rank), m.FaultKind.LOST, f"rank {rank} did not come back to the new controller", now)

    # -------------------------------------------------------------------------------------------------- plan and save

    def _maybe_plan(self, incident: Incident, now: float) -> None:
        if incident.gather_until is not None and not self.job.complete:
            return  # after a takeover: somebody with a newer version may still say hello
        if incident.waiting & self.job.live and not self._newest_is_known(incident):
            return
        verdict = self._decide(incident)
        if isinstance(verdict, Plan):
            self._start_saving(incident, verdict, now)
        elif not self.job.suspects:  # a suspect that comes back may complete the picture
            self._release(EXIT_NOT_SAVED, verdict.reason, now)

    def _newest_is_known(self, incident: Incident) -> bool:
        """Ranks differ by at most one version (Statement 2): with both seen, no answer can add a newer one."""
        if len(incident.clean_versions) < 2:
            return False
        verdict = self._decide(incident)
        return isinstance(verdict, Plan) and verdict.version == max(incident.clean_versions)

    def _decide(self, incident: Incident) -> Plan | NoPlan:
        assert self.job.layout is not None
        able = (a for r, a in incident.answers.items() if a.final and self._able(incident, r))
        return decide(self.job.layout, (self._answer(a) for a in able))

    def _able(self, incident: Incident, rank: Rank) -> bool:
        """Has answered, can be spoken to, and has not failed to save."""
        return incident.answered(rank) and rank in self.job.live and rank not in incident.failures

    def _answer(self, frozen: m.Frozen) -> Answer:
        member = self.job.members[frozen.rank]
        return Answer(
            rank=frozen.rank,
            version=frozen.version,
            torn=frozen.phase is m.Phase.TORN,
            has_gradient=frozen.has_gradient,
            has_preimage=frozen.has_preimage,
            stuck=frozen.stuck or bool(member.broken),
            settled=frozen.settled,
            host=member.hello.host,
            incarnation=self.job.incarnation,
        )

    def _start_saving(self, incident: Incident, plan: Plan, now: float) -> None:
        incident.plan = plan
        on_disk = self.last_commit is not None and self.last_commit[0] == plan.version
        if plan.version == self.base_version or on_disk:
            self._nothing_new(incident, plan)
            return
        incident.stage = Stage.SAVING
        incident.orders = self._orders(incident, plan)
        incident.pieces, incident.pending = {}, set(incident.orders)
        self._record(
            "plan",
            version=plan.version,
            generation=incident.generation,
            reason=plan.reason,
            savers={a.shard: a.rank for a in plan.assignments},
            how={a.shard: a.how.value for a in plan.assignments if a.how is not How.AS_IS},
            draft=incident.draft,
            after_ms=round((now - incident.opened_at) * 1e3, 3),
        )
        for rank in incident.orders:
            self._send_save(rank)

    def _nothing_new(self, incident: Incident, plan: Plan) -> None:
        """The planned version is on disk already, or is the untouched beginning."""
        incident.stage = Stage.SAVED
        incident.path = self.last_commit[1] if self.last_commit else ""
        incident.outcome = (
            f"version {plan.version} is on disk already"
            if plan.version
            else "no update had finished: there is nothing to lose"
        )
        self._record("nothing_new", version=plan.version, text=incident.outcome, reason=plan.reason)

    def _orders(self, incident: Incident, plan: Plan) -> dict[Rank, m.SaverOrder]:
        """Savers get their shards; on every host one rank that is still there collects the pages of all its ranks."""
        shards: dict[Rank, list[Shard]] = {}
        hows: dict[Rank, How] = {}
        for assignment in plan.assignments:
            shards.setdefault(assignment.rank, []).append(assignment.shard)
            hows[assignment.rank] = assignment.how
        collectors = self._collectors(incident, set(shards))
        first = min(shards)
        return {
            rank: m.SaverOrder(
                rank=rank,
                shards=tuple(shards.get(rank, ())),
                how=hows.get(rank, How.AS_IS),
                pages=collectors.get(rank, ()),
                job_state=rank == first,
            )
            for rank in sorted(set(shards) | set(collectors))
        }

    def _collectors(self, incident: Incident, savers: set[Rank]) -> dict[Rank, tuple[Rank, ...]]:
        by_host: dict[str, list[Rank]] = {}
        for rank, member in sorted(self.job.members.items()):
            by_host.setdefault(member.hello.host, []).append(rank)
        collectors: dict[Rank, tuple[Rank, ...]] = {}
        for ranks in by_host.values():
            able = [r for r in ranks if self._able(incident, r)]
            if able:
                collectors[min(able, key=lambda r: (r not in savers, r))] = tuple(ranks)
        return collectors

    def _send_save(self, rank: Rank) -> None:
        incident = self.incident
        assert incident is not None and incident.plan is not None
        order, version = incident.orders[rank], incident.plan.version
        self._send_to(rank, m.Save(rank, self.term, incident.id, incident.generation, version, incident.draft, order))

    def _current(self, report: m.Saved | m.SaveFailed | m.Committed | m.CommitFailed, stage: Stage) -> Incident | None:
        """The open incident, if the report is about its present generation and stage."""
        incident = self.incident
        fits = incident is not None and (report.incident, report.generation, stage) == (
            incident.id,
            incident.generation,
            incident.stage,
        )
        return incident if fits else None

    def _saved(self, report: m.Saved) -> None:
        incident = self._current(report, Stage.SAVING)
        if incident is None or report.rank not in incident.pending:
            return
        incident.pieces[report.rank] = report.pieces
        incident.pending.discard(report.rank)
        pieces = [{"file": p.file, "size": p.size, "digest": p.digest, "shard": p.shard} for p in report.pieces]
        self._record("saved", rank=report.rank, generation=report.generation, pieces=pieces)

    def _save_failed(self, report: m.SaveFailed) -> None:
        incident = self._current(report, Stage.SAVING)
        if incident is not None and report.rank in incident.pending:
            incident.failures[report.rank] = report.text
            self._record("save_failed", rank=report.rank, generation=report.generation, text=report.text)

    def _check_savers(self, incident: Incident, now: float) -> None:
        """Go on to the commit when all is durable; replace savers that are gone."""
        gone = sorted(r for r in incident.pending if r not in self.job.live or r in incident.failures)
        if gone:
            self._replan(incident, gone, now)
        elif not incident.pending:
            self._start_commit(incident, now)

    def _replan(self, incident: Incident, gone: list[Rank], now: float) -> None:
        """Make the plan again from the answers that are left, under the next generation."""
        incident.generation += 1
        self._record("replan", generation=incident.generation, lost_savers=gone)
        verdict = self._decide(incident)
        if isinstance(verdict, Plan):
            self._start_saving(incident, verdict, now)
        elif self.job.suspects:
            incident.stage = Stage.FREEZING  # somebody may still come back within the grace
        else:
            self._release(EXIT_NOT_SAVED, _with_failures(incident, verdict.reason), now)

    # --------------------------------------------------------------------------------------------------------- commit

    def _start_commit(self, incident: Incident, now: float) -> None:
        able = [r for r in incident.answers if self._able(incident, r)]
        if able:
            incident.stage = Stage.COMMITTING
            incident.committer = min(able, key=lambda r: (r not in incident.pieces, r))
            self._send_commit()
        elif not self.job.suspects:
            self._release(EXIT_NOT_SAVED, _with_failures(incident, "nobody is left to commit the checkpoint"), now)

    def _send_commit(self) -> None:
        incident = self.incident
        assert incident is not None and incident.plan is not None and incident.committer is not None
        assert self.job.layout is not None
        collected = {r for order in incident.orders.values() for r in order.pages}
        self._record("commit", rank=incident.committer, generation=incident.generation)
        self._send_to(
            incident.committer,
            m.Commit(
                rank=incident.committer,
                term=self.term,
                incident=incident.id,
                generation=incident.generation,
                version=incident.plan.version,
                incarnation=self.job.incarnation,
                draft=incident.draft,
                cause=incident.cause,
                reason=incident.plan.reason,
                keep=self.job.members[incident.committer].hello.keep,
                pieces=tuple(p for r in sorted(incident.pieces) for p in incident.pieces[r]),
                missing_pages=tuple(Rank(r) for r in range(self.job.layout.world_size) if r not in collected),
            ),
        )

    def _check_committer(self, incident: Incident, now: float) -> None:
        assert incident.committer is not None
        if not self._able(incident, incident.committer):
            incident.committer = None
            incident.stage = Stage.SAVING  # all pieces are durable: another one commits

    def _committed(self, report: m.Committed, now: float) -> None:
        incident = self._current(report, Stage.COMMITTING)
        if incident is None:
            return
        assert incident.plan is not None
        version = incident.plan.version
        incident.stage, incident.path, incident.size = Stage.SAVED, report.path, report.size
        incident.outcome = f"saved version {version}"
        self.last_commit = (version, report.path)
        self._record(
            "committed",
            rank=report.rank,
            version=version,
            path=report.path,
            size=report.size,
            after_ms=round((now - incident.opened_at) * 1e3, 3),
        )

    def _commit_failed(self, report: m.CommitFailed) -> None:
        incident = self._current(report, Stage.COMMITTING)
        if incident is not None and incident.committer == report.rank:
            incident.failures[report.rank] = report.text
            self._record("commit_failed", rank=report.rank, text=report.text)

    # ------------------------------------------------------------------------------------------------ thaw or release

    def _maybe_end(self, incident: Incident, now: float) -> None:
        if self.job.suspects:
            return  # is it a false alarm? The grace will tell
        assert incident.plan is not None
        if incident.standing or any(mb.broken for mb in self.job.members.values()):
            text = f"{incident.outcome}; a restart goes on with step {incident.plan.version + 1}"
            self._release(EXIT_SAVED, text, now)
        else:
            self._thaw(incident, "the checkpoint is written" if incident.snapshot else "nothing is broken after all")

    def _thaw(self, incident: Incident, reason: str) -> None:
        for rank in sorted(self.job.live):
            self._send_to(rank, m.Thaw(rank, self.term, incident.id, reason))
        incident.outcome = incident.outcome or reason
        self._record("thawed", reason=reason, false_alarm=not incident.snapshot)
        self._close_incident()

    def _release(self, exit_code: int, text: str, now: float) -> None:
        incident = self.incident
        assert incident is not None
        if incident.snapshot and exit_code == EXIT_NOT_SAVED:
            incident.outcome = f"not saved: {text}"  # nothing is broken: training goes on
            self._thaw(incident, f"the checkpoint could not be written: {text}")
            return
        incident.stage, incident.exit_code, incident.release_text = Stage.RELEASED, exit_code, text
        incident.released_at = now
        self.job.ended = True
        if exit_code == EXIT_NOT_SAVED:
            incident.outcome = f"not saved: {text}"
        self._record("released", exit_code=exit_code, text=text)
        self._answer_requests(incident)
        for rank in sorted(self.job.live):
            self._send_release(rank)

    def _send_release(self, rank: Rank) -> None:
        incident = self.incident
        assert incident is not None and incident.exit_code is not None
        self._send_to(rank, m.Release(rank, self.term, incident.id, incident.exit_code, incident.release_text))

    def _maybe_close(self, incident: Incident, now: float) -> None:
        assert incident.released_at is not None
        if not self.job.live or now >= incident.released_at + self.patience.exit_s:
            self._record("closed", left_behind=sorted(self.job.live))
            self._quiet_since = now
            self._close_incident()

    def _close_incident(self) -> None:
        if self.incident is not None:
            self._answer_requests(self.incident)
            self.last_incident, self.incident = self.incident, None

    # ------------------------------------------------------------------------------------------------ save on request

    def _save_requested(self, request: int, reason: str, now: float) -> None:
        if not self.job.complete or self.job.ended or self.finished_at is not None:
            self._actions.append(AnswerSave(request, False, Version(0), "", "no job is training here"))
            return
        if self.incident is None:
            self._open(now, snapshot=True)
            self._add_evidence(OUTSIDER, m.FaultKind.SNAPSHOT, reason or "a checkpoint was asked for", now)
        assert self.incident is not None
        self.incident.requests.append(request)

    def _answer_requests(self, incident: Incident) -> None:
        saved = incident.stage is Stage.SAVED or incident.exit_code == EXIT_SAVED
        version = incident.plan.version if incident.plan else Version(0)
        for request in incident.requests:
            self._actions.append(AnswerSave(request, saved, version, incident.path, incident.outcome))
        incident.requests = []

    # ------------------------------------------------------------------------------------------------------------ end

    def _maybe_stop(self, now: float) -> None:
        if self.stopped:
            return
        if self.finished_at is not None and (not self.job.live or now >= self.finished_at + self.patience.linger_s):
            self._stop("the job is over")
        elif not self.job.live and now >= self._quiet_since + self.patience.abandoned_s:
            self._stop(f"nobody spoke to this controller for {self.patience.abandoned_s:g} s")

    def _stop(self, reason: str) -> None:
        self.stopped = True
        self._record("stopped", reason=reason)
        self._actions.append(Stop(reason))

    # --------------------------------------------------------------------------------------------------------- output

    @property
    def save_dir(self) -> str:
        """Where the job saves, as its ranks say."""
        return next((mb.hello.save_dir for mb in self.job.members.values()), "")

    @property
    def stage(self) -> str:
        """One word for what is going on."""
        if self.incident is not None:
            return self.incident.stage.value
        if self.finished_at is not None:
            return "finished"
        if self.job.ended:
            return "waiting"
        return "training" if self.job.complete else "forming"

    def _send(self, connection: ConnectionId, order: m.Order) -> None:
        self._actions.append(Send(connection, order))

    def _send_to(self, rank: Rank, order: m.Order) -> None:
        member = self.job.members.get(rank)
        if member is not None and member.connection is not None:
            self._send(member.connection, order)

    def _record(self, kind: str, **facts: Any) -> None:
        self._actions.append(Record(kind, self.incident.id if self.incident else "", facts))


def _with_failures(incident: Incident, reason: str) -> str:
    failures = [f"rank {rank}: {text}" for rank, text in sorted(incident.failures.items())]
    return "; ".join([*failures, reason])
