"""Decides whether a rank keeps its state in memory when training goes on in its process. Pure functions.

A rank that was frozen at the committed version, and whose state is unchanged since, has the contents of the checkpoint
in memory. It may go on with that state, and give it to ranks that have none. In doubt the checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import Phase


@dataclass(frozen=True, slots=True)
class Look:
    """What was known of a rank's state at one moment.

    Args:
        version: the version of the state.
        digests: a digest of the values of each shard; empty: the shard could not be digested.
        marks: a value for each tensor that changes if the tensor is written to or replaced.
    """

    version: Version
    digests: tuple[str, ...]
    marks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit that a state belongs to.

    Args:
        version: finished updates.
        incident: the incident in which this version was saved; empty: unknown.
    """

    version: Version
    incident: str


def why_not_kept(stopped: Look | None, now: Look, version: Version, phase: Phase) -> str:
    """Return why a rank that leaves its loop cannot go on with its state; empty if it is unchanged since the freeze.

    Args:
        stopped: the last look at the frozen state, from which the replicas were compared; None if there was none.
        now: a look at the state now, by the training thread.
        version: the gate's version now.
        phase: the gate's phase now.
    """
    if phase not in (Phase.IDLE, Phase.DONE):
        return f"its update was left half done ({phase.value})"
    if stopped is None or not all(stopped.digests) or not stopped.digests:
        return "replicas were not compared when all ranks stopped (TTP_DIGEST=off, or the state could not be read)"
    if not stopped.version == now.version == version:
        return f"it was compared at step {stopped.version}, but is at step {version} now"
    if stopped.marks != now.marks:
        return f"{_changed(stopped.marks, now.marks)} was written to or replaced since all ranks stopped"
    if stopped.digests != now.digests:
        return "its values differ from those when all ranks stopped"
    return ""


def why_not_adopted(kept: Origin, committed: Origin) -> str:
    """Return why a kept state differs from the checkpoint that all ranks go on from; empty if it is the same.

    Args:
        kept: the commit that the kept state belongs to.
        committed: the commit that all ranks go on from.
    """
    if kept.version != committed.version:
        return f"it is of step {kept.version}, but all ranks go on from step {committed.version}"
    if not kept.incident or kept.incident != committed.incident:
        return "the checkpoint is of another incident"
    return ""


def givers(layout: Layout, holders: Collection[Rank]) -> dict[Rank, Rank]:
    """Return for each rank without state a holder that has all of its shards, spread evenly over the holders.

    Ranks for which there is no such holder are left out.

    Args:
        layout: the replica groups.
        holders: the ranks that have their state.
    """
    found: dict[Rank, Rank] = {}
    for rank in sorted(set(map(Rank, range(layout.world_size))) - set(holders)):
        wanted = set(layout.shards_of(rank))
        able = [holder for holder in holders if wanted <= set(layout.shards_of(holder))]
        if able:
            found[rank] = min(able, key=lambda holder: (list(found.values()).count(holder), holder))
    return found


def _changed(before: tuple[Hashable, ...], after: tuple[Hashable, ...]) -> str:
    known = set(before)
    first = next((one for one in after if one not in known), after[0] if after else "a tensor")
    return str(first[0] if isinstance(first, tuple) and first else first)
