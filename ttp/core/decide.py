"""Which version can be saved, and who saves it: Statement 1, as a pure function.

Theory of operation
-------------------
``Mat(r)`` is the set of versions that rank ``r`` can still produce once it is quiet:

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

A checkpoint of version n exists if and only if for every shard s some rank r of R(s) has n in Mat(r). ``decide`` takes
the largest such n. Different shards may come from different data-parallel columns. A torn rank that still holds the
gradient is not listed as one that can redo: an update is not idempotent, so a half-applied one cannot be finished.

Copies that should be equal and are not: ``ttp.core.jury`` says whom to distrust. Copies that are trusted and free of
NaN and Inf are taken where a version of such copies is whole, else trusted ones, else any; the plan then says so.

When a plan is made again because a saver was lost, the pieces that others have written, or are writing, count like a
rank that holds them: a shard in ``written`` needs nobody any more at that version.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from ttp.core.jury import Verdict, judge
from ttp.core.layout import Layout, Rank, Shard, Version, compact_ranks

NO_DIGESTS: Mapping[Shard, str] = MappingProxyType({})

SHARDS_SHOWN = 16
"""Shards named in a reason; it is read by people."""


class How(enum.Enum):
    """What a saver has to do before its copy is the planned version."""

    AS_IS = "as_is"
    REDO = "redo"
    UNDO = "undo"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a frozen rank can still materialise.

    Args:
        rank: who answers.
        version: finished updates. For a torn rank: the version that the broken update started from.
        torn: died or raised between the first and the last write of an update.
        has_gradient: the fully reduced gradient of ``version + 1`` is at hand (it stands at the gate).
        has_preimage: a copy of the state before the last update it started is at hand.
        stuck: the main thread does not run Python (it hangs in a collective); the processor can still save.
        settled: what follows an update (scheduler, EMA) has been done too.
        host: where it runs; work is spread over hosts.
        incarnation: launch of the job the state belongs to.
        digests: of the shards it holds, at ``version``; a shard without one is not compared.
        bad: holds NaN or Inf.
        can_save: false: it failed to write; what it holds still counts as a witness of what is right.
    """

    rank: Rank
    version: Version
    torn: bool = False
    has_gradient: bool = False
    has_preimage: bool = False
    stuck: bool = False
    settled: bool = True
    host: str = ""
    incarnation: int = 0
    digests: Mapping[Shard, str] = field(default_factory=lambda: NO_DIGESTS)
    bad: bool = False
    can_save: bool = True


@dataclass(frozen=True, slots=True)
class Assignment:
    """``rank`` writes ``shard``."""

    shard: Shard
    rank: Rank
    how: How


@dataclass(frozen=True, slots=True)
class Plan:
    """One step-consistent checkpoint: every shard exactly once, all of one version, but for those already written.

    Args:
        version: finished updates.
        assignments: who writes what.
        reason: for the operator.
        disputed: shards whose replicas differ so that nobody can tell which is right.
        odd: ranks whose copy differs from that of most others.
    """

    version: Version
    assignments: tuple[Assignment, ...]
    reason: str
    disputed: tuple[Shard, ...] = ()
    odd: tuple[Rank, ...] = ()

    @property
    def savers(self) -> tuple[Rank, ...]:
        """Ranks that write something, in ascending order."""
        return tuple(sorted({a.rank for a in self.assignments}))


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No consistent checkpoint exists; ``reason`` is written for the operator."""

    reason: str


def materialisable(answer: Answer) -> dict[Version, How]:
    """``Mat(r)``, with what it takes to get there."""
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
    layout: Layout, answers: Iterable[Answer], written: Mapping[Shard, Version] = MappingProxyType({})
) -> Plan | NoPlan:
    """The newest version that every shard can still produce whole, and who produces it.

    Answers of an older incarnation than the newest one seen are ignored; of several answers of one rank the last
    counts. Shards in ``written`` have a piece of that version, durable or on its way; the plan leaves them out.
    Runs in O(total size of the replica groups).
    """
    by_rank = _newest_incarnation(answers)
    ways = {rank: materialisable(answer) for rank, answer in by_rank.items()}
    verdict = judge(layout, by_rank.values())
    for copies in _tiers(layout, by_rank, verdict):
        common = _common_versions(copies, ways, written)
        if common:
            return _plan(max(common), copies, by_rank, ways, written, verdict)
    return NoPlan(_why_not(layout, by_rank, ways, written))


Copies = Mapping[Shard, Sequence[Rank]]
"""Ranks whose copy of a shard may be used."""


def _tiers(layout: Layout, by_rank: Mapping[Rank, Answer], verdict: Verdict) -> Iterator[Copies]:
    """Whose copies are used, the best first; the last one leaves nobody out."""
    everybody = {shard: [r for r in ranks if r in by_rank] for shard, ranks in layout.groups.items()}
    bad = {rank for rank, answer in by_rank.items() if answer.bad and not answer.torn}
    if verdict.odd or bad:
        trusted = {s: [r for r in ranks if r not in verdict.odd.get(s, ())] for s, ranks in everybody.items()}
        if bad:
            yield {s: [r for r in ranks if r not in bad] for s, ranks in trusted.items()}
        yield trusted
    yield everybody


def _common_versions(
    copies: Copies, ways: Mapping[Rank, Mapping[Version, How]], written: Mapping[Shard, Version]
) -> set[Version]:
    common: set[Version] | None = None
    for shard, ranks in copies.items():
        versions = {v for r in ranks for v in ways[r]}
        if shard in written:
            versions.add(written[shard])
        common = versions if common is None else common & versions
        if not common:
            return set()
    return common or set()


def _plan(
    version: Version,
    copies: Copies,
    by_rank: Mapping[Rank, Answer],
    ways: Mapping[Rank, Mapping[Version, How]],
    written: Mapping[Shard, Version],
    verdict: Verdict,
) -> Plan:
    wanted = {s: ranks for s, ranks in copies.items() if written.get(s) != version}
    assignments = _assign(wanted, by_rank, ways, version)
    distrusted = {s for s, odd in verdict.odd.items() if any(a.shard == s and a.rank in odd for a in assignments)}
    disputed = tuple(sorted({*verdict.disputed, *distrusted}))
    reason = _reason(version, assignments, by_rank, verdict, disputed)
    return Plan(version, assignments, reason, disputed, verdict.odd_ranks)


def _why_not(
    layout: Layout,
    by_rank: Mapping[Rank, Answer],
    ways: Mapping[Rank, Mapping[Version, How]],
    written: Mapping[Shard, Version],
) -> str:
    for shard, ranks in layout.groups.items():
        if shard not in written and not any(ways.get(r) for r in ranks):
            return f"shard {shard!r} has no whole copy left: {_story(ranks, by_rank)}"
    return f"no version is whole in every shard: {_versions_seen(layout, ways, written)}"


def _newest_incarnation(answers: Iterable[Answer]) -> dict[Rank, Answer]:
    listed = list(answers)
    newest = max((a.incarnation for a in listed), default=0)
    return {a.rank: a for a in listed if a.incarnation == newest}


def _assign(
    groups: Copies,
    by_rank: Mapping[Rank, Answer],
    ways: Mapping[Rank, Mapping[Version, How]],
    version: Version,
) -> tuple[Assignment, ...]:
    """Scarcest shards first; within a shard the rank that has least to do, on the host that has least to do."""
    host_load: Counter[str] = Counter()
    rank_load: Counter[Rank] = Counter()
    candidates = {shard: [r for r in ranks if version in ways.get(r, {})] for shard, ranks in groups.items()}
    chosen: list[Assignment] = []
    for shard in sorted(candidates, key=lambda s: (len(candidates[s]), s)):

        def cost(rank: Rank) -> tuple[bool, bool, bool, int, int, int]:
            answer = by_rank[rank]
            how = ways[rank][version]
            return (
                how is not How.AS_IS,
                answer.stuck,
                not answer.settled,
                rank_load[rank],
                host_load[answer.host],
                rank,
            )

        rank = min(candidates[shard], key=cost)
        rank_load[rank] += 1
        host_load[by_rank[rank].host] += 1
        chosen.append(Assignment(shard, rank, ways[rank][version]))
    return tuple(sorted(chosen, key=lambda a: a.shard))


def _reason(
    version: Version,
    assignments: tuple[Assignment, ...],
    by_rank: Mapping[Rank, Answer],
    verdict: Verdict,
    disputed: tuple[Shard, ...],
) -> str:
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for rank, answer in by_rank.items():
        seen[f"torn after {answer.version}" if answer.torn else f"at {answer.version}"].append(rank)
    states = "; ".join(f"ranks {compact_ranks(ranks)} {state}" for state, ranks in sorted(seen.items()))
    extra = [f"rank {a.rank} must {a.how.value}" for a in assignments if a.how is not How.AS_IS]
    if verdict.odd_ranks:
        extra.append(f"the copies of ranks {compact_ranks(verdict.odd_ranks)} differ from most others")
    if disputed:
        extra.append(f"replicas of {', '.join(disputed[:SHARDS_SHOWN])} differ and nobody can tell which is right")
    bad = [r for r, answer in by_rank.items() if answer.bad]
    if bad:
        used = [a.rank for a in assignments if a.rank in bad]
        extra.append(f"NaN or Inf on ranks {compact_ranks(bad)}" + (", saved as it is" if used else ", not used"))
    return f"version {version} is the newest that is whole in every shard ({'; '.join([states, *extra])})"


def _story(ranks: Iterable[Rank], by_rank: Mapping[Rank, Answer]) -> str:
    torn = [r for r in ranks if r in by_rank and by_rank[r].can_save]
    failed = [r for r in ranks if r in by_rank and not by_rank[r].can_save]
    gone = [r for r in ranks if r not in by_rank]
    parts = []
    if gone:
        parts.append(f"ranks {compact_ranks(gone)} gave no answer")
    if torn:
        parts.append(f"ranks {compact_ranks(torn)} broke off in mid-update")
    if failed:
        parts.append(f"ranks {compact_ranks(failed)} could not write")
    return ", ".join(parts)


def _versions_seen(layout: Layout, ways: Mapping[Rank, Mapping[Version, How]], written: Mapping[Shard, Version]) -> str:
    shown = []
    for shard, ranks in islice(layout.groups.items(), SHARDS_SHOWN):
        versions = {v for r in ranks for v in ways.get(r, {})}
        if shard in written:
            versions.add(written[shard])
        shown.append(f"{shard} has {sorted(versions)}")
    more = len(layout.groups) - SHARDS_SHOWN
    return "; ".join([*shown, *([f"and {more} shards more"] if more > 0 else [])])
