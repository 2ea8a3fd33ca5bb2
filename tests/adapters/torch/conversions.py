"""Helpers shared by the tests of ``ttp convert``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import torch
from torch import Tensor, nn

from tests.adapters.torch.checkpoints import Net, adamw, digest, whole_checkpoint
from ttp.adapters.torch.convert.conversion import Converted, convert
from ttp.adapters.torch.restoring.restore import Restored, restore_into
from ttp.adapters.torch.saving.checkpoint import Chunk, write_shard
from ttp.core.layout import Rank, Shard
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint

Trained = tuple[Net, torch.optim.Optimizer, Any]


def converted(source: Path, target: Path, to: Any, **settings: Any) -> Converted:
    return convert(source, target, to, watch=lambda _what, _total: lambda _count: None, **settings)


def fresh(seed: int = 77, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> Trained:
    torch.manual_seed(seed)
    model = Net()
    optimizer = make(model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest(model.state_dict(), optimizer)


def restored(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Restored:
    assert verify_checkpoint(path) == []
    return restore_into(path, Manifest.load(path), model=model, optimizer=optimizer, scheduler=scheduler)


def sharded(path: Path, whole: dict[str, Tensor]) -> Path:
    """Write a checkpoint as a job does in which two ranks hold halves of every tensor; ``b`` is tied to ``a``."""
    path.mkdir()
    pieces = []
    for rank in range(2):
        state: dict[str, Any] = {"model": {}, "ttp": {"version": 4, "optimizer": ""}}
        for name, tensor in whole.items():
            middle = min(tensor.shape[0] // 2 + 1, tensor.shape[0])
            start, part = (0, tensor[:middle]) if rank == 0 else (middle, tensor[middle:])
            state["model"][name] = Chunk(part, tuple(tensor.shape), (start,) + (0,) * (tensor.dim() - 1))
        state["model"]["b"] = state["model"]["a"]
        shard = Shard(f"shard-{rank}")
        pieces.append(write_shard(path, f"__{rank}_0.distcp", state, shard=shard, writer=Rank(rank)))
    whole_checkpoint(path, pieces, 4)
    return path


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(some, others, strict=True))
