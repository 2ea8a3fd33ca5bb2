"""Decides when to make a plan, and from which answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.answer import NO_DIGESTS, NO_SIZES, Answer
from ttp.core.controller.draft import Odd
from ttp.core.controller.events import ControllerTimeouts, in_queue
from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.program_recovery import ProgramRecovery
from ttp.core.decide import NoPlan, Plan, decide
from ttp.core.layout import Rank, Shard, Version
from ttp.core.replica_vote import judge
from ttp.core.replication import keepers

AGAIN_S = 0.02
"""Seconds from a plan that fell short to the next attempt, for a thousand ranks: one attempt takes them 1 to 3 ms."""

ANSWERS = "not all ranks have reported their versions yet"


def rest_s(job: Membership) -> float:
    """Return the least seconds between two plans that leaves time for the messages of all ranks; 0 for small jobs."""
    return AGAIN_S * in_queue(0.0, len(job.members))


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision that it is too early for a plan, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Go:
    """The decision to act: on a plan, or on the fact that no plan is possible."""

    result: Plan | NoPlan


class Planner:
    """Turns the answers of the ranks of a frozen job into a plan, once it is time for one.

    Args:
        job: the ranks.
        timeouts: the timeouts of the controller.
    """

    def __init__(self, job: Membership, timeouts: ControllerTimeouts) -> None:
        self.program = ProgramRecovery()
        """Leads jobs that save and repair themselves."""
        self._job, self._timeouts = job, timeouts
        self._newer: set[Rank] = set()
        """Ranks whose answers have come since ``improved_by`` was called, with a newer version than the planned one."""

    # ------------------------------------------------------------------------------------------------------------- time

    def should_plan(self, incident: Incident, now: float) -> Wait | Go:
        """Decide whether to act on the answers so far: a plan that is made too early may miss a newer version.

        If the program itself saves, its recovery begins only when every connected rank has given its final answer.
        """
        leads = self.program.leads
        if incident.deferred:
            return Wait("a checkpoint that was begun while the controller was silent is still being written")
        if self._job.gather_until is not None:
            return Wait("a controller was lost: ranks with a newer version may still come")
        if now < incident.look_again_at and not leads:
            return Wait(incident.waits_for)
        if incident.ranks.waiting and (leads or not incident.newest_is_known()):
            return Wait(ANSWERS)
        layout, counts = self.program.layout, incident.ranks.counts
        if leads and layout is not None and layout is not counts.layout:
            counts.use(layout)
        result = self.decide(incident)
        why = self._program_waits(incident, result, now) if leads else self._falls_short(incident, result, now)
        if why and not leads and (pause_s := rest_s(self._job)):
            incident.look_again_at = max(incident.look_again_at, now + pause_s)
        return Wait(why) if why else Go(result)

    def none_newer(self, incident: Incident, on_disk: Version) -> bool:
        """Return whether all connected ranks have answered, and no rank has finished an update after ``on_disk``."""
        heard = bool(incident.ranks.answers) and self._all_answered(incident)
        return heard and self.newest_finished(incident) <= on_disk

    def _program_waits(self, incident: Incident, result: Plan | NoPlan, now: float) -> str:
        """Return why the program's recovery has to wait a moment; empty: it need not wait."""
        short = isinstance(result, NoPlan) and not self.program.may_repair
        if self._job.silent or (
            short and (self._job.suspects or self._late(incident, now) or self._hopes(incident, now))
        ):
            return "a rank may still reach the gate, or come back"
        return ""

    def _falls_short(self, incident: Incident, result: Plan | NoPlan, now: float) -> str:
        """Return what may complete a newer version in a moment; empty: nothing can."""
        if isinstance(result, Plan) and (result.dropped or not result.lost):
            if not self._grows(incident, result, now):
                return ""
            incident.look_again_at = now + AGAIN_S
            return "a newer version that a rank has finished may become whole"
        if self._job.in_doubt:
            return "a lost or silent rank may come back and complete a version"
        if self._late(incident, now):
            return "a connected rank that has not answered yet may complete a version"
        ranks = incident.ranks
        torn = (r for r, a in ranks.answers.items() if a.phase is m.Phase.TORN and a.main_thread_blocked)
        if any(map(ranks.able, torn)) and incident.waits("whole copies", self._timeouts.whole_s, now):
            return "a rank that still runs, such as in an evaluation of other weights, may have a whole copy again"
        return "a rank that still runs may complete a version" if self._hopes(incident, now) else ""

    def _all_answered(self, incident: Incident) -> bool:
        """Return whether all connected ranks have given their final answers."""
        return all(map(incident.ranks.answered, self._job.live))

    def _late(self, incident: Incident, now: float) -> bool:
        """Return whether a final answer may still come: the rank's host may be overloaded, or ours was, or stood still.

        What was sent to a controller that stood still is read one by one, after the time for it has passed.
        """
        return not self._all_answered(incident) and incident.waits("answers", self._timeouts.answer_s, now)

    def _grows(self, incident: Incident, plan: Plan, now: float) -> bool:
        """Return whether a version newer than the plan's, which a connected rank has finished, may soon be complete.

        A rank in the barrier before the update answers the freeze at once, and again when it reaches the gate.
        """
        idle = [a for a in incident.ranks.answers.values() if a.phase is m.Phase.IDLE]
        newest = max((a.version for a in idle), default=plan.version)
        if incident.snapshot or plan.version >= newest:
            return False
        late = any(a.main_thread_blocked and not a.has_gradient and a.version < newest for a in idle)
        return (late or bool(incident.ranks.redoing)) and self._hopes(incident, now)

    def _hopes(self, incident: Incident, now: float) -> bool:
        """Return whether a rank that still runs may soon reach the gate with the gradient that a redo needs.

        Also True while a rank with an order to redo an update has not reported yet.
        """
        if any(map(incident.ranks.able, incident.ranks.redoing)):
            return True
        idle = [a for a in incident.ranks.answers.values() if a.phase is m.Phase.IDLE]
        newest = max((a.version for a in idle), default=Version(0))
        if all(a.version == newest or a.has_gradient for a in idle):
            return False
        return incident.waits("hope", self._timeouts.hope_s, now)

    def heard(self, incident: Incident, ranks: Iterable[Rank], answer: m.Frozen) -> None:
        """Note a new answer of these ranks, for ``improved_by``."""
        clean = answer.final and answer.phase is not m.Phase.TORN
        if clean and incident.draft.plan is not None and answer.version > incident.draft.plan.version:
            self._newer.update(ranks)

    def improved_by(self, incident: Incident) -> set[Rank]:
        """Return the ranks with whose late answers a newer version than the planned one can be saved; else no rank.

        Called once for all answers that came together: a plan for each of thousands would take minutes.
        """
        newer, self._newer = self._newer, set()
        plan, saves = incident.draft.plan, incident.stage in (Stage.SAVING, Stage.COMMITTING, Stage.SAVED)
        if not newer or plan is None or not saves:
            return set()
        result = self.decide(incident)
        return newer if isinstance(result, Plan) and result.version > plan.version else set()

    # ------------------------------------------------------------------------------------------------------------- plan

    def decide(self, incident: Incident) -> Plan | NoPlan:
        """Return the plan for the answers so far. It uses redo and undo only if that saves a newer version."""
        plain = self._decided(incident, with_offers=False)
        offers = any(a.has_gradient or a.has_preimage for a in incident.ranks.answers.values() if a.final)
        if not offers or (isinstance(plain, Plan) and plain.version >= self.newest_finished(incident)):
            return plain
        full = self._decided(incident, with_offers=True)
        better = isinstance(full, Plan) and (isinstance(plain, NoPlan) or full.version > plain.version)
        return full if better else plain

    def outvoted(self, incident: Incident) -> Odd:
        """Compare all copies before the commit, as ranks may have reported theirs after the plan was made.

        Returns:
            The shards whose copies most others contradict, with their writers, which are to be replaced. If no other
            copy can be saved, or none is known to be right, the plan is changed to say so instead.
        """
        draft, plan = incident.draft, incident.draft.plan
        assert plan is not None
        known = incident.ranks
        if not (known.votes or any(answer.digests for answer in known.answers.values())):
            return frozenset()
        layout, answers = known.counts.layout, [*self._answers(incident, with_offers=False)]
        vote = judge(layout, answers)
        if odd := draft.written_by(vote.odd):
            made = decide(layout, answers, draft.written({rank for rank, _ in odd}), draft.uncut)
            ties = vote.disputed_at(plan.version)
            if isinstance(made, Plan) and (made.version, {*made.disputed}) == (plan.version, ties):
                return odd
        draft.plan = plan.judged(vote, {shard for _, shard in odd})
        return frozenset()

    def _decided(self, incident: Incident, *, with_offers: bool) -> Plan | NoPlan:
        answers = self._answers(incident, with_offers=with_offers)
        return decide(incident.ranks.counts.layout, answers, incident.draft.written(), incident.draft.uncut)

    def newest_finished(self, incident: Incident) -> Version:
        """Return the newest version that any rank, dead or alive, is known to have finished."""
        answered = (a.version for a in incident.ranks.answers.values())
        return max((*answered, *(mb.version for mb in self._job.members.values())), default=Version(0))

    def _answers(self, incident: Incident, *, with_offers: bool) -> Iterator[Answer]:
        members, invalid = self._job.members, self.program.invalid
        redoing, failures, pending = incident.ranks.redoing, incident.ranks.failures, incident.draft.pending
        copies: dict[int, tuple[Mapping[Shard, str], Mapping[Shard, int]]] = {}
        for rank, frozen in incident.ranks.answers.items():
            if not frozen.final:
                continue
            if id(frozen) not in copies:  # often one object for many ranks
                copies[id(frozen)] = _copies(frozen)
            digests, sizes = copies[id(frozen)]
            member, redoes = members[rank], rank in redoing
            torn = frozen.phase is m.Phase.TORN or redoes or invalid(rank)
            has_gradient = frozen.has_gradient and with_offers
            has_preimage = frozen.has_preimage and with_offers and not redoes
            blocked = frozen.main_thread_blocked or bool(member.broken)
            kept = self._kept(incident, rank, frozen) if frozen.kept else ()
            yield Answer(  # positional: keywords take over twice as long, for each of ten thousand ranks
                rank,
                frozen.version,
                torn,
                has_gradient,
                has_preimage,
                blocked,
                frozen.post_step_done,
                member.hello.host,
                digests,
                bool(frozen.bad),
                rank not in failures,
                kept,
                rank in pending,
                member.hello.stripes,
                sizes,
                bool(member.broken) and not frozen.post_step_done,
            )
        yield from self._of_lost_ranks(incident)

    def _of_lost_ranks(self, incident: Incident) -> Iterator[Answer]:
        """Yield the votes of ranks that are not here any more, for the copies that they had of the planned version."""
        plan, known = incident.draft.plan, incident.ranks
        for rank, frozen in known.votes.items():
            if plan is not None and frozen.version == plan.version and not known.answered(rank):
                digests = _copies(frozen)[0]
                yield Answer(rank, frozen.version, digests=digests, can_save=False)

    def _kept(self, incident: Incident, rank: Rank, frozen: m.Frozen) -> tuple[tuple[Shard, Version], ...]:
        known = incident.ranks
        if not known.keepers:
            known.keepers = keepers(known.counts.layout)
        copies = [copy for copy in frozen.kept if self._still_there(incident, rank, copy)]
        return tuple((shard, copy.version) for copy in copies for shard in known.keepers.get(copy.of, ()))

    def _still_there(self, incident: Incident, witness: Rank, copy: m.KeptCopy) -> bool:
        """Return whether the kept copy that ``witness`` reported still exists.

        Until the owner of a copy is frozen it may drop old copies that another rank of its host has reported already.
        """
        owner = incident.ranks.answers.get(copy.of)
        if owner is None or not owner.final or copy in owner.kept:
            return True
        members = self._job.members
        return members[copy.of].hello.host != members[witness].hello.host


def _copies(frozen: m.Frozen) -> tuple[Mapping[Shard, str], Mapping[Shard, int]]:
    """Return the digests and the sizes of the shards that a rank holds, as its answer says."""
    if not frozen.digests:
        return NO_DIGESTS, NO_SIZES
    return {d.shard: d.digest for d in frozen.digests}, {d.shard: d.size for d in frozen.digests}
