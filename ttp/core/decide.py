"""Decides which version can be saved, and which rank saves it: Statement 1, as a pure function.

Theory of operation
-------------------
``Mat(r)`` is the set of versions that rank ``r`` can materialise once it is frozen:

====================================================  ============
rank r is                                             Mat(r)
====================================================  ============
clean at v                                            {v}
clean at v, holding the reduced gradient of v + 1     {v, v + 1}
clean at v, holding a pre-image of v - 1              {v - 1, v}
torn between v and v + 1, nothing kept                {}
torn between v and v + 1, holding a pre-image of v    {v}
dead, unreadable, fenced: gives no answer             {}
====================================================  ============

A checkpoint of version n is possible if and only if for every shard s some rank r of its replica group R(s) has n in
Mat(r). ``decide`` takes the largest such n. Different shards may come from different data-parallel columns. A torn rank
that still holds the gradient cannot redo: an update is not idempotent, so a half-applied one cannot be finished.

``replica_vote`` compares copies that should be equal. ``decide`` uses trusted copies without NaN and Inf if some
version is complete in them, else trusted copies, else any copies, and the plan's reason tells which.

Kept copies (``replication``) extend Mat(r) shard by shard: n is the largest version for which each shard has a rank
with n in Mat, or with a kept copy of n. Kept copies are older than the live state, so they are used only if no version
is complete without them. A shard that some rank still holds at n is not taken from a kept copy.

When a plan is made again because a saver was lost, pieces that other ranks have written or are writing count like
copies: a shard in ``written`` needs no saver at that version. If only some parts of a shard are written, the missing
parts are assigned. ``ttp.core.placement`` cuts shards and spreads them over ranks.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from ttp.core import placement, stripes
from ttp.core.answer import Answer
from ttp.core.layout import Layout, Rank, Shard, Version, ranks_text
from ttp.core.replica_vote import Vote, judge

SHARDS_SHOWN = 16
"""Most shards that are named in a reason, which people read."""


class How(enum.Enum):
    """The way in which a saver gets the planned version."""

    AS_IS = "as_is"
    REDO = "redo"
    UNDO = "undo"
    KEPT = "kept"  # the saver writes a kept copy of the shard, not its live state


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of ``shard``, a shard or a part of one, to ``rank``, which writes it."""

    shard: Shard
    rank: Rank
    how: How


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one step-consistent checkpoint: every shard exactly once, whole or in parts, all of one version.

    Shards and parts that are written already are left out.

    Args:
        version: finished updates.
        assignments: which rank writes which shard.
        reason: why this version, for the operator.
        disputed: shards whose replicas differ without a majority, or that are saved from a copy that the vote rejects.
        odd: ranks whose copy differs from that of most others.
        lost: finished updates that are given up, as far as known, because kept copies, or trusted ones, are older.
        dropped: why the copies with these updates are not trusted, as clauses; empty: there are no such copies.
    """

    version: Version
    assignments: tuple[Assignment, ...]
    reason: str
    disputed: tuple[Shard, ...] = ()
    odd: tuple[Rank, ...] = ()
    lost: int = 0
    dropped: str = ""

    def judged(self, vote: Vote, wrong: Iterable[Shard]) -> Plan:
        """Return the plan with a later comparison of the replicas; ``wrong``: shards written from copies it rejects."""
        disputed = tuple(sorted(vote.disputed_at(self.version).union(wrong)))
        if (disputed, vote.odd_ranks) == (self.disputed, self.odd):
            return self
        words = [odd_text(vote.odd_ranks)] if vote.odd else []
        words += [dispute_text(disputed)] if disputed else []
        reason = f"{self.reason}; as later answers show, {'; '.join(words)}"
        return replace(self, disputed=disputed, odd=vote.odd_ranks, reason=reason)

    @property
    def caveats(self) -> str:
        """What is wrong with the checkpoint, as clauses to append to its version; empty: nothing is known."""
        lost = f"; {lost_steps(self.lost)}" if self.lost else ""
        why = f": {self.dropped}" if self.dropped else ""
        disputed = f"; {dispute_text(self.disputed)}" if self.disputed else ""
        return f"{' from kept copies' if lost and not why else ''}{lost}{why}{disputed}"

    @property
    def savers(self) -> tuple[Rank, ...]:
        """Ranks with an assignment, in ascending order."""
        return tuple(sorted({a.rank for a in self.assignments}))


@dataclass(frozen=True, slots=True)
class NoPlan:
    """The result that no consistent checkpoint is possible; ``reason`` is for the operator."""

    reason: str


def materialisable(answer: Answer) -> dict[Version, How]:
    """Return ``Mat(r)`` of the rank that answered, with the way to get each version."""
    v = answer.version
    if not answer.can_save:
        return {}
    if answer.torn:
        return {v: How.UNDO} if answer.has_preimage else {}
    ways = {v: How.AS_IS}
    if answer.has_gradient:
        ways[Version(v + 1)] = How.REDO
    if answer.has_preimage and v > 0:
        ways[Version(v - 1)] = How.UNDO
    return ways


def decide(
    layout: Layout,
    answers: Iterable[Answer],
    written: Mapping[Shard, Version] = MappingProxyType({}),
    uncut: Collection[Shard] = frozenset(),
) -> Plan | NoPlan:
    """Plan a checkpoint of the newest version that is complete in every shard.

    Of each rank only its last answer counts. Runs in O(total size of the replica groups), except that the groups of
    shards that are cut are sorted.

    Args:
        layout: the replica groups.
        answers: the answers of the frozen ranks.
        written: shards, and parts of shards, that have a piece of this version, durable or being written; the plan
            leaves them out.
        uncut: shards to be written whole. Shards whose copies differ are written whole too: parts of different copies
            may not fit together.

    Returns:
        The plan, or the reason for which no version is complete.
    """
    by_rank = {answer.rank: answer for answer in answers}
    ways = {rank: materialisable(answer) for rank, answer in by_rank.items()}
    vote = judge(layout, by_rank.values())
    whole = frozenset({*uncut, *vote.odd, *vote.disputed})
    known = _Known(by_rank, ways, stripes.covered(written), vote, stripes.started(written), whole)
    *better, everybody = _tiers(layout, by_rank, vote)
    for copies in better:
        common = known.common_versions(copies)
        if common:
            return known.plan(max(common), copies, newest=max(known.common_versions(everybody)))
    kept = _kept_copies(by_rank.values())
    common = known.common_versions(everybody, kept)
    if common:
        return known.plan(max(common), everybody, kept)
    return NoPlan(known.why_not(layout) + _kept_text(kept))


Copies = Mapping[Shard, Sequence[Rank]]
"""For each shard the ranks whose copies may be used."""

KeptCopies = Mapping[Shard, Mapping[Version, Sequence[Rank]]]
"""For each shard and version the ranks that can read a kept copy."""
NOTHING_KEPT: KeptCopies = MappingProxyType({})


def _kept_copies(answers: Collection[Answer]) -> KeptCopies:
    """Return the kept copies of this start of the job, as far as versions tell.

    An update needs all ranks, so a rank that gives no answer is at most one version ahead of the others. A copy of a
    later version was left by an earlier start.
    """
    latest = max((answer.version for answer in answers), default=0) + 1
    kept: dict[Shard, dict[Version, list[Rank]]] = {}
    for answer in answers:
        for shard, version in answer.kept if answer.can_save else ():
            if version <= latest:
                kept.setdefault(shard, {}).setdefault(version, []).append(answer.rank)
    return kept


def _tiers(layout: Layout, by_rank: Mapping[Rank, Answer], vote: Vote) -> Iterator[Copies]:
    """Yield the copies that may be used, the most trusted first; the last one is all copies."""
    everybody = {shard: [r for r in ranks if r in by_rank] for shard, ranks in layout.groups.items()}
    bad = {rank for rank, answer in by_rank.items() if answer.bad and not answer.torn}
    if vote.odd or bad:
        trusted = {s: [r for r in ranks if r not in vote.odd.get(s, ())] for s, ranks in everybody.items()}
        if bad:
            yield {s: [r for r in ranks if r not in bad] for s, ranks in trusted.items()}
        yield trusted
    yield everybody


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known when a plan is made.

    Args:
        by_rank: the last answer of each rank.
        ways: ``Mat(r)`` of each of these ranks, with the way to get each version.
        written: shards that are written whole, or in all their parts, with their versions.
        vote: the comparison of the replicas.
        begun: for each shard that is cut already, its version and the parts that no rank writes.
        uncut: shards that have to be written whole.
    """

    by_rank: Mapping[Rank, Answer]
    ways: Mapping[Rank, Mapping[Version, How]]
    written: Mapping[Shard, Version]
    vote: Vote
    begun: Mapping[Shard, tuple[Version, tuple[Shard, ...]]]
    uncut: Collection[Shard]

    def common_versions(self, copies: Copies, kept: KeptCopies = NOTHING_KEPT) -> set[Version]:
        """Return the versions that are complete in every shard."""
        common: set[Version] | None = None
        for shard, ranks in copies.items():
            versions = self._versions(shard, ranks).union(kept.get(shard, ()))
            common = versions if common is None else common & versions
            if not common:
                return set()
        return common or set()

    def _versions(self, shard: Shard, ranks: Iterable[Rank]) -> set[Version]:
        """Return the versions of a shard that these ranks can materialise, or that is written."""
        versions = {v for r in ranks for v in self.ways.get(r, ())}
        return versions | {self.written[shard]} if shard in self.written else versions

    def plan(self, version: Version, copies: Copies, kept: KeptCopies = NOTHING_KEPT, newest: int = 0) -> Plan:
        """Return the plan of a version that is complete in every shard.

        Args:
            version: the version.
            copies: the copies that may be used.
            kept: the kept copies that may be used.
            newest: the version that would be saved if all copies were trusted; 0: ``copies`` are all copies.
        """
        wanted = {s: ranks for s, ranks in copies.items() if self.written.get(s) != version}
        assignments, vote = self._assign(wanted, version, kept), self.vote
        distrusted = {a.shard for a in assignments if a.rank in vote.odd.get(a.shard, ())}
        disputed = tuple(sorted(vote.disputed_at(version) | distrusted))
        from_kept = any(a.how is How.KEPT for a in assignments)
        finished = max((a.version for a in self.by_rank.values()), default=version)
        lost = max(0, finished - version) if from_kept else max(0, min(finished, newest) - version)
        dropped = ", ".join(filter(None, (self._odd, self._bad))) if lost and not from_kept else ""
        reason = self._reason(version, assignments, disputed) + lost_text(assignments, lost)
        if dropped:
            reason += f"; newer copies are not trusted, so {lost_steps(lost)}"
        return Plan(version, assignments, reason, disputed, vote.odd_ranks, lost, dropped)

    def _assign(self, groups: Copies, version: Version, kept: KeptCopies) -> tuple[Assignment, ...]:
        """Assign each shard to a rank, the shards with fewest candidates first.

        Candidates that hold the version as it is come first; among equals the one with least work, on the host with
        least work. A shard that no rank can materialise at the version is written whole from a kept copy.
        """
        ways, by_rank = self.ways, self.by_rank
        candidates = {shard: [r for r in ranks if version in ways.get(r, {})] for shard, ranks in groups.items()}
        from_kept = {shard: kept.get(shard, {}).get(version, ()) for shard, able in candidates.items() if not able}
        candidates |= {shard: list(ranks) for shard, ranks in from_kept.items()}
        sizes = {s: by_rank[ranks[0]].sizes.get(s, 0) for s, ranks in candidates.items()}
        work = placement.Work(sizes, by_rank.values())
        chosen: list[Assignment] = []
        for shard in sorted(candidates, key=lambda s: (len(candidates[s]), s)):

            def how(rank: Rank) -> How:
                return How.KEPT if shard in from_kept else ways[rank][version]  # noqa: B023 - called in this round only

            def cost(rank: Rank) -> tuple[bool, bool, bool, bool, bool, float, float, int]:
                answer = by_rank[rank]
                return (
                    how(rank) is not How.AS_IS,
                    answer.unfinished,
                    answer.main_thread_blocked,
                    not answer.post_step_done,
                    answer.busy,
                    work.of_rank.get(rank, 0.0),
                    work.of_host.get(answer.host, 0.0),
                    rank,
                )

            lead = min(candidates[shard], key=cost)
            clean = how(lead) is How.AS_IS
            others = (by_rank[r] for r in candidates[shard] if clean and how(r) is How.AS_IS)
            started, missing = self.begun.get(shard, (None, ()))
            whole = shard in from_kept or shard in self.uncut
            left = None if whole else missing if started == version else ()
            parts = placement.savers(shard, by_rank[lead], others, left, work)
            chosen += [Assignment(part, rank, how(lead)) for part, rank in parts]
        return tuple(sorted(chosen, key=lambda a: a.shard))

    @property
    def _odd(self) -> str:
        """Which copies the vote rejects, as a clause; empty: none."""
        return odd_text(self.vote.odd_ranks) if self.vote.odd else ""

    @property
    def _bad(self) -> str:
        """Which copies hold NaN or Inf, as a clause; empty: none."""
        bad = [rank for rank, answer in self.by_rank.items() if answer.bad]
        return f"NaN or Inf on {ranks_text(bad)}" if bad else ""

    def _reason(self, version: Version, assignments: tuple[Assignment, ...], disputed: tuple[Shard, ...]) -> str:
        seen: defaultdict[str, list[int]] = defaultdict(list)
        for rank, answer in self.by_rank.items():
            seen[f"torn after {answer.version}" if answer.torn else f"at {answer.version}"].append(rank)
        states = "; ".join(f"{ranks_text(ranks)} {state}" for state, ranks in sorted(seen.items()))
        chores = dict.fromkeys((a.rank, a.how) for a in assignments if a.how in (How.REDO, How.UNDO))
        extra = [*(f"rank {rank} must {how.value}" for rank, how in chores), *_cut_text(assignments)]
        used = any(self.by_rank[a.rank].bad for a in assignments)
        bad = self._bad and f"{self._bad}, {'saved as it is' if used else 'not used'}"
        clauses = states, *extra, self._odd, bad, dispute_text(disputed) if disputed else ""
        return f"version {version} is the newest that is whole in every shard ({'; '.join(filter(None, clauses))})"

    def why_not(self, layout: Layout) -> str:
        """Return why no version is complete in every shard."""
        for shard, ranks in layout.groups.items():
            if not self._versions(shard, ranks):
                return f"shard {shard!r} has no whole copy left: {_holders_text(ranks, self.by_rank)}"
        shown = [
            f"{shard} has {sorted(self._versions(shard, ranks))}"
            for shard, ranks in islice(layout.groups.items(), SHARDS_SHOWN)
        ]
        more = len(layout.groups) - SHARDS_SHOWN
        shown += [f"and {more} more shards"] if more > 0 else []
        return f"no version is whole in every shard: {'; '.join(shown)}"


def _cut_text(assignments: tuple[Assignment, ...]) -> list[str]:
    cut = {part.shard: part.count for part in (stripes.parse(a.shard) for a in assignments) if part.count > 1}
    if len(cut) > SHARDS_SHOWN:
        return [f"{len(cut)} shards in parts"]
    return [f"{shard} in {count} parts" for shard, count in cut.items()]


def odd_text(ranks: Iterable[Rank]) -> str:
    """Return in words that the vote rejects the copies of these ranks."""
    return f"the copies of {ranks_text(ranks)} differ from most others"


def dispute_text(shards: tuple[Shard, ...]) -> str:
    """Return in words what it means that the replicas of these shards differ."""
    return f"replicas of {', '.join(shards[:SHARDS_SHOWN])} differ, and the saved copy may be the wrong one"


def lost_steps(lost: int) -> str:
    """Return in words that this many steps are lost."""
    return "1 finished step is lost" if lost == 1 else f"{lost} finished steps are lost"


def lost_text(assignments: tuple[Assignment, ...], lost: int) -> str:
    """Return what is to be added to the reason of a plan that saves kept copies; empty: it saves none."""
    shards = [a.shard for a in assignments if a.how is How.KEPT]
    if not shards:
        return ""
    more = f" and {len(shards) - SHARDS_SHOWN} more" if len(shards) > SHARDS_SHOWN else ""
    cost = lost_steps(lost) if lost else "no step is lost"
    return f"; from kept copies of {', '.join(shards[:SHARDS_SHOWN])}{more}: {cost}"


def _kept_text(kept: KeptCopies) -> str:
    if not kept:
        return ""
    shown = [f"{shard} {sorted(versions)}" for shard, versions in islice(sorted(kept.items()), SHARDS_SHOWN)]
    return f"; kept copies do not help either: {', '.join(shown)}"


def _holders_text(ranks: Iterable[Rank], by_rank: Mapping[Rank, Answer]) -> str:
    torn = [r for r in ranks if r in by_rank and by_rank[r].can_save]
    failed = [r for r in ranks if r in by_rank and not by_rank[r].can_save]
    gone = [r for r in ranks if r not in by_rank]
    said = {
        "gave no answer": gone,
        "stopped in mid-update (before step_done(), if the loop calls it) or with other weights in the model": torn,
        "could not write": failed,
    }
    return ", ".join(f"{ranks_text(found)} {what}" for what, found in said.items() if found)
