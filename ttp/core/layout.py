"""The layout of a job: which rank holds a copy of which shard of the training state.

A *shard* is one distinct part of the state (one TP x PP x EP x ZeRO slice of weights, master weights and moments); its
*replica group* is the set of ranks that hold a copy. All decisions use only shards and replica groups, so a new kind of
parallelism needs nothing but a new way to make a ``Layout``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, NewType

from ttp.errors import ConfigError

Rank = NewType("Rank", int)
Shard = NewType("Shard", str)
Version = NewType("Version", int)

WORLD_SIZE_MAX = 1 << 20
"""Largest world size that is accepted: about ten times the 10^5 ranks that ttp is designed for."""

_SHOWN_MAX = 100
_DIGITS_MAX = 4

REPLICATED = Shard("model")
"""The only shard of plain data parallelism: every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The replica groups of a job.

    Args:
        world_size: number of ranks, numbered ``0 .. world_size - 1``.
        groups: for every shard the ranks that hold a copy of it; sorted when the layout is made.

    Attributes:
        digest: identifies the layout: equal layouts have equal digests.

    Raises:
        ConfigError: a group is empty, or names a rank twice or one outside of the world; a rank holds no shard; a shard
            has no name (a str), or is named like a part of a shard (``model#2/4``); or a rank is no whole number.
    """

    world_size: int
    groups: Mapping[Shard, tuple[Rank, ...]]
    digest: str = field(init=False, compare=False)
    _held: Mapping[Rank, tuple[Shard, ...]] = field(init=False, compare=False, repr=False)

    if TYPE_CHECKING:  # a program has no need of the types Shard and Rank

        def __init__(
            self, world_size: int, groups: Mapping[str, Iterable[int]] | Mapping[Shard, Iterable[int]]
        ) -> None: ...

    def __post_init__(self) -> None:
        if unnamed := [shard for shard in self.groups if not isinstance(shard, str)]:
            raise ConfigError(f"the shards of a layout have names, and {unnamed[0]!r} is not a str")
        try:  # numbers of numpy and torch become Python's: their texts, and so their digests, differ
            object.__setattr__(self, "world_size", index(self.world_size))
            groups = {s: tuple(sorted(Rank(index(r)) for r in ranks)) for s, ranks in sorted(self.groups.items())}
        except TypeError as problem:
            raise ConfigError(f"ranks of a layout are whole numbers, and {problem}") from None
        _check(self.world_size, groups)
        held: dict[Rank, list[Shard]] = {}
        for shard, ranks in groups.items():
            for rank in ranks:
                held.setdefault(rank, []).append(shard)
        object.__setattr__(self, "groups", MappingProxyType(groups))
        object.__setattr__(self, "_held", {rank: tuple(shards) for rank, shards in held.items()})
        text = repr((self.world_size, sorted(groups.items())))
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    @classmethod
    def data_parallel(cls, world_size: int) -> Layout:
        """Return the layout of plain data parallelism (DDP): every rank holds the one shard."""
        return cls(world_size, {REPLICATED: tuple(Rank(r) for r in range(world_size))})

    def shards_of(self, rank: Rank) -> tuple[Shard, ...]:
        """Return the shards of which ``rank`` holds a copy; constant time."""
        return self._held.get(rank, ())

    def unreplicated(self) -> tuple[Shard, ...]:
        """Return the shards with a single copy: they die with their rank."""
        return tuple(s for s, ranks in self.groups.items() if len(ranks) == 1)


def part_name(name: str) -> tuple[Shard, int, int] | None:
    """Return shard, index and count from the name of a part, such as ``model#2/4``; None if it is not such a name.

    See ``ttp.core.stripes``.
    """
    shard, sign, suffix = name.rpartition("#")
    index, _, count = suffix.partition("/")
    if not (sign and _counts(index) and _counts(count)):
        return None
    return Shard(shard), int(index), int(count)


def _counts(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX and digits[0] != "0"


def _check(world_size: int, groups: Mapping[Shard, tuple[Rank, ...]]) -> None:
    if world_size < 1:
        raise ConfigError(f"world size {world_size} is not a number of ranks; it must be at least 1")
    if world_size > WORLD_SIZE_MAX:
        raise ConfigError(f"world size {world_size} is more than the maximum of {WORLD_SIZE_MAX} ranks")
    if not groups:
        raise ConfigError("a layout needs at least one shard")
    held: set[Rank] = set()
    for shard, ranks in groups.items():
        if part_name(shard):
            raise ConfigError(f"{shard!r} names a part of a shard in ttp (2 of 4): give the shard another name")
        if not ranks:
            raise ConfigError(f"shard {shard!r} has an empty replica group")
        if len(set(ranks)) != len(ranks):
            twice = next(rank for rank, following in pairwise(ranks) if rank == following)
            raise ConfigError(f"shard {shard!r} names a rank twice: {twice}")
        if ranks[0] < 0 or ranks[-1] >= world_size:
            outside = ranks[0] if ranks[0] < 0 else ranks[-1]
            raise ConfigError(f"shard {shard!r} names a rank outside 0..{world_size - 1}: {outside}")
        held.update(ranks)
    if len(held) != world_size:
        idle = islice((rank for rank in range(world_size) if rank not in held), _SHOWN_MAX)
        raise ConfigError(f"no shard is held by {ranks_text(idle)} ({world_size - len(held)} in all)")


def compact_ranks(ranks: Iterable[int]) -> str:
    """Return ranks ``{0, 1, 2, 5}`` as ``0-2,5``, for messages that people read."""
    parts: list[str] = []
    run: list[int] = []
    for rank in [*sorted(ranks), None]:
        if run and (rank is None or rank != run[-1] + 1):
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if rank is not None:
            run.append(rank)
    return ",".join(parts)


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that ``compact_ranks`` has written as ``text``.

    Raises:
        ValueError: it is not such a text, or it has more ranks than a job.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first) + 1
        if len(found) + end - begin > WORLD_SIZE_MAX:  # len() of a range does not take every number
            raise ValueError(f"more than {WORLD_SIZE_MAX} ranks")
        found += range(begin, end)
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2,5``, for messages that people read."""
    text = compact_ranks(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def describe(layout: Layout) -> str:
    """Return a layout in a few words, for messages that people read."""
    groups = list(layout.groups.items())
    shown = ", ".join(f"{shard}: {compact_ranks(ranks)}" for shard, ranks in groups[:4])
    return f"{len(groups)} shards ({shown}{', ...' if len(groups) > 4 else ''})"


def describe_copies(layout: Layout) -> str:
    """Return how many ranks hold each shard, in a few words: ``8 ranks, 4 shards on 2 ranks each``."""
    counts = [len(ranks) for ranks in layout.groups.values()]
    fewest, most, alone = min(counts), max(counts), len(layout.unreplicated())
    if most == 1:
        where = " on one rank only"
    elif alone:
        where = f", {alone} of them on one rank only"
    else:
        where = f" on {fewest if fewest == most else f'{fewest} to {most}'} ranks each"
    return f"{_number(layout.world_size, 'rank')}, {_number(len(counts), 'shard')}{where}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def difference(theirs: Layout, ours: Layout) -> str:
    """Return the difference between two layouts of one world, in a few words, for messages that people read."""
    added = [shard for shard in theirs.groups if shard not in ours.groups]
    lacking = [shard for shard in ours.groups if shard not in theirs.groups]
    moved = [s for s, ranks in theirs.groups.items() if s in ours.groups and ours.groups[s] != ranks]
    said = [f"{_few(added)} only in the first"] if added else []
    said += [f"{_few(lacking)} only in the second"] if lacking else []
    if moved:
        first, more = moved[0], f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        there, here = compact_ranks(theirs.groups[first]), compact_ranks(ours.groups[first])
        said.append(f"shard {first!r}{more} is held by ranks {there} in the first and by {here} in the second")
    return "; ".join(said)


def _few(shards: list[Shard]) -> str:
    shown = ", ".join(repr(shard) for shard in shards[:3])
    return f"shard{'s' * (len(shards) > 1)} {shown}{f' and {len(shards) - 3} more' if len(shards) > 3 else ''}"
