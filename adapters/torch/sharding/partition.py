"""Computes which rank of a group keeps the optimizer state of which parameters, for ``ReplicatedOptimizer``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """The assignment of shards to the ranks of a group.

    Args:
        size: number of ranks of the group, which are numbered ``0 .. size - 1``.
        replicas: the least number of ranks that hold each shard.

    Raises:
        ConfigError: there are fewer ranks than copies.
    """

    size: int
    replicas: int

    def __post_init__(self) -> None:
        if type(self.replicas) is not int or self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas!r} is not a number of copies: it must be at least 1")
        if self.replicas > self.size:
            raise ConfigError(
                f"replicas={self.replicas} copies of each shard need as many ranks, and the group has {self.size}: "
                f"start more ranks, or set replicas={self.size} or less"
            )

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self.size // self.replicas

    def shard_of(self, rank: int) -> int:
        """Return the shard that ``rank`` holds."""
        return rank % self.shards

    def holders(self, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold a copy of ``shard``."""
        return tuple(range(shard, self.size, self.shards))

    def block_of(self, rank: int) -> range:
        """Return the block of ``rank``: consecutive ranks that together hold every shard."""
        last = self.size // self.shards - 1
        block = min(rank // self.shards, last)
        return range(block * self.shards, self.size if block == last else (block + 1) * self.shards)


def assign(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign parameters to shards: the largest first, each to the shard that has the fewest elements so far.

    Ranks that make the same calls get the same result. No shard gets more elements than the average plus those of the
    largest parameter.

    Args:
        sizes: number of elements of each parameter.
        loads: number of elements that each shard has already; this list is updated.

    Returns:
        The shard of each parameter.
    """
    shards = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        shards[index] = shard = loads.index(min(loads))
        loads[shard] += sizes[index]
    return shards
