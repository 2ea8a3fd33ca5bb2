"""Messages by which a controller learns the layout of a job: it asks one rank, which answers in parts.

A ``Hello`` carries only the digest of the layout, so that it costs the same for every rank of a world of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Shard


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks that hold a copy of a shard: in a ``LayoutPart`` all of them, or a run of them in ascending order."""

    name: Shard
    ranks: tuple[Rank, ...]


Parts = tuple[tuple[ShardGroup, ...], ...]
"""All groups of a layout, cut into parts that each fit into a message."""


@dataclass(frozen=True, slots=True)
class LayoutPart(m.Report):
    """Report, the answer to ``TellLayout``: part ``index`` of ``count`` of the layout with this digest.

    Parts are numbered from 0. A group that is too long for one part goes on in the next one, under the same name.
    """

    digest: str
    index: int
    count: int
    groups: tuple[ShardGroup, ...]


@dataclass(frozen=True, slots=True)
class TellLayout(m.Order):
    """Order, possibly before ``Welcome``: send the layout that has this digest."""

    digest: str
