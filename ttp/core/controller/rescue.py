"""Takes an incident from its first evidence to the release or the thaw: freezing, deciding, ending.

What happens between the plan and the checkpoint is in ``saving``, or behind ``program_recovery`` where it is for the
program itself to save; the stages are explained in ``ttp.core.controller.machine``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.controller.events import AnswerSave, ControllerTimeouts, SaveRequested, in_queue
from ttp.core.controller.incident import OVER, Evidence, Incident, Stage
from ttp.core.controller.job_verdict import JobVerdict
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import Ending, MakeRecovery, Outcome, RescueContext
from ttp.core.controller.saving import Saving
from ttp.core.decide import NO_DIGESTS, NO_SIZES, Answer, NoPlan, Plan, decide
from ttp.core.layout import Rank, Shard, Version
from ttp.core.replication import keepers
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

OUTSIDER = Rank(-1)
"""The witness or subject that is no rank of the job."""

AGAIN_S = 0.02
"""Between two looks whether a plan that fell short can be mended: each costs a millisecond for a thousand ranks."""

ANSWERS = "ranks have not said yet which version they have"

RETRY_S, RETRY_MAX_S = 0.1, 10.0
"""After storage has refused everywhere it is tried again after so long; each time after twice as long, at most."""


@dataclass(frozen=True, slots=True)
class Wait:
    """It is too early for a plan."""

    why: str


@dataclass(frozen=True, slots=True)
class Go:
    """Act on this."""

    verdict: Plan | NoPlan


class Rescue:
    """The incident that is open, if any, and the last one.

    Args:
        job: the ranks.
        outbox: takes orders and records.
        patience: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number.
        mirrors: who keeps the pages of lost hosts.
        make_program: leads jobs that save and repair themselves.
    """

    def __init__(
        self,
        job: Membership,
        outbox: Outbox,
        patience: ControllerTimeouts,
        new_id: Callable[[int], str],
        mirrors: Mirrors,
        make_program: MakeRecovery,
    ) -> None:
        self.incident: Incident | None = None
        self.last: Incident | None = None
        self.total = 0
        self.false_alarms = 0
        self.base_version = Version(0)
        self.saving = Saving(job, outbox, mirrors)
        self.verdict = JobVerdict()
        self._job = job
        self._outbox = outbox
        self._patience = patience
        self._new_id = new_id
        self.program = make_program(
            RescueContext(job, outbox, self._decide, self._on_disk, self._blame, patience.rescue_s)
        )

    # ------------------------------------------------------------------------------------------------------- evidence

    def _blame(self, subject: Rank, kind: m.FaultKind, text: str, now: float) -> None:
        self.fault(subject, kind, text, now, witness=OUTSIDER)

    def fault(
        self, subject: Rank, kind: m.FaultKind, text: str, now: float, *, detail: str = "", witness: int | None = None
    ) -> None:
        """Evidence of a fault; the first opens an incident."""
        if self._job.ended and self.incident is None:
            return
        incident = self.incident or self._open(now, text)
        evidence = Evidence(subject, kind, text, now, final=kind is m.FaultKind.EXITED and witness == OUTSIDER)
        if incident.stage is Stage.RELEASED:
            if subject in incident.evidence.get(kind, ()):  # known by then, not yet by its best name
                self._accuse(incident, evidence, detail, witness)
            return
        if incident.snapshot:
            incident.snapshot = False
            for rank in sorted(self._job.live):  # from now on nobody may thaw without being told
                self._send_freeze(incident, rank, text)
        self._accuse(incident, evidence, detail, witness)

    def request(self, event: SaveRequested, now: float) -> None:
        """A checkpoint is wanted; a rescue that is going on will do."""
        if not self._job.training or self._job.ended:
            self._outbox.add(AnswerSave(event.request, False, Version(0), "", "no job is training here"))
            return
        if self.incident is None:
            text = event.reason or "a checkpoint was asked for"
            incident = self._open(now, text, snapshot=True)
            self._accuse(incident, Evidence(OUTSIDER, m.FaultKind.SNAPSHOT, text, now), "", None)
        assert self.incident is not None
        self.incident.requests.append(event.request)

    def _open(self, now: float, cause: str, *, snapshot: bool = False, recovered_id: str = "") -> Incident:
        assert self._job.layout is not None
        self.total += 1
        fresh_id = self._new_id(self.total)
        incident = Incident(recovered_id or fresh_id, now, snapshot, self._job.layout, recovered=bool(recovered_id))
        incident.reign = f"-{fresh_id}" if recovered_id else ""
        self.incident, self._outbox.incident = incident, incident.id
        self._outbox.record(
            "opened",
            run_id=self._job.run_id,
            incarnation=self._job.incarnation,
            term=self._job.term,
            world_size=self._job.layout.world_size,
            save_dir=self._job.save_dir,
            snapshot=snapshot,
            recovered=incident.recovered,
        )
        for rank in sorted(self._job.live):
            self._freeze(incident, rank, cause, now)
        return incident

    def _accuse(self, incident: Incident, evidence: Evidence, detail: str, witness: int | None) -> None:
        if incident.accuse(evidence):
            facts = {"rank": evidence.subject, "evidence": evidence.kind.value, "text": evidence.text}
            self._outbox.record("evidence", **facts, detail=detail, witness=witness)

    def _retract(self, incident: Incident, rank: Rank, kind: m.FaultKind) -> bool:
        retracted = incident.retract(rank, kind)
        if retracted:
            self._outbox.record("retracted", rank=rank, evidence=kind.value)
        return retracted

    # -------------------------------------------------------------------------------------------------------- members

    def joined(self, hello: m.Hello, now: float) -> None:
        """A rank said hello: freeze it too, or tell it how its incident ended."""
        incident = self.incident
        if incident is None:
            if hello.incident or self._job.ended:
                self._after_incident(hello, now)
            return
        if incident.stage is Stage.RELEASED:
            self._send_release(incident, hello.rank)
            return
        self._retract(incident, hello.rank, m.FaultKind.LOST)
        if hello.incident != incident.id:
            self.saving.drop(incident, hello.rank)  # its gate was open meanwhile
        self._freeze(incident, hello.rank, incident.cause, now)
        self.saving.resend(incident, hello.rank)
        self.program.came_back(hello.rank, frozen=hello.incident == incident.id)

    def _after_incident(self, hello: m.Hello, now: float) -> None:
        """The rank is frozen and no incident is open here: it missed the end, or another controller froze it."""
        last = self.last
        if last is not None and last.exit_code is not None and self._job.ended:
            self._send_release(last, hello.rank)
        elif last is not None and last.id == hello.incident:
            self._outbox.send_to(hello.rank, m.Thaw(hello.rank, self._job.term, last.id, last.outcome))
        else:
            self._open(now, "a controller was lost during an incident", recovered_id=hello.incident)

    def lost(self, rank: Rank) -> None:
        """The rank cannot be spoken to any more."""
        self.program.lost(rank)
        if self.incident is not None:
            self.incident.forget(rank)
            self.incident.waiting.discard(rank)
            self.saving.drop(self.incident, rank)

    def unheard(self, rank: Rank, text: str, now: float) -> None:
        """Nothing comes from the host of a rank: what can be saved without it is, and nobody waits for its answer."""
        self.fault(rank, m.FaultKind.SILENT, text, now)
        incident = self.incident
        if incident is not None and incident.stage is not Stage.RELEASED:
            incident.forget(rank)
            incident.waiting.discard(rank)
            self.saving.drop(incident, rank)

    def heard_again(self, rank: Rank, now: float) -> None:
        """The doubt was unfounded. What the rank was told has reached it, or will; it is asked for its answer again."""
        incident = self.incident
        if incident is not None and incident.stage is not Stage.RELEASED:
            self._retract(incident, rank, m.FaultKind.SILENT)
            self._freeze(incident, rank, incident.cause, now)

    # -------------------------------------------------------------------------------------------------------- freezing

    def _freeze(self, incident: Incident, rank: Rank, cause: str, now: float) -> None:
        incident.forget(rank)
        incident.waiting.add(rank)
        incident.frozen_at[rank] = now
        due = now + self._answer_s
        incident.expire_check_at = min(incident.expire_check_at, due) if len(incident.waiting) > 1 else due
        self._send_freeze(incident, rank, cause)

    @property
    def _answer_s(self) -> float:
        """How long a rank may take to answer a freeze."""
        return in_queue(self._patience.answer_s, len(self._job.members))

    def _send_freeze(self, incident: Incident, rank: Rank, cause: str) -> None:
        self._outbox.send_to(rank, m.Freeze(rank, self._job.term, incident.id, cause, incident.snapshot))

    def answered(self, answer: m.Frozen, now: float) -> None:
        """A rank says how it stands."""
        incident = self.incident
        if incident is None and not self._job.ended:  # frozen for something that is over, or that nobody knows of
            order = m.Thaw(answer.rank, self._job.term, answer.incident, "no incident is open")
            self._outbox.send_to(answer.rank, order)
        if incident is None or answer.incident != incident.id or incident.stage is Stage.RELEASED:
            return
        if not answer.stuck:
            self._retract(incident, answer.rank, m.FaultKind.HUNG)  # it came to the gate after all
        if incident.answered(answer.rank) and (not answer.final or incident.is_stale(answer)):
            return  # said again: it stands still since its final answer
        incident.accept(answer)
        spoke = self._retract(incident, answer.rank, m.FaultKind.SILENT)
        if spoke and not answer.final and now < incident.frozen_at.get(answer.rank, now) + self._patience.freeze_s:
            incident.waiting.add(answer.rank)  # it is in an update: its answer was late, or this controller was
            incident.expire_check_at = now
        self._outbox.record(
            "answer" if answer.final else "acknowledged",
            rank=answer.rank,
            version=answer.version,
            phase=answer.phase.value,
            stuck=answer.stuck,
            settled=answer.settled,
            bad=list(answer.bad),
            after_ms=round((now - incident.frozen_at.get(answer.rank, now)) * 1e3, 3),
        )
        if self._improves(incident, answer):
            incident.enter(Stage.FREEZING, f"rank {answer.rank} has brought a newer version")
            incident.committer = None

    def _improves(self, incident: Incident, answer: m.Frozen) -> bool:
        """A rank that was thought lost has brought back a newer version than the planned one."""
        plan, clean = incident.plan, answer.final and answer.phase is not m.Phase.TORN
        if plan is None or not clean or answer.version <= plan.version:
            return False
        if incident.stage in (Stage.FREEZING, Stage.PROGRAM):
            return False
        verdict = self._decide(incident)
        return isinstance(verdict, Plan) and verdict.version > plan.version

    # ----------------------------------------------------------------------------------------------------------- time

    def deadlines(self) -> Iterator[float]:
        """When ``expire`` has something to do."""
        incident, p = self.incident, self._patience
        if incident is None:
            return
        if incident.stage is Stage.RELEASED:
            yield (incident.released_at or 0.0) + p.exit_s
            return
        if incident.stage is not Stage.SAVED:
            yield incident.opened_at + p.rescue_s
        since = self.saving.stall_since(incident)
        if since is not None:
            yield since + p.stall_s
        if incident.look_again_at:
            yield incident.look_again_at
        yield from (until for until in incident.pauses.values() if until != OVER)
        if incident.stage is Stage.PROGRAM:
            yield from self.program.deadlines()
        if incident.waiting:
            yield incident.expire_check_at

    def expire(self, now: float) -> None:
        """Give up on what takes too long."""
        incident, p = self.incident, self._patience
        if incident is None or incident.stage is Stage.RELEASED:
            return
        if incident.waiting and now >= incident.expire_check_at:
            self._expire_answers(incident, now)
        incident.end_pauses(now)
        if now >= incident.look_again_at:
            incident.look_again_at = 0.0
        if self.saving.stalled(incident, p.stall_s, now):
            self._elsewhere(incident, now)  # another rank would wait as long for the same storage
        if incident.stage is not Stage.SAVED and now >= incident.opened_at + p.rescue_s:
            self._end_without(incident, f"nothing was saved within {p.rescue_s:g} s (TTP_OT)", now)

    def _expire_answers(self, incident: Incident, now: float) -> None:
        dues: list[float] = []
        for rank in sorted(incident.waiting):
            acknowledged = rank in incident.answers
            patience_s = max(self._patience.freeze_s, self._answer_s) if acknowledged else self._answer_s
            due = incident.frozen_at[rank] + patience_s
            if now < due:
                dues.append(due)
                continue
            incident.waiting.discard(rank)
            what = "is still in an update" if acknowledged else "did not answer the freeze"
            text = f"rank {rank} {what} after {patience_s:g} s"
            self._accuse(incident, Evidence(rank, m.FaultKind.SILENT, text, now), "", None)
        incident.expire_check_at = min(dues, default=now)

    # -------------------------------------------------------------------------------------------------------- advance

    def advance(self, now: float) -> None:
        """Move on as far as what is known allows. Called after every event; a fixed point when nothing is new."""
        steps: dict[Stage, Callable[[Incident, float], None]] = {
            Stage.FREEZING: self._maybe_plan,
            Stage.SAVING: self._check_savers,
            Stage.PROGRAM: self._follow_program,
            Stage.COMMITTING: lambda incident, _: self.saving.check_committer(incident),
            Stage.SAVED: self._maybe_end,
            Stage.RELEASED: self._maybe_close,
        }
        before = None
        while self.incident is not None and self.incident.stage is not before:
            before = self.incident.stage
            steps[before](self.incident, now)

    def _maybe_plan(self, incident: Incident, now: float) -> None:
        job = self._job
        back = incident.recovered and job.complete and not (incident.faulty or job.broken or job.in_doubt)
        if back and job.gather_until is None:
            self._thaw(incident, "every rank came back to the new controller and nothing is broken")
            return
        match self._should_plan(incident, now):
            case Wait(why):
                if why not in (ANSWERS, incident.waits_for):  # answers are recorded one by one
                    self._outbox.record("waits", reason=why)
                incident.waits_for = why
            case Go(_) if self.program.leads:
                self._begin_program(incident)
            case Go(Plan() as plan):
                self._start(incident, plan, now)
            case Go(NoPlan(reason)):
                self._give_up(incident, reason, now)

    def _should_plan(self, incident: Incident, now: float) -> Wait | Go:
        """Whether what is known is enough to act on: a plan made too early gives up what a moment would have brought.

        Where the program itself saves, everybody has to stand where it will stand before they begin.
        """
        leads = self.program.leads
        if self._job.gather_until is not None:
            return Wait("a controller was lost: ranks with a newer version may still come")
        if incident.waiting and (leads or not incident.newest_is_known()):
            return Wait(ANSWERS)
        if now < incident.look_again_at and not leads:
            return Wait(incident.waits_for)
        if now < incident.next_plan_at:
            incident.look_again_at = incident.next_plan_at
            return Wait("savers are lost one after the other: they are replaced together")
        layout = self.program.layout
        if leads and layout is not None and layout is not incident.layout:
            incident.use(layout)
        verdict = self._decide(incident)
        why = self._program_waits(incident, verdict, now) if leads else self._falls_short(incident, verdict, now)
        return Wait(why) if why else Go(verdict)

    def _program_waits(self, incident: Incident, verdict: Plan | NoPlan, now: float) -> str:
        """What may change in a moment where the program itself saves; empty: nothing."""
        short = isinstance(verdict, NoPlan) and not self.program.may_repair
        if self._job.silent or (short and (self._hopes(incident, now) or self._job.suspects)):
            return "a rank may come, or come back"
        return ""

    def _falls_short(self, incident: Incident, verdict: Plan | NoPlan, now: float) -> str:
        """What may complete a newer version in a moment; empty: nothing."""
        if isinstance(verdict, Plan) and not verdict.lost:
            if not self._grows(incident, verdict, now):
                return ""
            incident.look_again_at = now + AGAIN_S
            return "a newer version that a rank has finished may become whole"
        if self._job.in_doubt:
            return "a rank of which nothing is heard may come back and complete a version"
        return "a rank that still runs may complete a version" if self._hopes(incident, now) else ""

    def _begin_program(self, incident: Incident) -> None:
        incident.enter(Stage.PROGRAM, "it is for the program to save")
        self.program.begin(incident)

    def _follow_program(self, incident: Incident, now: float) -> None:
        ending = self.program.advance()
        if ending is None:
            return
        self._outbox.record("mended", outcome=ending.outcome.value, version=ending.version, text=ending.text)
        match ending:
            case Ending(Outcome.RESUMED, version, text):
                mended = incident.faulty and version > 0
                for kind, subject in [(kind, s) for kind, found in incident.evidence.items() for s in found]:
                    self._retract(incident, subject, kind)
                self._thaw(incident, text, mended=mended)
            case Ending(Outcome.SAVED, version, text, path):
                incident.enter(Stage.SAVED, text)
                incident.saved, incident.outcome = version, text
                incident.path, self.saving.last_commit = path, (version, path)
                if self.program.halted:
                    self._release(incident, EXIT_SAVED, f"{text}; a restart goes on with step {version + 1}", now)
            case Ending(_, _, text) if self.program.halted:
                incident.outcome = f"not saved: {text}"
                self._release(incident, EXIT_NOT_SAVED, text, now)
            case Ending(_, _, text):
                self._end_without(incident, text, now)

    def _grows(self, incident: Incident, plan: Plan, now: float) -> bool:
        """Whether a newer version that a living rank has finished may become whole in a moment.

        Who stands in the barrier before the update answers the freeze at once, and again from the gate.
        """
        idle = [a for a in incident.answers.values() if a.phase is m.Phase.IDLE]
        newest = max((a.version for a in idle), default=plan.version)
        if incident.snapshot or plan.version >= newest:
            return False
        late = any(a.stuck and not a.has_gradient and a.version < newest for a in idle)
        return (late or bool(incident.redoing)) and self._hopes(incident, now)

    def _hopes(self, incident: Incident, now: float) -> bool:
        """Whether a rank that still runs may reach the gate, with the gradient that is missing, in a moment.

        Or may say what came of an update that it was told to make.
        """
        if any(incident.able(rank) for rank in incident.redoing):
            return True
        idle = [a for a in incident.answers.values() if a.phase is m.Phase.IDLE]
        newest = max((a.version for a in idle), default=Version(0))
        if all(a.version == newest or a.has_gradient for a in idle):
            return False
        return incident.waits("hope", self._patience.hope_s, now)

    def _decide(self, incident: Incident) -> Plan | NoPlan:
        """With updates made or unmade only where a version that somebody has finished is not whole otherwise."""
        plain = self._decided(incident, with_offers=False)
        offers = any(a.has_gradient or a.has_preimage for a in incident.answers.values() if a.final)
        if not offers or (isinstance(plain, Plan) and plain.version >= self._newest_finished(incident)):
            return plain
        full = self._decided(incident, with_offers=True)
        better = isinstance(full, Plan) and (isinstance(plain, NoPlan) or full.version > plain.version)
        return full if better else plain

    def _decided(self, incident: Incident, *, with_offers: bool) -> Plan | NoPlan:
        answers = (self._answer(incident, a, with_offers) for a in incident.answers.values() if a.final)
        return decide(incident.layout, answers, incident.written(), incident.uncut)

    def _newest_finished(self, incident: Incident) -> Version:
        """By anybody, the dead included, as far as it was heard."""
        answered = (a.version for a in incident.answers.values())
        return max((*answered, *(mb.version for mb in self._job.members.values())), default=Version(0))

    def _answer(self, incident: Incident, frozen: m.Frozen, with_offers: bool) -> Answer:
        member, redoing = self._job.members[frozen.rank], frozen.rank in incident.redoing
        return Answer(
            rank=frozen.rank,
            version=frozen.version,
            torn=frozen.phase is m.Phase.TORN or redoing or self.program.invalid(frozen.rank),
            has_gradient=frozen.has_gradient and with_offers,
            has_preimage=frozen.has_preimage and with_offers and not redoing,
            stuck=frozen.stuck or bool(member.broken),
            settled=frozen.settled,
            host=member.hello.host,
            incarnation=self._job.incarnation,
            digests={d.shard: d.digest for d in frozen.digests} if frozen.digests else NO_DIGESTS,
            bad=bool(frozen.bad),
            can_save=frozen.rank not in incident.failures,
            kept=self._kept(incident, frozen),
            busy=frozen.rank in incident.pending,
            stripes=member.hello.stripes,
            sizes={d.shard: d.size for d in frozen.digests} if frozen.digests else NO_SIZES,
        )

    def _kept(self, incident: Incident, frozen: m.Frozen) -> tuple[tuple[Shard, Version], ...]:
        if not frozen.kept:
            return ()
        if not incident.keepers:
            incident.keepers = keepers(incident.layout)
        copies = [copy for copy in frozen.kept if self._still_there(incident, frozen.rank, copy)]
        return tuple((shard, copy.version) for copy in copies for shard in incident.keepers.get(copy.of, ()))

    def _still_there(self, incident: Incident, witness: Rank, copy: m.KeptCopy) -> bool:
        """A rank may drop old copies of its own until it is frozen, when others of its host have seen them already."""
        owner = incident.answers.get(copy.of)
        if owner is None or not owner.final or copy in owner.kept:
            return True
        members = self._job.members
        return members[copy.of].hello.host != members[witness].hello.host

    def _start(self, incident: Incident, plan: Plan, now: float) -> None:
        last_commit, on_disk = self.saving.last_commit, self._on_disk()
        if plan.version > on_disk:
            self.saving.begin(incident, plan, now)
            return
        incident.plan, incident.saved = plan, Version(on_disk)
        incident.path = last_commit[1] if last_commit else ""
        incident.outcome = (
            f"version {on_disk} is on disk already" if on_disk else "no update had finished: there is nothing to lose"
        )
        incident.enter(Stage.SAVED, incident.outcome)
        self._outbox.record("nothing_new", version=plan.version, text=incident.outcome, reason=plan.reason)

    def _on_disk(self) -> Version:
        last_commit = self.saving.last_commit
        return Version(max(self.base_version, last_commit[0] if last_commit else 0))

    def _check_savers(self, incident: Incident, now: float) -> None:
        self.saving.check(incident, now)
        if self.saving.stranded(incident):
            self._give_up(incident, "nobody is left to commit the checkpoint", now)

    # ------------------------------------------------------------------------------------------------ thaw or release

    def _maybe_end(self, incident: Incident, now: float) -> None:
        if incident.snapshot:
            self._thaw(incident, "the checkpoint is written")
            return
        if self._job.in_doubt or self._looks_again(incident, now):
            return  # is it a false alarm? The grace will tell
        if not (incident.faulty or self._job.broken):
            self._thaw(incident, "nothing is broken after all")
        elif not incident.waiting or incident.newest_is_known():
            text = f"{incident.outcome}; a restart goes on with step {incident.saved + 1}"
            self._release(incident, EXIT_SAVED, text, now)

    def _looks_again(self, incident: Incident, now: float) -> bool:
        """Whether all that is known is that ranks seem to hang: slow ones come to the gate in a moment."""
        if self._job.broken or incident.kinds != {m.FaultKind.HUNG}:
            return False
        if not incident.waiting and all(not a.stuck for a in incident.answers.values()):
            for subject in list(incident.evidence[m.FaultKind.HUNG]):
                self._retract(incident, subject, m.FaultKind.HUNG)  # everybody came to the gate
            return False
        return incident.waits("second look", self._patience.second_look_s, now)

    def _thaw(self, incident: Incident, reason: str, *, mended: bool = False) -> None:
        false_alarm = not (incident.snapshot or mended)
        self.false_alarms += false_alarm
        for rank in sorted(self._job.live):
            self._outbox.send_to(rank, m.Thaw(rank, self._job.term, incident.id, reason))
        incident.outcome = incident.outcome or reason
        self._outbox.record("thawed", reason=reason, false_alarm=false_alarm)
        self.close()
        self.program.over(resumed=True)

    def _give_up(self, incident: Incident, reason: str, now: float) -> None:
        """Nothing can be saved here and now; perhaps elsewhere, or later."""
        if not (self._elsewhere(incident, now) or self._later(incident, reason, now)):
            self._end_without(incident, reason, now)

    def _end_without(self, incident: Incident, reason: str, now: float) -> None:
        """Nothing is saved. When nothing is broken either, training goes on."""
        said = {**incident.forgiven, **incident.failures}
        failures = [f"rank {rank}: {text}" for rank, text in sorted(said.items())]
        text = "; ".join([*failures, reason])
        incident.outcome = f"not saved: {text}"
        if incident.snapshot or not (incident.faulty or self._job.broken or self._job.in_doubt):
            self._thaw(incident, f"the checkpoint could not be written: {text}")
        else:
            self._release(incident, EXIT_NOT_SAVED, text, now)

    def _elsewhere(self, incident: Incident, now: float) -> bool:
        """The job's directory refuses: everything once more, into the fallback."""
        fallback = next((mb.hello.fallback_dir for mb in self._job.members.values()), "")
        if not (fallback and incident.failures) or incident.directory:
            return False
        self._outbox.record("fallback", directory=fallback, failures=dict(sorted(incident.failures.items())))
        incident.enter(Stage.FREEZING, f"once more, in {fallback}")
        incident.forgive(fallback, incident.failures)
        self._maybe_plan(incident, now)
        return True

    def _later(self, incident: Incident, reason: str, now: float) -> bool:
        """The storage refuses everywhere: all once more in a while, as long as the rescue lasts.

        Not where training could go on instead. Who failed of something else is not asked again: it would fail again.
        """
        broken = incident.faulty or self._job.broken or self._job.in_doubt
        if incident.snapshot or not (incident.passing and broken):
            return False
        pause_s = min(RETRY_MAX_S, RETRY_S * 2**incident.retries)
        incident.retries += 1
        self._outbox.record("retry", after_s=pause_s, failures=dict(sorted(incident.failures.items())), reason=reason)
        incident.enter(Stage.FREEZING, f"the storage refused: once more after {pause_s:g} s")
        incident.look_again_at = now + pause_s
        incident.forgive("", incident.passing)
        return True

    def _release(self, incident: Incident, exit_code: int, text: str, now: float) -> None:
        self.program.over(resumed=False)
        self.verdict.progress |= self.saving.last_commit is not None
        end = self.verdict.released(exit_code, text, incident.cause)
        assert end.code is not None
        exit_code, text = end.code, end.text
        incident.enter(Stage.RELEASED, text)
        incident.exit_code, incident.release_text = exit_code, text
        incident.released_at = now
        self._job.ended = True
        self._outbox.record("released", exit_code=exit_code, text=text, progress=self.verdict.progress)
        self._answer_requests(incident)
        for rank in sorted(self._job.live):
            self._send_release(incident, rank)

    def _send_release(self, incident: Incident, rank: Rank) -> None:
        assert incident.exit_code is not None
        order = m.Release(rank, self._job.term, incident.id, incident.exit_code, incident.release_text)
        self._outbox.send_to(rank, order)

    def _maybe_close(self, incident: Incident, now: float) -> None:
        assert incident.released_at is not None
        if not self._job.live or now >= incident.released_at + self._patience.exit_s:
            self._outbox.record("closed", left_behind=sorted(self._job.live))
            self.close()

    def close(self) -> None:
        """The incident is over."""
        if self.incident is not None:
            self._answer_requests(self.incident)
            self.last, self.incident, self._outbox.incident = self.incident, None, ""

    def _answer_requests(self, incident: Incident) -> None:
        for request in incident.requests:
            answer = AnswerSave(request, incident.saved > 0, incident.saved, incident.path, incident.outcome)
            self._outbox.add(answer)
        incident.requests = []
