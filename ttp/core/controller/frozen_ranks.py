"""The ranks that an incident freezes: what they have answered, and which of them can save."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from ttp.core import messages as m
from ttp.core.controller.copy_counts import CopyCounts
from ttp.core.decide import How, Plan, lost_steps
from ttp.core.layout import Rank, Shard, Version

FAILURES_SHOWN = 16
"""Number of failed ranks that the text of a release names."""


@dataclass(slots=True)
class FrozenRanks:
    """The answers to a freeze, and the failures of those that have answered.

    Ranks in ``waiting`` are connected and have not given their final answer. ``answers`` holds the answers of
    connected, frozen ranks: a lost rank is asked again when it comes back.
    """

    counts: CopyCounts
    """The copies of each shard on ranks that have given their final answer and have not failed; knows the layout."""
    answers: dict[Rank, m.Frozen] = field(default_factory=dict)
    """Answers by rank, final or not. Many ranks often share one object, whose rank is ``SEVERAL``."""
    finished: dict[Rank, Version] = field(default_factory=dict)
    """The newest version in the answers of each rank. The last answer may be older: only a pre-image is left."""
    votes: dict[Rank, m.Frozen] = field(default_factory=dict)
    """The last answers with digests of ranks that were lost or asked again: what their copies were is still known."""
    waiting: set[Rank] = field(default_factory=set)
    asked_at: dict[Rank, float] = field(default_factory=dict)
    expire_check_at: float = 0.0
    """Earliest time at which an answer may be overdue."""
    redoing: dict[Rank, Version] = field(default_factory=dict)
    """Ranks with an order to redo an update, which they have not reported yet: target versions by rank."""
    keepers: dict[Rank, tuple[Shard, ...]] = field(default_factory=dict)
    """The shards that each rank's kept copies contain; computed when the first kept copy is reported."""
    failures: dict[Rank, str] = field(default_factory=dict)
    """Ranks that could not save or commit, and the reason; they get no order again, except by ``forgive``."""
    passing: set[Rank] = field(default_factory=set)
    """Ranks of ``failures`` whose reason may be temporary."""
    forgiven: dict[Rank, str] = field(default_factory=dict)
    """Reasons of earlier failures of ranks that may try again."""
    # -------------------------------------------------------------------------------------------------------- answers

    def ask(self, ranks: Collection[Rank], now: float, due: float) -> None:
        """Wait for new answers of these ranks, which are asked at ``now``, and which may come until ``due``."""
        self.waiting.difference_update(ranks)
        self.expire_check_at = min(self.expire_check_at, due) if self.waiting else due
        for rank in ranks:
            self.forget(rank)
        self.waiting.update(ranks)
        self.asked_at.update(dict.fromkeys(ranks, now))

    def accept(self, ranks: Collection[Rank], answer: m.Frozen) -> None:
        """Take an answer of these ranks; a later answer of the same rank replaces the earlier one."""
        torn = answer.phase is m.Phase.TORN
        for rank in ranks:
            target = self.redoing.get(rank)
            self.forget(rank)
            self.answers[rank] = answer
            self.finished[rank] = max(answer.version, self.finished.get(rank, answer.version))
            if target is not None and answer.version < target and not torn:
                self.redoing[rank] = target  # the answer was sent before the order arrived, or during the redo
        if not answer.final:
            return
        self.waiting.difference_update(ranks)
        if not torn:
            self.counts.count([rank for rank in ranks if rank not in self.failures], answer.version)

    def forget(self, rank: Rank) -> None:
        """Drop the answer of a rank that is lost or is asked again."""
        answer = self.answers.pop(rank, None)
        if answer is not None and answer.digests:
            self.votes[rank] = answer
        self.redoing.pop(rank, None)
        self.counts.discount(rank)

    def undone(self, plan: Plan) -> str:
        """Return, as a clause to append, what is lost because only pre-images of finished steps could be saved."""
        if plan.lost or any(a.how is not How.UNDO for a in plan.assignments):
            return ""
        newest = min((self.finished.get(a.rank, plan.version) for a in plan.assignments), default=plan.version)
        return f"; {lost_steps(newest - plan.version)}" if newest > plan.version else ""

    def answered(self, rank: Rank) -> bool:
        """Return whether the rank has given its final answer."""
        answer = self.answers.get(rank)
        return answer is not None and answer.final

    def is_stale(self, rank: Rank, answer: m.Frozen) -> bool:
        """Return whether ``answer`` is older than the rank's known answer: a version falls only by a pre-image."""
        known = self.answers[rank]
        return answer.version < known.version and answer.phase is not m.Phase.TORN and not known.has_preimage

    # ------------------------------------------------------------------------------------------------------- failures

    def fail(self, rank: Rank, text: str, may_pass: bool = False) -> None:
        """Note that a rank could not save or commit, so that another rank does. ``may_pass``: a retry may succeed."""
        self.failures[rank] = text
        if may_pass:
            self.passing.add(rank)
        self.counts.discount(rank)

    def forgive(self, failed: Iterable[Rank]) -> None:
        """Let these ranks, which have failed, try again."""
        for rank in sorted(failed):
            self.forgiven[rank] = self.failures.pop(rank)
            self.passing.discard(rank)
            answer = self.answers.get(rank)
            if answer is not None and answer.final and answer.phase is not m.Phase.TORN:
                self.counts.count((rank,), answer.version)

    def not_redone(self, rank: Rank) -> None:
        """Let a rank that has failed to make an ordered update save its copy as it is. It makes no update any more."""
        del self.redoing[rank]
        if (answer := self.answers.get(rank)) is not None:
            self.answers[rank] = replace(answer, has_gradient=False)
        self.forgive((rank,))

    @property
    def reasons(self) -> dict[Rank, str]:
        """The ranks that have failed, also those that may try again, and the reason."""
        return {**self.forgiven, **self.failures}

    def failures_shown(self) -> list[str]:
        """Return in words which ranks could not save or commit; only the first few, as every rank gets this text."""
        reasons = self.reasons
        more = [f"and {len(reasons) - FAILURES_SHOWN} more ranks"] if len(reasons) > FAILURES_SHOWN else []
        return [f"rank {rank}: {text}" for rank, text in sorted(reasons.items())[:FAILURES_SHOWN]] + more

    def able(self, rank: Rank) -> bool:
        """Return whether the rank is frozen and connected, and has not failed."""
        return self.answered(rank) and rank not in self.failures

    def can_commit(self, rank: Rank) -> bool:
        """Return whether the rank is connected and has not failed. It may hang: a commit touches only files."""
        return rank in self.answers and rank not in self.failures
