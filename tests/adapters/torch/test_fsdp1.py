"""Kinds of FullyShardedDataParallel: what is replicated, and what would give the optimizer flat tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tests.adapters.torch.stub_processor import registered
from tests.adapters.torch.worlds import run_world
from ttp.core.layout import Layout
from ttp.errors import ConfigError

CPU = torch.device("cpu")


def wrapped(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU, **settings) for _ in range(2)))
    return FullyShardedDataParallel(model, device_id=CPU, **settings)  # it has no parameters of its own


def layout(model: nn.Module) -> Layout:
    return registered(model, torch.optim.SGD(model.parameters(), lr=0.1)).layout(2)


def kinds(_: Path, rank: int) -> list[Any]:
    with pytest.raises(ConfigError) as caught:
        layout(wrapped())
    replicated = layout(wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD))
    sharded = layout(wrapped(use_orig_params=True))
    return [str(caught.value), [[*group] for group in replicated.groups.values()], len(sharded.groups)]


def test_what_is_sharded_and_what_is_refused(tmp_path: Path) -> None:
    """``NO_SHARD`` is data parallelism. Without ``use_orig_params`` no name of a parameter would fit its moments."""
    for text, replicated, shards in run_world(tmp_path, __name__, "kinds", 2):
        assert text.startswith("FullyShardedDataParallel without use_orig_params=True gives the optimizer flat tensors")
        assert replicated == [[0, 1]] and shards >= 2
