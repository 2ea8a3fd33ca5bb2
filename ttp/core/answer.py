"""The answer of a frozen rank, from which a plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ttp.core import stripes
from ttp.core.layout import Rank, Shard, Version

NO_DIGESTS: Mapping[Shard, str] = MappingProxyType({})
NO_SIZES: Mapping[Shard, int] = MappingProxyType({})


@dataclass(slots=True)  # not frozen: a plan for ten thousand ranks makes one each, and frozen costs four times as much
class Answer:
    """The answer of a frozen rank: its state, and the versions that it can materialise. Never changed once made.

    Args:
        rank: the rank that answers.
        version: finished updates. For a torn rank: the version that the broken update started from.
        torn: the rank raised or was stopped between the first and the last write of an update.
        has_gradient: the rank holds the fully reduced gradient of ``version + 1`` (it stands at the gate).
        has_preimage: the rank holds a copy of the state before the last update that it started.
        main_thread_blocked: the main thread runs no Python (it hangs in a collective); the processor can still save.
        post_step_done: the post-step (scheduler, EMA) of ``version`` is done.
        host: the host that the rank runs on; work is spread over hosts.
        digests: digests of the rank's shards at ``version``; a shard without a digest is not compared.
        bad: the copy holds NaN or Inf.
        can_save: false if the rank failed to write; its copy still counts in the comparison of replicas.
        kept: shards of which the rank can read a kept copy, its own or another rank's, and the version of each.
        busy: the rank is writing already, and would have to begin again if it got more to write.
        stripes: the number of parts into which its shards may be cut; see ``ttp.core.stripes``.
        sizes: bytes of its shards that can be cut into parts; 0 or absent: unknown.
        unfinished: the post-step is not done and never will be, because an exception has left the rank's loop.
    """

    rank: Rank
    version: Version
    torn: bool = False
    has_gradient: bool = False
    has_preimage: bool = False
    main_thread_blocked: bool = False
    post_step_done: bool = True
    host: str = ""
    digests: Mapping[Shard, str] = field(default_factory=lambda: NO_DIGESTS)
    bad: bool = False
    can_save: bool = True
    kept: tuple[tuple[Shard, Version], ...] = ()
    busy: bool = False
    stripes: int = stripes.WHOLE
    sizes: Mapping[Shard, int] = field(default_factory=lambda: NO_SIZES)
    unfinished: bool = False
