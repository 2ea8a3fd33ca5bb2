"""Spreads shards and their parts over ranks, so that all hosts write about the same number of bytes.

A shard is cut if more ranks can write at the same time than there are shards. Its parts go to replicas that are
*alike*: they hold the version as it is, agree on whether the post-step is done, and have the same digest and size. By
default each host gets one part, because the ranks of a host share its network and disk. Hosts get more parts only if
``TTP_STRIPES`` is a number of parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle

from ttp.core import stripes
from ttp.core.answer import Answer
from ttp.core.layout import Rank, Shard


class Work:
    """The bytes that each rank and each host has to write.

    Args:
        sizes: the bytes of each shard to be written; 0: unknown, which counts like the smallest known size.
        holders: all ranks that have answered.
    """

    def __init__(self, sizes: Mapping[Shard, int], holders: Iterable[Answer]) -> None:
        least = min(filter(None, sizes.values()), default=1)
        self.sizes = {shard: size or least for shard, size in sizes.items()}
        self.total = sum(self.sizes.values())
        self.of_rank: defaultdict[Rank, float] = defaultdict(float)
        self.of_host: defaultdict[str, float] = defaultdict(float)
        able = [holder for holder in holders if holder.can_save and holder.stripes]
        self.ranks, self.hosts = len(able), len({holder.host for holder in able})

    def give(self, holder: Answer, size: float) -> None:
        """Add ``size`` bytes to the work of a rank and its host."""
        self.of_rank[holder.rank] += size
        self.of_host[holder.host] += size


def savers(
    shard: Shard, lead: Answer, others: Iterable[Answer], left: tuple[Shard, ...] | None, work: Work
) -> Iterator[tuple[Shard, Rank]]:
    """Yield the parts of ``shard`` to be written, with the rank that writes each.

    Args:
        shard: the shard.
        lead: the holder that was chosen to write the shard.
        others: other holders of the version; those that are like ``lead`` may write parts.
        left: the parts that no rank writes yet, if the shard is cut already; empty if it is not; None: it may not be.
        work: the work assigned so far; updated here.
    """
    alike = [lead]
    if left or (left is not None and lead.stripes):
        alike += [other for other in others if other.rank != lead.rank and _alike(shard, lead, other)]
    parts = left or _cut(shard, alike, work)
    if len(alike) > 1 and parts != (shard,):
        alike = _order(alike, work, None if left else lead)
    share = work.sizes[shard] / stripes.parse(parts[0]).count
    for part, holder in zip(parts, cycle(alike[: len(parts)])):
        work.give(holder, share)
        yield part, holder.rank


def _alike(shard: Shard, one: Answer, other: Answer) -> bool:
    same = one.post_step_done is other.post_step_done and one.bad is other.bad and bool(other.stripes)
    return (
        same
        and one.digests.get(shard, "") == other.digests.get(shard, "")
        and one.sizes.get(shard, 0) == other.sizes.get(shard, 0)
    )


def _cut(shard: Shard, alike: list[Answer], work: Work) -> tuple[Shard, ...]:
    wanted, slots = alike[0].stripes, work.ranks
    at_most = min(len(alike), wanted, stripes.PARTS_ASKED_MAX)
    if wanted == stripes.AUTO:
        hosts, size, slots = len({a.host for a in alike}), alike[0].sizes.get(shard, 0), work.hosts
        at_most = min(hosts, stripes.PARTS_MAX, size // stripes.PART_BYTES_MIN)
    if at_most < 2:
        return (shard,)
    return stripes.split(shard, stripes.parts_wanted(work.sizes[shard], work.total, slots, at_most))


def _order(alike: list[Answer], work: Work, first: Answer | None) -> list[Answer]:
    """Sort holders: ``first``, then idle ranks, one per host, hosts with least work first; then further ranks."""
    seen: Counter[str] = Counter()
    place: dict[Rank, int] = {}  # of a rank among those of its host
    for a in sorted(alike, key=lambda a: (a is not first, a.busy, a.main_thread_blocked, work.of_rank[a.rank], a.rank)):
        place[a.rank] = seen[a.host]
        seen[a.host] += 1

    def key(a: Answer) -> tuple[bool, bool, int, float, bool, float, int]:
        idle = a is not first, a.busy
        return *idle, place[a.rank], work.of_host[a.host], a.main_thread_blocked, work.of_rank[a.rank], a.rank

    return sorted(alike, key=key)
