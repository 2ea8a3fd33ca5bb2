"""What becomes of the state that a rank still has when training goes on in its process. Pure.

A rank that stood at the committed version when all stopped, and whose state is untouched since, has in memory what is
in the checkpoint. It may go on with it, and give it to ranks that have not. In doubt the checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import Phase


@dataclass(frozen=True, slots=True)
class Look:
    """A state as it was seen once.

    Args:
        version: that it was of.
        digests: of its values, one for each shard; empty ones: nothing is known of them.
        marks: of each of its tensors: whatever changes when it is written to, or is another one.
    """

    version: Version
    digests: tuple[str, ...]
    marks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which commit a state belongs to.

    Args:
        version: finished updates.
        incident: in which all stopped there, and it was saved.
    """

    version: Version
    incident: str


def why_not_kept(stopped: Look | None, now: Look, version: Version, phase: Phase) -> str:
    """Why a rank that comes out of its loop cannot go on with its state; empty: it is what it was when all stopped.

    Args:
        stopped: the last look behind the closed gate, by which replicas were compared; None: there was none.
        now: another one, by the training thread.
        version: that the gate says now.
        phase: likewise.
    """
    if phase not in (Phase.IDLE, Phase.DONE):
        return f"its update was left half done ({phase.value})"
    if stopped is None or not all(stopped.digests) or not stopped.digests:
        return "nothing was compared when all stopped (TTP_DIGEST=off, or it could not be read)"
    if not stopped.version == now.version == version:
        return f"it was compared at step {stopped.version}, and stands at step {version}"
    if stopped.marks != now.marks:
        return f"{_changed(stopped.marks, now.marks)} was written to, or replaced, since all stopped"
    if stopped.digests != now.digests:
        return "it has other values than when all stopped"
    return ""


def why_not_adopted(kept: Origin, committed: Origin) -> str:
    """Why a state that was kept is not what the checkpoint holds from which all go on; empty: it is."""
    if kept.version != committed.version:
        return f"it is of step {kept.version}, and all go on from step {committed.version}"
    if not kept.incident or kept.incident != committed.incident:
        return "the checkpoint is of another incident"
    return ""


def givers(layout: Layout, holders: Collection[Rank]) -> dict[Rank, Rank]:
    """Who gets its state from whom: of each rank that has none one that has all of its shards, dealt out evenly.

    Args:
        layout: the replica groups.
        holders: ranks that have theirs.
    """
    found: dict[Rank, Rank] = {}
    for rank in sorted(set(map(Rank, range(layout.world_size))) - set(holders)):
        wanted = set(layout.shards_of(rank))
        able = [holder for holder in holders if wanted <= set(layout.shards_of(holder))]
        if able:
            found[rank] = min(able, key=lambda holder: (list(found.values()).count(holder), holder))
    return found


def _changed(before: tuple[Hashable, ...], after: tuple[Hashable, ...]) -> str:
    differing = [one for one in after if one not in set(before)] or list(after)
    first = differing[0] if differing else "a tensor"
    return str(first[0] if isinstance(first, tuple) and first else first)
