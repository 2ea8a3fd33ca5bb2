"""Compares replicas that should be equal: if they differ, the most frequent digest is right; a tie is a dispute.

Silent corruption (a flipped bit in memory, a kernel that went wrong on one device) makes one copy differ. Only copies
of the same version are compared: a rank that is one update ahead is compared with ranks of its own version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ttp.core.answer import Answer
from ttp.core.layout import Layout, Rank, Shard, Version


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of the comparison.

    Args:
        odd: for every shard with differing copies the ranks whose digest is not the most frequent one.
        disputed: shards without a most frequent digest (a tie), with the newest version of which that is so.
    """

    odd: Mapping[Shard, frozenset[Rank]] = field(default_factory=lambda: MappingProxyType({}))
    disputed: Mapping[Shard, Version] = field(default_factory=lambda: MappingProxyType({}))

    def disputed_at(self, version: Version) -> set[Shard]:
        """Return the shards that are disputed at ``version``, or at a later one, of which undo makes ``version``."""
        return {shard for shard, newest in self.disputed.items() if newest >= version}

    @property
    def odd_ranks(self) -> tuple[Rank, ...]:
        """All ranks with an odd copy, in ascending order."""
        return tuple(sorted({rank for ranks in self.odd.values() for rank in ranks}))


UNANIMOUS = Vote()


def judge(layout: Layout, answers: Iterable[Answer]) -> Vote:
    """Compare the digests of each shard among ranks of the same version. O(number of digests)."""
    seen: dict[tuple[Shard, Version], dict[str, list[Rank]]] = {}
    for answer in answers:
        if answer.torn:
            continue
        for shard, digest in answer.digests.items():
            if digest and shard in layout.groups:
                seen.setdefault((shard, answer.version), {}).setdefault(digest, []).append(answer.rank)
    odd: dict[Shard, set[Rank]] = {}
    disputed: dict[Shard, Version] = {}
    for (shard, version), by_digest in seen.items():
        if len(by_digest) < 2:
            continue
        (digest, votes), (_, second) = Counter({d: len(ranks) for d, ranks in by_digest.items()}).most_common(2)
        if votes == second:
            disputed[shard] = max(version, disputed.get(shard, version))
        else:
            odd.setdefault(shard, set()).update(r for d, ranks in by_digest.items() if d != digest for r in ranks)
    if not (odd or disputed):
        return UNANIMOUS
    return Vote({s: frozenset(ranks) for s, ranks in odd.items()}, disputed)
