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

When a plan is made again because a saver was lost, the pieces that others have written, or are writing, count like a
rank that holds them: a shard in ``written`` needs nobody any more at that version.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from ttp.core.layout import Layout, Rank, Shard, Version, compact_ranks

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


@dataclass(frozen=True, slots=True)
class Assignment:
    """``rank`` writes ``shard``."""

    shard: Shard
    rank: Rank
    how: How


@dataclass(frozen=True, slots=True)
class Plan:
    """One step-consistent checkpoint: every shard exactly once, all of one version, but for those already written."""

    version: Version
    assignments: tuple[Assignment, ...]
    reason: str

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
    common: set[Version] | None = None
    for shard, ranks in layout.groups.items():
        versions = {v for r in ranks if r in ways for v in ways[r]}
        if shard in written:
            versions.add(written[shard])
        if not versions:
            return NoPlan(f"shard {shard!r} has no whole copy left: {_story(ranks, by_rank)}")
        common = versions if common is None else common & versions
    if not common:
        return NoPlan(f"no version is whole in every shard: {_versions_seen(layout, ways, written)}")
    version = max(common)
    wanted = {s: ranks for s, ranks in layout.groups.items() if written.get(s) != version}
    assignments = _assign(wanted, by_rank, ways, version)
    return Plan(version, assignments, _reason(version, assignments, by_rank))


def _newest_incarnation(answers: Iterable[Answer]) -> dict[Rank, Answer]:
    listed = list(answers)
    newest = max((a.incarnation for a in listed), default=0)
    return {a.rank: a for a in listed if a.incarnation == newest}


def _assign(
    groups: Mapping[Shard, tuple[Rank, ...]],
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


def _reason(version: Version, assignments: tuple[Assignment, ...], by_rank: Mapping[Rank, Answer]) -> str:
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for rank, answer in by_rank.items():
        seen[f"torn after {answer.version}" if answer.torn else f"at {answer.version}"].append(rank)
    states = "; ".join(f"ranks {compact_ranks(ranks)} {state}" for state, ranks in sorted(seen.items()))
    extra = [f"rank {a.rank} must {a.how.value}" for a in assignments if a.how is not How.AS_IS]
    return f"version {version} is the newest that is whole in every shard ({'; '.join([states, *extra])})"


def _story(ranks: Iterable[Rank], by_rank: Mapping[Rank, Answer]) -> str:
    torn = [r for r in ranks if r in by_rank]
    gone = [r for r in ranks if r not in by_rank]
    parts = []
    if gone:
        parts.append(f"ranks {compact_ranks(gone)} gave no answer")
    if torn:
        parts.append(f"ranks {compact_ranks(torn)} broke off in mid-update")
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
