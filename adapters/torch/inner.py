"""Optimizers that shard their state have another one inside, of the parameters of this rank: it keeps the state."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer

from ttp.adapters.torch.replicated_optimizer import ReplicatedOptimizer


def inner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that makes the update and keeps the state; ``optimizer`` itself when there is no other."""
    if isinstance(optimizer, ReplicatedOptimizer):
        return optimizer.inner
    if is_torch_zero(optimizer):
        inner: Optimizer = getattr(optimizer, "optim", optimizer)
        return inner
    return optimizer


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether it is one of these."""
    return isinstance(optimizer, ReplicatedOptimizer) or is_torch_zero(optimizer)


def is_torch_zero(optimizer: Any) -> bool:
    """Whether it is torch's ``ZeroRedundancyOptimizer``; does not import what nobody has imported."""
    library = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return library is not None and isinstance(optimizer, library.ZeroRedundancyOptimizer)
