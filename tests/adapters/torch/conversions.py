"""Helpers shared by the tests of ``ttp convert``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.adapters.torch.checkpoints import Net, adamw, digest, shards, whole_checkpoint, write_checkpoint
from ttp.adapters.torch.convert.conversion import Converted, convert
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.job_state import JobState
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint

Trained = tuple[Net, torch.optim.Optimizer, Any]


def converted(source: Path, target: Path, to: Any, **settings: Any) -> Converted:
    return convert(source, target, to, watch=lambda _what, _total: lambda _count: None, **settings)


def there_and_back(path: Path, to: Any, **settings: Any) -> Path:
    """Make a file of a checkpoint, and a checkpoint of the file. Returns the path of the latter."""
    file = converted(path, path.with_name("file"), to, **{"optimizer": True, **settings}).target
    return converted(file, path.with_name("new"), "dcp").target


def imported(directory: Path, saved: Any, **settings: Any) -> Path:
    """Return the checkpoint that becomes of what a program has saved with torch alone."""
    torch.save(saved, directory / "f.pt")
    return converted(directory / "f.pt", directory / "new", "dcp", **settings).target


def fresh(seed: int = 77) -> Trained:
    torch.manual_seed(seed)
    model = Net()
    optimizer = adamw(model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest(model.state_dict(), optimizer)


def restored(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None
) -> tuple[JobState, list[str]]:
    assert verify_checkpoint(path) == []
    return restore_into(path, Manifest.load(path), model=model, optimizer=optimizer, scheduler=scheduler)


def checkpoint_of(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    write_checkpoint(directory / "c", model, optimizer, JobState(version=3))
    return directory / "c"


def sharded(path: Path, whole: dict[str, Tensor]) -> Path:
    """Write a checkpoint as a job does in which two ranks hold halves of every tensor; ``b`` is tied to ``a``."""
    path.mkdir()
    states: list[dict[str, Any]] = [{"model": {}, "ttp": {"version": 4, "optimizer": ""}} for _ in range(2)]
    for name, tensor in whole.items():
        middle, rest = min(tensor.shape[0] // 2 + 1, tensor.shape[0]), (0,) * (tensor.dim() - 1)
        for state, start, part in zip(states, (0, middle), (tensor[:middle], tensor[middle:]), strict=True):
            state["model"][name] = (Chunk(part, tuple(tensor.shape), (start, *rest)),)
    for state in states:
        state["model"]["b"] = state["model"]["a"]
    whole_checkpoint(path, shards(path, *states), 4)
    return path


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(some, others, strict=True))
