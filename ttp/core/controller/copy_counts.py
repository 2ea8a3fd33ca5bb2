"""Counts how many frozen ranks hold each version, so that no event has to look at all answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ttp.core.layout import Layout, Rank, Shard, Version


class CopyCounts:
    """The copies of each shard at each version. Counting a rank takes constant time.

    Args:
        layout: the replica groups.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._version_of: dict[Rank, Version] = {}
        self._ranks_at: Counter[Version] = Counter()
        self._copies_at: Counter[tuple[Version, Shard]] = Counter()
        self._shards_at: Counter[Version] = Counter()

    def use(self, layout: Layout) -> None:
        """Count the same ranks by another layout."""
        known = dict(self._version_of)
        for rank in known:
            self.discount(rank)
        self.layout = layout
        for rank, version in known.items():
            self.count((rank,), version)

    def count(self, ranks: Collection[Rank], version: Version) -> None:
        """Count ranks that hold ``version`` and are not counted yet."""
        if not ranks:
            return
        self._version_of.update(dict.fromkeys(ranks, version))
        self._ranks_at[version] += len(ranks)
        for shard, copies in Counter(shard for rank in ranks for shard in self.layout.shards_of(rank)).items():
            self._shards_at[version] += not self._copies_at[version, shard]
            self._copies_at[version, shard] += copies

    def discount(self, rank: Rank) -> None:
        """Take back the count of a rank, if it was counted."""
        version = self._version_of.pop(rank, None)
        if version is None:
            return
        self._ranks_at[version] -= 1
        if not self._ranks_at[version]:
            del self._ranks_at[version]
        for shard in self.layout.shards_of(rank):
            self._copies_at[version, shard] -= 1
            self._shards_at[version] -= self._copies_at[version, shard] == 0

    def newest_is_whole(self, pieces: Callable[[], Mapping[Shard, Version]]) -> bool:
        """Return whether two versions are known, and the newer one is complete in every shard.

        Args:
            pieces: returns the shards that are written or being written, with the version; called only if needed.
        """
        if len(self._ranks_at) < 2:
            return False
        newest = max(self._ranks_at)
        if self._shards_at[newest] == len(self.layout.groups):
            return True
        written = pieces()
        return bool(written) and all(
            self._copies_at[newest, shard] or written.get(shard) == newest for shard in self.layout.groups
        )
