"""Small models and checkpoints for the tests of this directory, and a program that loads one in jobs of two ranks.

As a program: ``checkpoints.py CHECKPOINT STORE`` loads with stock torch only. Every rank prints whether it loaded
without collectives, and a digest of the state.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A model with BatchNorm, a tied weight and a frozen bias."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 4)
        self.tied = nn.Linear(4, width)
        self.tied.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.tied(self.second(torch.relu(self.norm(self.first(x)))))
        return result


class Counting(nn.Linear):
    """Keeps plain values beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"steps": 3}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make an AdamW with two param groups, each with settings of its own."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-2}], lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def digest(model_state: dict[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of every bit of the model's and the optimizer's state, and of the settings."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    for name, value in sorted(model_state.items()):
        add(name.replace("module.", ""), value)
    state = optimizer.state_dict()
    for index, values in sorted(state["state"].items()):
        for key, value in sorted(values.items()):
            add(f"{index}.{key}", value)
    for group in state["param_groups"]:
        for key, value in sorted(group.items()):
            add(key, value)
    return found.hexdigest()


def whole_checkpoint(path: Path, pieces: Sequence[Any], version: int, world_size: int = 1) -> Any:
    """Finish a checkpoint of these pieces and return its manifest as a reader finds it."""
    from ttp.adapters.torch.saving.metadata import finalise
    from ttp.core.layout import Rank, Shard, Version
    from ttp.store.manifest import MANIFEST, Manifest

    pieces = (*pieces, *finalise(path, pieces))
    groups = {Shard("model"): tuple(Rank(rank) for rank in range(world_size))}
    manifest = Manifest(Version(version), "run", 1, "incident", "", "", world_size, groups, "torch", 0.0, pieces)
    (path / MANIFEST).write_text(manifest.to_json())
    return Manifest.load(path)


def shards(path: Path, *states: dict[str, Any]) -> list[Any]:
    """Write each state as a shard of its own, by a rank of its own. Returns the pieces."""
    from ttp.adapters.torch.saving.checkpoint import write_shard
    from ttp.core.layout import Rank, Shard

    return [
        write_shard(path, f"__{n}_0.distcp", state, shard=Shard(f"s{n}"), writer=Rank(n))
        for n, state in enumerate(states)
    ]


def write_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer, job: Any, **writing: Any) -> Any:
    """Write a checkpoint as ttp does, with a single shard, and return its manifest."""
    from ttp.adapters.torch.saving.checkpoint import write_shard
    from ttp.adapters.torch.saving.state import checkpoint_state
    from ttp.adapters.torch.sharding.names import ModelNames
    from ttp.core.layout import Rank, Shard
    from ttp.core.messages import Piece
    from ttp.store.digest import digest_bytes

    path.mkdir(parents=True)
    names = model if isinstance(model, ModelNames) else ModelNames(model, optimizer)
    state = checkpoint_state(names, optimizer, {}, job)
    shard = write_shard(path, "__0_0.distcp", state, shard=Shard("model"), writer=Rank(0), **writing)
    data = job.encode()
    (path / "job_0.msgpack").write_bytes(data)
    return whole_checkpoint(
        path, [shard, Piece("job_0.msgpack", len(data), digest_bytes(data), "job", "", Rank(0))], job.version
    )


def main() -> None:
    """Run all jobs, one after the other. Ranks are forked, because importing torch takes most of a small job's time."""
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for no_dist in (False, True):
        ranks = {os.fork() or _load(no_dist, rank) for rank in range(2)}
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            if status != 0:  # the others would wait for it
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


def _load(no_dist: bool, rank: int) -> NoReturn:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        torch.manual_seed(100 + rank)
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}-{no_dist}", rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = adamw(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
        load(state, checkpoint_id=sys.argv[1], no_dist=no_dist)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert not any(name.startswith(("ttp.adapters", "ttp.store")) for name in sys.modules), "not stock torch"
        line = json.dumps([no_dist, digest(model.state_dict(), optimizer)]) + "\n"
        os.write(1, line.encode())  # at once: ranks share the pipe
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo sometimes aborts in the destructors of an interpreter that ends


if __name__ == "__main__":
    main()
