"""Messages by which a controller gets the layout of a job: it asks one rank, which answers in parts.

A ``Hello`` carries only the digest of the layout, so that its size does not depend on the world size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Shard

PART_GROUPS_MAX = 8192
PART_RANKS_MAX = 65_536
"""Most groups in one message, and most ranks in all of these groups: some hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks that hold a copy of the shard ``name``: all of them, or in a ``LayoutPart`` some, in ascending order."""

    name: Shard
    ranks: tuple[Rank, ...]


Parts = tuple[tuple[ShardGroup, ...], ...]
"""All groups of a layout, in parts that each fit into one message."""


@dataclass(frozen=True, slots=True)
class LayoutPart(m.Report):
    """Report, the answer to ``TellLayout``: part ``index`` of ``count`` of the layout with this digest.

    Parts are numbered from 0. A group that is too long for one part continues in the next one, under the same name.
    """

    digest: str
    index: int
    count: int
    groups: tuple[ShardGroup, ...]


@dataclass(frozen=True, slots=True)
class TellLayout(m.Order):
    """Order, possibly before ``Welcome``: send the layout that has this digest."""

    digest: str


def in_parts(layout: Layout) -> Parts:
    """Return the groups of a layout, in parts of which each fits into one message."""
    parts: list[tuple[ShardGroup, ...]] = []
    part: list[ShardGroup] = []
    room = PART_RANKS_MAX
    for shard, ranks in layout.groups.items():
        at = 0
        while at < len(ranks):
            if not room or len(part) == PART_GROUPS_MAX:
                parts.append(tuple(part))
                part, room = [], PART_RANKS_MAX
            some = ranks[at : at + room]
            part.append(ShardGroup(shard, some))
            room -= len(some)
            at += len(some)
    return (*parts, tuple(part))
