"""Parts of a shard, which replicas on several hosts write side by side.

The name of a part is the name of its shard with a suffix: ``model#2/4`` is the second of the four parts of ``model``.
Savers, pieces and manifests use such names; a layout does not (``Layout`` refuses them). The core does not know the
contents of a part: the adapter distributes the entries of a shard by their names, shapes and types alone, so that all
replicas cut it in the same way.

One rule makes the parts cover the shard exactly: while any part of a shard is written or being written, the shard stays
cut into that number of parts, and only its missing parts are assigned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ttp.core.layout import Shard, Version, part_name

WHOLE, AUTO = 0, -1
"""Values of ``TTP_STRIPES`` besides a number of parts: never cut, and cut where it helps."""

PARTS_MAX = 8
"""Most parts of a shard with ``AUTO``: more savers gain less and less time, and more of them can fail."""

PARTS_ASKED_MAX = 256
"""Most parts that ``TTP_STRIPES`` can set."""

PART_BYTES_MIN = 64 << 20
"""Bytes of the smallest part with ``AUTO``: one more file, fsync and order cost some milliseconds."""

_WORTH = 10
"""Percent of time that cutting into more parts must save."""


@dataclass(frozen=True, slots=True)
class Part:
    """The ``index``-th of ``count`` parts, counted from 1; a whole shard is part 1 of 1."""

    shard: Shard
    index: int
    count: int


def parse(name: Shard) -> Part:
    """Return the part that ``name`` stands for; a name without such a suffix is a whole shard."""
    found = part_name(name) if "#" in name else None
    return Part(*found) if found and found[1] <= found[2] else Part(name, 1, 1)


def base_of(name: Shard) -> Shard:
    """Return the shard that ``name`` is a part of; ``name`` itself if it is a whole shard."""
    return parse(name).shard if "#" in name else name


def split(shard: Shard, count: int) -> tuple[Shard, ...]:
    """Return the names of the ``count`` parts of a shard, in order; the shard itself for one part."""
    if count == 1:
        return (shard,)
    return tuple(Shard(f"{shard}#{index}/{count}") for index in range(1, count + 1))


def covered(written: Mapping[Shard, Version]) -> dict[Shard, Version]:
    """Return the shards that are written whole, or in all their parts, with their versions."""
    found: dict[Shard, Version] = {}
    for name, version in written.items():
        if not _is_part(name):
            found[name] = version
        elif parse(name).index == 1 and not missing(parse(name), written):
            found[parse(name).shard] = version
    return found


def started(written: Mapping[Shard, Version]) -> dict[Shard, tuple[Version, tuple[Shard, ...]]]:
    """Return, for each shard of which only some parts are written, its version and the missing parts."""
    found: dict[Shard, tuple[Version, tuple[Shard, ...]]] = {}
    for name, version in written.items():
        if _is_part(name) and (lacking := missing(parse(name), written)):
            found[parse(name).shard] = version, lacking
    return found


def missing(like: Part, names: Collection[Shard]) -> tuple[Shard, ...]:
    """Return the parts of a shard, cut like the part ``like``, that are not among ``names``."""
    return tuple(part for part in split(like.shard, like.count) if part not in names)


def lacking(shards: Collection[Shard], names: Collection[Shard]) -> list[Shard]:
    """Return, sorted, the shards and parts that ``names`` lacks to cover ``shards``."""
    found = set(names)
    parts = {part.shard: part for part in map(parse, sorted(found)) if part.count > 1}
    return sorted(_lacking(shards, found, parts))


def _lacking(shards: Collection[Shard], found: set[Shard], parts: Mapping[Shard, Part]) -> Iterator[Shard]:
    for shard in shards:
        if shard not in found:
            yield from missing(parts[shard], found) if shard in parts else (shard,)


def parts_wanted(size: int, total: int, slots: int, at_most: int) -> int:
    """Return the number of parts of a shard with which ``slots`` writers get about the same number of bytes.

    If every writer has one shard, cutting gains nothing: four shards on four hosts stay whole, but one shard on four
    hosts is cut into four parts, and so is each of three shards.

    Args:
        size: size of the shard, in bytes or any other unit.
        total: size of all shards that are saved, in the same unit.
        slots: number of ranks that can write at the same time.
        at_most: most parts, at least one.
    """
    # Of n parts, each 1 / n of the shard, the busiest writer gets at least ceil(n * total / (slots * size)).
    loads = [(-(-n * total // (slots * max(size, 1))) / n, n) for n in range(1, at_most + 1)]
    best = min(load for load, _ in loads)
    return next(n for load, n in loads if load * 100 <= best * (100 + _WORTH))


def _is_part(name: Shard) -> bool:
    return "#" in name and parse(name).count > 1
