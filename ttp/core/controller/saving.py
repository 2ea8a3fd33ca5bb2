"""Turns a plan into durable pieces: orders ranks to write, and replaces those that fail. ``committing`` follows.

A plan becomes *tasks*, one order per rank. A durable task stays valid even if its writer dies. A task whose writer is
lost or fails earlier is dropped, and the plan is made again for the missing shards, or for the missing parts of a shard
that is cut (``ttp.core.stripes``). Generations only grow, over takeovers too, so that no two writers ever use the same
file name, and files of an earlier order are recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.controller.committing import Committing
from ttp.core.controller.draft import Odd, Task
from ttp.core.controller.events import TIMER_LATE_S
from ttp.core.controller.incident import NEVER, Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.page_collectors import PageCollectors
from ttp.core.controller.planning import rest_s
from ttp.core.decide import How, Plan, odd_text
from ttp.core.layout import Rank, Shard

GENERATIONS_PER_TERM = 1 << 16
"""Generations that belong to one term, so that two controllers that reopen one incident never use the same number."""

LATE, LATE_S = "late answers", 1.0
"""Name and seconds of the wait of a commit for the digests and the pages of ranks that have not answered yet."""

LOSSES_MAX = 8
REPLAN_S, REPLAN_MAX_S = 0.02, 1.0
"""Least seconds between two plans if savers were lost more than ``LOSSES_MAX`` times, doubled each time, and their
maximum.

A plan for 3,000 ranks takes 35 ms: if a power cut takes hundreds of savers one by one, a plan has to replace many.
"""


class Saving:
    """The stage SAVING.

    Args:
        job: the ranks.
        outbox: takes the orders.
        mirrors: tells which ranks keep the pages of lost hosts.
        committing: begins when all pieces are durable.
        outvoted: see ``Planner.outvoted``.
    """

    def __init__(
        self,
        job: Membership,
        outbox: Outbox,
        mirrors: Mirrors,
        committing: Committing,
        outvoted: Callable[[Incident], Odd],
    ) -> None:
        self.pages = PageCollectors(job, mirrors)
        self._job, self._outbox, self._committing, self._outvoted = job, outbox, committing, outvoted

    # ----------------------------------------------------------------------------------------------------------- plan

    def begin(self, incident: Incident, plan: Plan, now: float) -> None:
        """Send the orders for everything in the plan that is not written or ordered already."""
        draft = incident.draft
        incident.again_until = incident.again_until if plan.version == incident.saved else NEVER
        incident.enter(Stage.SAVING, plan.reason)
        lost = draft.follow(plan, self.next_generation(incident), now)
        orders = [] if draft.awaiting else self._orders(incident, plan)
        for order in orders:
            draft.expect(order)
        draft.plan = plan = draft.with_all_orders(plan, lost)
        self._outbox.record(
            "plan",
            version=plan.version,
            generation=draft.generation,
            reason=plan.reason,
            savers={a.shard: a.rank for a in plan.assignments},
            how={a.shard: a.how.value for a in plan.assignments if a.how is not How.AS_IS},
            draft=draft.name,
            directory=draft.directory,
            disputed=list(plan.disputed),
            odd=list(plan.odd),
            after_ms=incident.after_ms(now),
        )
        for order in orders:
            draft.wrote(order.rank, -1, now)
            self._send_save(incident, order.rank)

    def next_generation(self, incident: Incident) -> int:
        """Return a generation larger than all that were used for this incident, by other controllers too."""
        return max(incident.draft.generation + 1, (self._job.term - 1) * GENERATIONS_PER_TERM)

    def _orders(self, incident: Incident, plan: Plan) -> list[m.SaverOrder]:
        """Return the savers' orders; on every host one able rank collects the pages of all ranks of the host."""
        shards: dict[Rank, list[Shard]] = {}
        kept: dict[Rank, list[Shard]] = {}
        hows: dict[Rank, How] = {}
        for assignment in plan.assignments:
            if assignment.how is How.KEPT:
                kept.setdefault(assignment.rank, []).append(assignment.shard)
            else:
                shards.setdefault(assignment.rank, []).append(assignment.shard)
                hows[assignment.rank] = assignment.how
        savers = {*shards, *kept}
        pages = self.pages.collectors(incident, savers)
        whole = {r for r in savers if incident.ranks.answers[r].post_step_done or not self._job.members[r].broken}
        first = None if any(t.order.job_state for t in incident.draft.tasks) else min(whole or savers, default=None)
        orders = []
        for rank in sorted({*savers, *pages}):
            order = m.SaverOrder(
                rank=rank,
                shards=tuple(shards.get(rank, ())),
                how=hows.get(rank, How.AS_IS),
                pages=pages.get(rank, ()),
                job_state=rank == first,
                kept=tuple(kept.get(rank, ())),
            )
            unfinished = incident.draft.pending.get(rank)
            orders.append(order if unfinished is None else _merge(unfinished.order, order))
        return orders

    def _collects_late(self, incident: Incident, now: float) -> bool:
        """Order pages that only ranks which answered after the plan have. Return whether to wait for pages."""
        pages, draft = self.pages.collectors(incident, ()), incident.draft
        draft.generation += bool(pages)
        for rank, wanted in sorted(pages.items()):
            draft.expect(m.SaverOrder(rank, (), How.AS_IS, wanted, False))
            draft.wrote(rank, -1, now)
            self._send_save(incident, rank)
        return bool(pages) or (self.pages.may_come(incident) and incident.waits(LATE, LATE_S, now))

    def _send_save(self, incident: Incident, rank: Rank) -> None:
        draft, plan = incident.draft, incident.draft.plan
        assert plan is not None
        task = draft.pending[rank]
        answer = incident.ranks.answers.get(rank)  # None: the rank has come back, and is asked again
        if task.order.how is How.REDO and (answer is None or answer.version < plan.version):
            incident.ranks.redoing[rank] = plan.version
        save = m.Save(
            rank, self._job.term, incident.id, task.generation, plan.version, draft.name, task.order, draft.directory
        )
        self._outbox.send_to(rank, save)

    def resend(self, incident: Incident, rank: Rank) -> None:
        """Repeat the order to ``rank``, because its stream was replaced and the order may be lost."""
        if rank in incident.draft.pending:
            self._send_save(incident, rank)

    # --------------------------------------------------------------------------------------------------------- pieces

    def reported(self, incident: Incident, report: m.Report, now: float) -> None:
        """Take a rank's report about its save or commit."""
        match report:
            case m.Saved():
                self.saved(incident, report)
            case m.SaveFailed():
                self.save_failed(incident, report)
            case m.Committed():
                self._committing.committed(incident, report, now)
            case m.CommitFailed():
                self._committing.failed(incident, report)

    def saved(self, incident: Incident, report: m.Saved) -> None:
        """Note that a task is durable."""
        task = _task_of(incident, report)
        if task is None:
            return
        task.pieces = report.pieces
        task.keep_ordered()
        del incident.draft.pending[report.rank]
        pieces = [{"file": p.file, "size": p.size, "digest": p.digest, "shard": p.shard} for p in task.pieces]
        self._outbox.record("saved", rank=report.rank, generation=report.generation, pieces=pieces)
        self._compare_cuts(incident, task.pieces)

    def _compare_cuts(self, incident: Incident, pieces: Iterable[m.Piece]) -> None:
        """Have shards written whole if replicas cut them differently, e.g. because only rank 0 holds an average."""
        parts = [(stripes.parse(Shard(piece.shard)), piece.cut) for piece in pieces]
        draft = incident.draft
        odd = {part.shard for part, cut in parts if part.count > 1 and draft.cuts.setdefault(part.shard, cut) != cut}
        if not odd:
            return
        self._outbox.record("misfit", shards=sorted(odd))
        draft.uncut |= odd
        draft.forget_parts(dict.fromkeys(odd, 1))
        incident.enter(Stage.FREEZING, "replicas cut a shard differently")

    def save_failed(self, incident: Incident, report: m.SaveFailed) -> None:
        """Drop a failed task; the rank gets no order again, except by ``FrozenRanks.forgive``.

        If what failed is an ordered update, the rank may still save the version that it holds. It refuses by itself if
        the update may have begun.
        """
        if _task_of(incident, report) is None:
            return
        incident.ranks.fail(report.rank, report.text, report.may_pass)
        if report.rank in incident.ranks.redoing:
            incident.ranks.not_redone(report.rank)
        self._outbox.record("save_failed", rank=report.rank, generation=report.generation, text=report.text)
        incident.draft.drop(report.rank)

    def written(self, incident: Incident, rank: Rank, size: int, now: float) -> None:
        """Note the number of bytes that a rank has written so far."""
        known = incident.draft.progress.get(rank)
        if known is not None and known[0] != size:
            incident.draft.wrote(rank, size, now)

    def stalled(self, incident: Incident, patience_s: float, now: float) -> bool:
        """Fail the saves whose storage has taken no byte for too long. Return whether there was such a save."""
        text = f"the storage took no byte for {patience_s:g} s (TTP_STALL_S)"
        draft, failures = incident.draft, incident.ranks.failures
        failed, since = len(failures), self.stall_since(incident)
        if since is not None and now > since + patience_s + TIMER_LATE_S:  # it did not run: reports may wait unread
            for rank, (size, _) in draft.progress.items():
                draft.progress[rank] = size, now
        while True:
            slowest = self._slowest(incident)
            if slowest is None or now < slowest[1] + patience_s:
                break
            rank = slowest[0]
            if incident.stage is Stage.COMMITTING:
                report = m.CommitFailed(rank, incident.id, draft.generation, text, may_pass=True)
                self._committing.failed(incident, report)
            else:
                generation = draft.pending[rank].generation
                self.save_failed(incident, m.SaveFailed(rank, incident.id, generation, text, may_pass=True))
        return len(failures) > failed

    def stall_since(self, incident: Incident) -> float | None:
        """Return the time since which the slowest writer has written nothing; None if no rank writes."""
        slowest = self._slowest(incident)
        return None if slowest is None else slowest[1]

    @staticmethod
    def _slowest(incident: Incident) -> tuple[Rank, float] | None:
        """Return the writing rank without progress for longest, and since when; None if no rank writes.

        Cheap, as it is called after every event.
        """
        draft = incident.draft
        if incident.stage is Stage.COMMITTING:
            writing: Container[Rank | None] = (draft.committer,)
        elif incident.stage is Stage.SAVING:
            writing = draft.pending
        else:
            return None
        while draft.progress:
            rank, (_, since) = next(iter(draft.progress.items()))
            if rank in writing and rank not in incident.ranks.failures:
                return rank, since
            del draft.progress[rank]
        return None

    def check(self, incident: Incident, now: float) -> None:
        """Begin the commit when all pieces are durable; have the plan made again when savers were lost or failed."""
        draft = incident.draft
        if draft.dropped:
            self._outbox.record("replan", generation=draft.generation, lost_savers=sorted(draft.dropped))
            incident.enter(Stage.FREEZING, "savers were lost or failed")
            draft.losses += any(rank not in incident.ranks.failures for rank in draft.dropped)
            pause_s = rest_s(self._job) if draft.pending else 0.0  # whoever still writes may be refused as well
            if draft.losses > LOSSES_MAX:
                pause_s += min(REPLAN_MAX_S, REPLAN_S * 2 ** min(draft.losses - LOSSES_MAX - 1, 10))
            incident.look_again_at = due if (due := draft.planned_at + pause_s) > now else 0.0
            draft.dropped = []
        elif draft.awaiting or not (
            draft.pending or self._awaits_votes(incident, now) or self._collects_late(incident, now)
        ):
            odd = frozenset() if draft.awaiting else self._outvoted(incident)
            if odd:
                ranks = sorted({rank for rank, _ in odd})
                self._outbox.record("outvoted", ranks=ranks, shards=sorted({shard for _, shard in odd}))
                draft.distrust(odd)
                incident.enter(Stage.FREEZING, odd_text(ranks))
            else:
                self._committing.begin(incident, "all pieces are durable", now)

    def _awaits_votes(self, incident: Incident, now: float) -> bool:
        """Return whether copies that may outvote a saver's are still to be reported.

        The plan need not wait for them if ranks are at different versions. Ranks at fault may never answer; those that
        report a failed collective or SIGTERM do.
        """
        ranks, book = incident.ranks, incident.evidence
        compared = any(answer.digests for answer in ranks.answers.values())
        at_fault = book.subjects.difference(book.against(m.FaultKind.COLLECTIVE), book.against(m.FaultKind.PREEMPTED))
        return compared and bool(ranks.waiting - at_fault) and incident.waits(LATE, LATE_S, now)


def _task_of(incident: Incident, report: m.Saved | m.SaveFailed) -> Task | None:
    """Return the unfinished task that was reported on; None: the report is of an order that was dropped or replaced."""
    task = incident.draft.pending.get(report.rank)
    return task if task is not None and (report.incident, report.generation) == (incident.id, task.generation) else None


def _merge(old: m.SaverOrder, new: m.SaverOrder) -> m.SaverOrder:
    """Merge a new order into the unfinished one of the same rank."""
    return replace(
        new,
        shards=tuple(sorted({*old.shards, *new.shards})),
        how=new.how if new.shards else old.how,
        pages=tuple(sorted({*old.pages, *new.pages})),
        job_state=old.job_state or new.job_state,
        kept=tuple(sorted({*old.kept, *new.kept})),
    )
