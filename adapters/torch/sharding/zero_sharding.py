"""The sharding of ZeRO-1: each rank holds all weights, and the optimizer state of its own partition only."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ttp.adapters.torch.loop.unwrap_optimizer import unwrap_optimizer
from ttp.adapters.torch.sharding.discovery import COMMON, Identity, named
from ttp.adapters.torch.sharding.exchange import connected, gather_bytes
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer
from ttp.adapters.torch.sharding.sharding import Sharding, TrainingObjects
from ttp.core.layout import REPLICATED, Layout, Rank, Shard
from ttp.errors import ConfigError

log = logging.getLogger("ttp.adapters.torch")

_NOTHING = b"-"
"""What a rank with an empty partition sends instead of a digest."""


class ZeroSharding(Sharding):
    """The sharding of an optimizer that shards its state. The constructor is a collective call.

    Args:
        parts: the objects of the job; ``unwrap_optimizer.is_sharded`` is True for its optimizer.

    Raises:
        ConfigError: no process group connects all ranks, the optimizer cannot be protected, or ``layout=`` was given.
    """

    def __init__(self, parts: TrainingObjects) -> None:
        _check(parts)
        self._names, self._optimizer = parts.names, parts.optimizer
        self._inner = unwrap_optimizer(parts.optimizer)
        layout, self._mine = partitions(gather_bytes(self._described()), dist.get_rank())
        super().__init__(parts, layout)
        self.stepping = (self._inner,)
        alone = parts.world_size > 1 and self.layout.unreplicated() and not parts.buddy
        if alone and dist.get_rank() == 0:
            log.warning("%s", _alone(self.layout, parts.optimizer))

    def parameters_of(self, shard: Shard) -> Collection[str]:
        """See ``Sharding``. Includes parameters of param groups that were added after the construction."""
        if shard == REPLICATED:
            return self._names.parameters.keys()
        if shard == COMMON:
            return self._names.parameters.keys() - self._names.updated_by(self._optimizer).keys()
        assert shard == self._mine, (shard, self._mine)
        return self._names.updated_by(self._inner).keys()

    def carries(self, shard: Shard, value: Any) -> bool:
        """See ``Sharding``."""
        return shard in (REPLICATED, COMMON)

    def _described(self) -> bytes:
        mine = [(name, list(p.shape)) for name, p in sorted(self._names.updated_by(self._inner).items())]
        return hashlib.sha256(repr(mine).encode()).digest()[:12] if mine else _NOTHING


def partitions(digests: Sequence[bytes], rank: int) -> tuple[Layout, Shard | None]:
    """Return the replica groups, and the shard of the partition of ``rank``.

    The shard is None if the partition is empty: then ``rank`` holds only what every rank holds.

    Args:
        digests: for each rank a digest of its partition; ranks with the same digest are replicas.
        rank: this rank.
    """
    held: dict[Identity, list[Rank]] = {}
    for number, one in enumerate(digests):
        if one != _NOTHING:
            held.setdefault((one,), []).append(Rank(number))
    if len(held) > 1 or _NOTHING in digests:
        held[(COMMON,)] = [Rank(number) for number in range(len(digests))]
    layout, names = named(held, len(digests))
    return layout, names.get((digests[rank],))


def _check(parts: TrainingObjects) -> None:
    kind = type(parts.optimizer).__name__
    if not connected(parts.world_size):
        raise ConfigError(
            f"the state of {kind} is spread over the ranks, and torch.distributed does not connect all "
            f"{parts.world_size} of them: call init_process_group() before wrap_optimizer()"
        )
    if parts.layout is not None:
        raise ConfigError(f"{kind} itself assigns shards to ranks: call wrap_optimizer() without layout=")
    if not hasattr(unwrap_optimizer(parts.optimizer), "register_step_pre_hook") or getattr(
        parts.optimizer, "_overlap_with_ddp", False
    ):
        raise ConfigError(
            f"{kind}(overlap_with_ddp=True) has no step() of its own to protect: make it without overlap_with_ddp"
        )
    optimizer: Any = parts.optimizer
    groups = [each.process_group for each in (optimizer, *parts.ddps)]
    if not any(dist.get_world_size(group) == parts.world_size for group in groups):
        raise ConfigError(
            f"the process group of {kind} has not all {parts.world_size} ranks, and no DistributedDataParallel over "
            "all ranks keeps the weights of the others equal: use the group of all data-parallel ranks for both"
        )


def _alone(layout: Layout, optimizer: Optimizer) -> str:
    alone, shards = len(layout.unreplicated()), len(layout.groups) - 1
    cure = (
        "start more ranks, or set replicas=2"
        if isinstance(optimizer, ReplicatedOptimizer)
        else "use ttp.adapters.torch.ReplicatedOptimizer, which keeps every shard on two ranks"
    )
    return (
        f"{alone} of {shards} shards of the state of {type(optimizer).__name__} are on one rank each: when that rank "
        f"dies, nothing can be saved. Training goes on; to be protected, {cure}, or give wrap_optimizer() buddy=True"
    )
