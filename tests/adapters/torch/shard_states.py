"""The ranks of test_sharding.py: all cases in one world, and state of odd forms in jobs of several shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.adapters.torch.shard_worker import (
    Job,
    adamw,
    layouts,
    made,
    mesh_of,
    net,
    restore_all,
    save_all,
    whole,
)
from ttp.errors import OtherModelError


def everything(directory: Path, rank: int) -> dict[str, Any]:
    """Run all cases in one world, because starting processes is slow."""
    told = layouts(directory, rank)
    save_all(directory, rank)
    told |= {"seen": of_one_rank(directory, rank), "counted": counted(directory, rank)}
    told |= {"averaged": averaged(directory, rank), "smaller": smaller(directory, rank)}
    return {"layouts": told, "restored": restore_all(directory, rank)}


class Seen(nn.Module):
    """A module whose extra state has another form on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.state = {"seen": [rank] * (rank + 1), "history": torch.full((rank + 1,), float(rank))}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def with_seen(rank: int) -> Any:
    """Return a sharded model with an extra state, and with a buffer that is cut over the ranks."""
    mesh = mesh_of(dist.get_world_size())
    model: Any = net()
    model.seen = Seen(rank)
    fully_shard(model, mesh=mesh)
    model.register_buffer("spread", distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    return model


def restored(
    directory: Path, model: Callable[[], nn.Module], rank: int, make: Callable[[Any], Any] = adamw
) -> tuple[Job, Job]:
    """Return a job that has saved, and one of the same kind that has restored its checkpoint."""
    one, two = (Job(directory / name, model(), rank, make) for name in ("saved", "again"))
    for buffer in two.model.buffers():
        buffer.zero_()
    one.train()
    two.adapter.load(one.save(2), rank, dist.get_world_size(), protected=False)
    one.close()
    two.close()
    return one, two


def of_one_rank(directory: Path, rank: int) -> Any:
    """Return the extra state that each rank gets if it has another form on each, and a buffer that is cut."""
    model = restored(directory / "seen", lambda: with_seen(rank), rank)[1].model
    return model.seen.state["seen"], whole(model.spread).tolist()


def counted(directory: Path, rank: int) -> list[list[float]]:
    """Return step counts before and after a restore, of an optimizer that counts for what is on other ranks too."""
    make = torch.optim.Adagrad
    jobs = restored(directory / "counted", lambda: made("fsdp1", rank), rank, lambda model: make(model.parameters()))
    here = [p for p in jobs[0].model.parameters() if p.numel()]
    there = [p for p in jobs[1].model.parameters() if p.numel()]
    pairs = zip(jobs, (here, there), strict=True)
    return [[float(job.optimizer.state[p]["step"]) for p in parameters] for job, parameters in pairs]


class RowMeans(torch.optim.Optimizer):
    """Keeps a number for each row of a parameter, and one for all of it, as distributed tensors (Adam-mini)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            rows = state.setdefault("rows", torch.zeros_like(parameter.detach()[..., :1]))
            rows.mul_(0.5).add_(gradient.square().mean(-1, keepdim=True) if gradient.dim() > 1 else gradient[:1])
            state["all"] = state.get("all", 0.0) * 0.5 + gradient.square().mean().redistribute(
                placements=[Replicate()] * gradient.device_mesh.ndim
            )
            with torch.no_grad():
                parameter.sub_(gradient / (rows.abs().sqrt() + state["all"].sqrt() + 1e-3), alpha=0.1)


def small() -> nn.Module:
    """Return a model of few parameters, in HSDP: every kind of operation is planned anew for each of their shapes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))
    fully_shard(model, mesh=mesh_of(dist.get_world_size() // 2, 2))
    return model


def smaller(directory: Path, rank: int) -> list[Any]:
    """Return how state of another shape than its parameter is distributed, and what training goes on to."""
    jobs = restored(directory / "smaller", small, rank, lambda model: RowMeans(model.parameters()))
    told = []
    for job in jobs:
        job.train(1)
        states = [value for state in job.optimizer.state.values() for value in state.values()]
        told.append([(str(value.placements), whole(value).tolist()) for value in (*states, *job.model.parameters())])
    return told


def averaged(directory: Path, rank: int) -> Any:
    """Return whether the average of a sharded model comes back whole, and why another one is refused."""
    average, alike, other = made("hsdp", rank), net(), nn.Linear(1, 1)
    job = Job(directory / "average", "hsdp", rank, extra_state={"ema": average})
    job.train(1)
    path = job.save(1)
    job.close()
    whole, found = net().state_dict(), list[Any]()
    for number, target in enumerate((alike, other)):
        for parameter in target.parameters():
            nn.init.zeros_(parameter)
        job = Job(directory / "average" / str(number), "ddp", rank, extra_state={"ema": target})
        try:
            job.adapter.load(path, rank, dist.get_world_size(), protected=False)
            found.append(all(torch.equal(tensor, whole[name]) for name, tensor in target.state_dict().items()))
        except OtherModelError as problem:
            found.append(str(problem))
        job.close()
    return found
