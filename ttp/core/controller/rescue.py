"""Takes an incident from its first evidence to the release or the thaw.

``freezing`` freezes the ranks, ``planning`` decides when and what to save, ``saving`` writes it, and ``committing``
makes the checkpoint exist. The recovery behind ``program_recovery`` does both if the program itself saves.
``ttp.core.controller.machine`` explains the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller import continuing
from ttp.core.controller.committing import Committing, then
from ttp.core.controller.copy_counts import CopyCounts
from ttp.core.controller.draft import Draft
from ttp.core.controller.events import AnswerSave, ControllerTimeouts, SaveRequested
from ttp.core.controller.evidence import OUTSIDER, Evidence, EvidenceBook
from ttp.core.controller.freezing import Freezing
from ttp.core.controller.frozen_ranks import FrozenRanks
from ttp.core.controller.incident import NEVER, OVER, Incident, Stage
from ttp.core.controller.job_verdict import JobVerdict
from ttp.core.controller.meanwhile import Meanwhile
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.planning import ANSWERS, Go, Planner, Wait
from ttp.core.controller.program_recovery import Ending, MakeRecovery, Outcome, RescueContext
from ttp.core.controller.retries import Retries
from ttp.core.controller.saving import Saving
from ttp.core.controller.shadow import Shadow
from ttp.core.decide import NoPlan, Plan
from ttp.core.layout import Rank, Version, ranks_text
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED


class Rescue:
    """Leads the open incident, if there is one, and remembers the last one.

    Args:
        job: the ranks.
        outbox: takes orders and records.
        timeouts: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number.
        mirrors: tells which ranks keep the pages of lost hosts.
        make_program: makes the part that leads jobs that save and repair themselves.
    """

    def __init__(
        self,
        job: Membership,
        outbox: Outbox,
        timeouts: ControllerTimeouts,
        new_id: Callable[[int], str],
        mirrors: Mirrors,
        make_program: MakeRecovery,
    ) -> None:
        self.incident: Incident | None = None
        self.last: Incident | None = None
        self.total = self.false_alarms = 0
        committing = self.committing = Committing(job, outbox)
        self._planner = Planner(job, timeouts)
        self.saving = Saving(job, outbox, mirrors, committing, self._planner.outvoted)
        self.meanwhile, self.verdict = Meanwhile(), JobVerdict()
        self._job, self._outbox, self._timeouts, self._new_id = job, outbox, timeouts, new_id
        self._freezing = Freezing(job, outbox, timeouts, self.meanwhile)
        self._retries = Retries(job, outbox)
        self._shadow = Shadow(job, outbox, self.saving, committing, self.verdict)

        def drain(hosts: frozenset[str]) -> None:
            self.verdict.drained |= hosts

        decide, on_disk = self._planner.decide, committing.on_disk
        context = RescueContext(job, outbox, decide, on_disk, self.fault, timeouts.rescue_s, drain)
        self.program = self._planner.program = make_program(context)

    # ------------------------------------------------------------------------------------------------------- evidence

    def fault(
        self, subject: Rank, kind: m.FaultKind, text: str, now: float, *, detail: str = "", witness: int | None = None
    ) -> None:
        """Take evidence of a fault. The first evidence opens an incident."""
        host = self._job.host_of(subject)
        evidence = Evidence(subject, kind, text, now, host, final=kind is m.FaultKind.EXITED and witness == OUTSIDER)
        over = self._job.ended and self.incident is None
        incident = self.last if over else self.incident or self._open(now, text)
        if incident is None or over or incident.stage is Stage.RELEASED:
            if incident and incident.evidence.stands(subject, kind):  # late, a launcher knows how a large process died
                incident.evidence.add(evidence, detail, witness)
            return
        if incident.snapshot:
            incident.snapshot, incident.patient_since = False, now
            self._freezing.send(incident, sorted(self._job.live), text)  # no rank may thaw on its own now
        incident.evidence.add(evidence, detail, witness)

    def request(self, event: SaveRequested, now: float) -> None:
        """Take a request for a checkpoint. An open incident answers it when it ends."""
        if not self._job.training or self._job.ended:
            self._outbox.add(AnswerSave(event.request, False, Version(0), "", "no job is training here"))
            return
        incident = self.incident or self.snapshot(event.reason or "a checkpoint was requested", now)
        incident.requests.append(event.request)
        incident.trial |= event.again

    def snapshot(self, text: str, now: float) -> Incident:
        """Open an incident for a checkpoint after which all ranks are thawed; no incident may be open."""
        incident = self._open(now, text, snapshot=True)
        incident.evidence.add(Evidence(OUTSIDER, m.FaultKind.SNAPSHOT, text, now))
        return incident

    def _open(self, now: float, cause: str, *, snapshot: bool = False, recovered_id: str = "") -> Incident:
        assert self._job.layout is not None
        self.total += 1
        fresh_id = self._new_id(self.total)
        name, owner = (recovered_id, f"{recovered_id}-{fresh_id}") if recovered_id else (fresh_id, fresh_id)
        book, ranks = EvidenceBook(name, self._outbox.record_of), FrozenRanks(CopyCounts(self._job.layout))
        incident = Incident(name, now, now, snapshot, book, ranks, Draft(owner), recovered=bool(recovered_id))
        incident.deferred = self.meanwhile.saves(self._job)
        self.incident, self._outbox.incident = incident, incident.id
        self._outbox.record("opened", **self._job.facts(), snapshot=snapshot, recovered=incident.recovered)
        self._freezing.ask(incident, sorted(self._job.live), cause, now)
        return incident

    # -------------------------------------------------------------------------------------------------------- members

    def joined(self, hello: m.Hello, now: float) -> None:
        """Handle a rank's hello: freeze the rank for the open incident, or tell it how its incident ended."""
        incident = self.incident
        if incident is None:
            if hello.incident or self._job.ended:
                self._after_incident(hello, now)
            return
        if incident.stage is Stage.RELEASED:
            self._send_release(incident, (hello.rank,))
            return
        incident.evidence.withdraw(hello.rank, m.FaultKind.LOST)
        if hello.incident != incident.id:
            incident.draft.drop(hello.rank)  # its gate was open meanwhile
        self._freezing.ask(incident, (hello.rank,), incident.cause, now)
        self.saving.resend(incident, hello.rank)
        self.program.came_back(hello.rank, frozen=hello.incident == incident.id)

    def _after_incident(self, hello: m.Hello, now: float) -> None:
        """Answer a frozen rank while no incident is open: it missed the end, or another controller froze it."""
        last = self.last
        if last is not None and last.release is not None and self._job.ended:
            self._send_release(last, (hello.rank,))
        elif last is not None and last.id == hello.incident:
            self._outbox.send_to(hello.rank, m.Thaw(hello.rank, self._job.term, last.id, last.outcome))
        else:
            self._open(now, "a controller was lost during an incident", recovered_id=hello.incident)

    def lost(self, rank: Rank) -> None:
        """Go on without a rank that is disconnected."""
        self.program.lost(rank)
        if self.incident is not None:
            self._do_without(self.incident, rank)

    def unheard(self, rank: Rank, text: str, now: float) -> None:
        """Save without a rank whose host is silent, and do not wait for its answer."""
        self.fault(rank, m.FaultKind.SILENT, text, now)
        if (incident := self.incident) is not None and incident.stage is not Stage.RELEASED:
            self._do_without(incident, rank)

    def _do_without(self, incident: Incident, rank: Rank) -> None:
        incident.ranks.forget(rank)
        incident.ranks.waiting.discard(rank)
        incident.draft.drop(rank)

    def heard_again(self, rank: Rank, now: float) -> None:
        """Ask a rank for its answer again, because its host is no longer silent."""
        if (incident := self.incident) is not None and incident.stage is not Stage.RELEASED:
            incident.evidence.withdraw(rank, m.FaultKind.SILENT)
            self._freezing.ask(incident, (rank,), incident.cause, now)

    def answered(self, ranks: Collection[Rank], answer: m.Frozen, now: float) -> None:
        """Take the answer of these ranks to a freeze."""
        incident = self.incident
        if incident is None and not self._job.ended:  # frozen for an incident that is over or unknown
            order = m.Thaw(m.SEVERAL, self._job.term, answer.incident, "no incident is open")
            self._outbox.send_alike(ranks, order)
        if incident is None or answer.incident != incident.id or incident.stage is Stage.RELEASED:
            return
        self._planner.heard(incident, self._freezing.take(incident, ranks, answer, now), answer)

    # ----------------------------------------------------------------------------------------------------------- time

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``expire`` has something to do."""
        incident, p = self.incident, self._timeouts
        if incident is None:
            return
        if incident.stage is Stage.RELEASED:
            yield incident.closes_at
            return
        if incident.stage is not Stage.SAVED:
            yield incident.ends_at(p.rescue_s)
        if (since := self.saving.stall_since(incident)) is not None:
            yield since + p.stall_s
        if incident.look_again_at:
            yield incident.look_again_at
        yield from (until for until in incident.pauses.values() if until != OVER)
        if incident.stage is Stage.PROGRAM:
            yield from self.program.deadlines()
        if incident.ranks.waiting:
            yield incident.ranks.expire_check_at

    def expire(self, now: float) -> None:
        """Give up saves, commits, answers and incidents that take too long."""
        incident, p = self.incident, self._timeouts
        if incident is None or incident.stage is Stage.RELEASED:
            return
        self._freezing.expire(incident, now)
        incident.end_pauses(now)
        if self.saving.stalled(incident, p.stall_s, now) or self._retries.refused(incident):
            self._retries.elsewhere(incident)  # other ranks would have the same storage
        if incident.stage is not Stage.SAVED and now >= incident.ends_at(p.rescue_s):
            self._end_without(incident, f"nothing was saved within {p.rescue_s:g} s (TTP_OT)", now)

    # -------------------------------------------------------------------------------------------------------- advance

    def advance(self, now: float) -> None:
        """Move the incident on as far as possible. Called after every event; without news it changes nothing."""
        steps: dict[Stage, Callable[[Incident, float], None]] = {
            Stage.FREEZING: self._maybe_plan,
            Stage.SAVING: self._check_savers,
            Stage.PROGRAM: self._follow_program,
            Stage.COMMITTING: lambda incident, _: self.committing.check(incident),
            Stage.SAVED: self._maybe_end,
            Stage.RELEASED: self._maybe_close,
        }
        if (incident := self.incident) is not None and self._was_false(incident):
            self._thaw(incident, "nothing is broken after all")
        elif incident is not None and (newer := self._planner.improved_by(incident)):
            self._shadow.leave(incident)
            incident.enter(Stage.FREEZING, f"a newer version has come from {ranks_text(newer)}")
            incident.draft.committer, incident.again_until = None, NEVER
        before = None
        while self.incident is not None and self.incident.stage is not before:
            before = self.incident.stage
            steps[before](self.incident, now)

    def _was_false(self, incident: Incident) -> bool:
        """Return whether nothing is broken after all, so that nobody needs the checkpoint, which may take minutes."""
        job, early = self._job, incident.stage in (Stage.FREEZING, Stage.SAVING)
        broken = (early and self._freezing.only_hangs(incident)) or incident.faulty or job.broken or job.in_doubt
        wanted = incident.snapshot or incident.requests or incident.ranks.redoing
        return early and job.all_here and not (wanted or broken)

    def _maybe_plan(self, incident: Incident, now: float) -> None:
        step = self._planner.should_plan(incident, now)
        self.committing.take_over(self.meanwhile.made(self._job) if isinstance(step, Go) else None)
        match step:
            case Wait(why):
                if why not in (ANSWERS, incident.waits_for):  # answers are recorded one by one
                    self._outbox.record("waits", reason=why)
                incident.waits_for = why
            case Go(_) if self.program.leads:
                incident.enter(Stage.PROGRAM, "the program itself saves")
                self.program.begin(incident)
            case Go(result) if self._shadow.awaits(incident, result, now):
                return
            case Go(Plan(version) as plan) if version > self.committing.on_disk() or incident.may_repeat(version):
                self._shadow.choose(incident, plan)
                self.saving.begin(incident, plan, now)
            case Go(NoPlan(reason)) if not self._planner.none_newer(incident, self.committing.on_disk()):
                self._give_up(incident, reason, now)
            case Go(result):
                self.committing.nothing_new(incident, result)

    def _follow_program(self, incident: Incident, now: float) -> None:
        ending = self.program.advance()
        if ending is None:
            return
        self._outbox.record("mended", outcome=ending.outcome.value, version=ending.version, text=ending.text)
        match ending:
            case Ending(Outcome.RESUMED, version, text, path):
                if path:
                    self.committing.last = (version, path)  # saved before it was mended
                mended = incident.faulty and version > 0
                for kind in m.FaultKind:
                    incident.evidence.withdraw_all(kind)
                self._thaw(incident, text, mended=mended)
            case Ending(Outcome.SAVED, version, text, path):
                self._saved_by_program(incident, version, text, path, now)
            case Ending(_, _, text):
                self._end_without(incident, text, now)

    def _saved_by_program(self, incident: Incident, version: Version, text: str, path: str, now: float) -> None:
        incident.enter(Stage.SAVED, text)
        incident.saved, incident.outcome, incident.path, self.committing.last = version, text, path, (version, path)
        if self.program.halted:
            self._release(incident, EXIT_SAVED, f"{text}; {then(version)}", now)

    def _check_savers(self, incident: Incident, now: float) -> None:
        self._shadow.failed(incident)
        if incident.stage is Stage.SAVING:
            self.saving.check(incident, now)
        if self.committing.stranded(incident):
            self._give_up(incident, "no rank is left to commit the checkpoint", now)

    # ------------------------------------------------------------------------------------------------ thaw or release

    def _maybe_end(self, incident: Incident, now: float) -> None:
        if incident.snapshot:
            resumes, incident.outcome = continuing.trial(self._job, incident, self.committing.base)
            if resumes:
                self._release(incident, EXIT_SAVED, incident.outcome, now)
            else:
                self._thaw(incident, "the checkpoint is written")
            return
        if self._job.in_doubt or self._freezing.looks_again(incident, now):
            return  # the grace decides whether it is a false alarm
        if not (incident.faulty or self._job.broken):
            if self._shadow.is_durable(incident, now):
                self._thaw(incident, "nothing is broken after all")
        elif self._shadow.may_end(incident, now) and not self.saving.pages.repeats(incident, now):
            self._release(incident, EXIT_SAVED, f"{incident.outcome}; {then(incident.saved)}", now)

    def _thaw(self, incident: Incident, reason: str, *, mended: bool = False) -> None:
        false_alarm = not (incident.snapshot or mended)
        self.false_alarms += false_alarm
        self._outbox.send_alike(sorted(self._job.live), m.Thaw(m.SEVERAL, self._job.term, incident.id, reason))
        incident.outcome = incident.outcome or reason
        self._outbox.record("thawed", reason=reason, false_alarm=false_alarm)
        self.close()
        self.program.over(resumed=True)

    def _give_up(self, incident: Incident, reason: str, now: float) -> None:
        """Try in the fallback directory or later, as saving here and now failed; else end without a checkpoint."""
        if self._retries.elsewhere(incident):
            self._maybe_plan(incident, now)
        elif not self._retries.later(incident, reason, now):
            if incident.takes_back():  # not before, as the storage may only have refused the newer version
                self._maybe_plan(incident, now)
            else:
                self._end_without(incident, reason, now)

    def _end_without(self, incident: Incident, reason: str, now: float) -> None:
        """End without a checkpoint: thaw if that is enough, else release. End as saved if one was made before."""
        if incident.again_until < NEVER:
            incident.enter(Stage.FREEZING, "the checkpoint that exists will do")
            self.committing.nothing_new(incident, NoPlan("no more pages could be added"))
            return
        if incident.saved and incident.stage is Stage.PROGRAM:
            text = f"saved version {incident.saved}; then: {reason}"
            self._saved_by_program(incident, incident.saved, text, incident.path, now)
            return
        text = "; ".join([*incident.ranks.failures_shown(), reason])
        saved = incident.saved if incident.size else 0  # in this incident, before ranks with a newer version came
        what = f"saved version {saved}, but none of the newer ones" if saved else "not saved"
        incident.outcome = f"{what}: {text}"
        broken = incident.faulty or self._job.broken or self._job.in_doubt
        if (incident.snapshot or not broken) and not self.program.halted:
            self._thaw(incident, f"the checkpoint could not be written: {text}")
        else:
            lost = "" if self.program.leads else self.committing.lost(self._planner.newest_finished(incident))
            code, text = (EXIT_SAVED, incident.outcome) if saved else (EXIT_NOT_SAVED, text + lost)
            self._release(incident, code, text, now)

    def _release(self, incident: Incident, exit_code: int, text: str, now: float) -> None:
        self.program.over(resumed=False)
        self.verdict.progress |= (self.committing.last or self.committing.held) is not None
        end = self.verdict.released(exit_code, text, incident.cause, preempted=incident.evidence.preempted)
        assert end.code is not None
        again, facts = continuing.judge(self._job, incident, end, self.committing.base)
        exit_code, text = end.code, end.text
        incident.enter(Stage.RELEASED, text)
        explained = continuing.explained(text, incident.cause, facts)
        incident.release = m.Release(m.SEVERAL, self._job.term, incident.id, exit_code, explained, again)
        incident.closes_at = now + self._timeouts.exit_s
        self._job.ended = True
        facts |= {"progress": self.verdict.progress, "preempted": self.verdict.preempted}
        self._outbox.record("released", exit_code=exit_code, text=text, **facts)
        self._answer_requests(incident)
        self._send_release(incident, sorted(self._job.live))

    def _send_release(self, incident: Incident, ranks: Collection[Rank]) -> None:
        assert incident.release is not None
        self._outbox.send_alike(ranks, replace(incident.release, term=self._job.term))

    def _maybe_close(self, incident: Incident, now: float) -> None:
        if not self._job.live or now >= incident.closes_at:
            self._outbox.record("closed", left_behind=sorted(self._job.live))
            self.close()

    def close(self) -> None:
        """Close the incident, if one is open."""
        if self.incident is not None:
            self._answer_requests(self.incident)
            self.last, self.incident, self._outbox.incident = self.incident, None, ""

    def _answer_requests(self, incident: Incident) -> None:
        there = incident.saved > 0, incident.saved, incident.path, incident.outcome
        for request in incident.requests:
            self._outbox.add(AnswerSave(request, *there))
        incident.requests = []
