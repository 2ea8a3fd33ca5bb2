"""Assigns the optimizer state of parameters to the ranks of a group. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Where the shards of a group are.

    Args:
        size: ranks of the group, numbered ``0 .. size - 1``.
        replicas: copies of each shard, at least.

    Raises:
        ConfigError: there are fewer ranks than copies.
    """

    size: int
    replicas: int

    def __post_init__(self) -> None:
        if type(self.replicas) is not int or self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas!r} is not a number of copies; it must be at least 1")
        if self.replicas > self.size:
            raise ConfigError(
                f"replicas={self.replicas} copies of each shard need as many ranks, and the group has {self.size}: "
                f"start more ranks, or set replicas={self.size} or less"
            )

    @property
    def shards(self) -> int:
        """How many there are."""
        return self.size // self.replicas

    def shard_of(self, rank: int) -> int:
        """The shard that ``rank`` holds."""
        return rank % self.shards

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a copy of ``shard``."""
        return tuple(range(shard, self.size, self.shards))

    def block_of(self, rank: int) -> range:
        """The ranks among which ``rank`` finds every shard."""
        last = self.size // self.shards - 1
        block = min(rank // self.shards, last)
        return range(block * self.shards, self.size if block == last else (block + 1) * self.shards)


def assign(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The shard of each of these parameters: the largest first, each to the shard that has least so far.

    The same on every rank that asks in the same order. At the end no shard has more than the average plus one of the
    largest.

    Args:
        sizes: of the parameters.
        loads: what each shard has already; what it gets is added.
    """
    shards = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        shards[index] = shard = loads.index(min(loads))
        loads[shard] += sizes[index]
    return shards
