"""A rank of a small training in one layout, with ttp's hooks on and off by turns. Started by ``benchmarks.layouts``.

Rank 0 prints JSON: milliseconds per step of every block, on and off.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ttp
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer

WIDTH, BATCH, LAYERS = 512, 32, 4
Step = Callable[[], object]
"""Forward and backward pass; the gradients are reduced then."""


def make(layout: str) -> tuple[nn.Module, Step]:
    """The same model over four ranks, and what makes its gradient."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    if layout == "pp":
        return stage_of(whole)
    cut = {"hsdp": hsdp, "tp": tensor_parallel}.get(layout, DistributedDataParallel)
    model, data = cut(whole), torch.randn(BATCH, WIDTH)
    return model, lambda: model(data).square().mean().backward()


def hsdp(model: nn.Sequential) -> nn.Module:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    return sharded


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Two replicas, every two layers cut by columns and then by rows."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {f"{n}.0": RowwiseParallel() if n % 2 else ColwiseParallel() for n in range(LAYERS)}
    parallelize_module(model, mesh["tp"], plan)
    wrapped: Any = replicate(model, mesh=mesh["dp"])
    return wrapped


def stage_of(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Two stages of two replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    number, half = mesh["pp"].get_local_rank(), LAYERS // 2
    mine = nn.Sequential(OrderedDict({f"stage{number}": model[half * number : half * (number + 1)]}))
    stage_model: Any = replicate(mine, mesh=mesh["dp"])
    stage = PipelineStage(stage_model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _target: output.square().mean())
    data = torch.randn(BATCH, WIDTH)
    return stage_model, (lambda: schedule.step(target=data)) if number else (lambda: schedule.step(data))


def block_ms(step: Step, optimizer: torch.optim.Optimizer, steps: int, pause_s: float) -> float:
    """Milliseconds per step of one block, all ranks together; each begins with a pause."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        time.sleep(pause_s)
        step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return (time.perf_counter() - begin) / steps * 1e3


@ttp.ttp_to_persist
def train(layout: str, blocks: int, steps: int, step_ms: float) -> None:
    """Blocks by turns, after one of each that is not counted, and shows how long the pause has to be."""
    kind, _, undo = layout.partition("-")
    model, step = make(kind)
    parameters = model.parameters()
    optimizer = ReplicatedOptimizer(parameters, AdamW) if kind == "replicated" else AdamW(parameters)
    ttp.wrap_optimizer(optimizer, model=model, save_dir=os.environ["BENCH_SAVE_DIR"], undo=undo or None)
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    on, off = [], []
    pause_s = 0.0
    for number in range(blocks + 1):
        on.append(block_ms(step, optimizer, steps, pause_s))
        adapter.detach()
        off.append(block_ms(step, optimizer, steps, pause_s))
        adapter.attach(processor)
        if number == 0:
            pause = torch.tensor(max(0.0, step_ms - off[0]) / 1e3)
            dist.broadcast(pause, 0)
            pause_s = float(pause)
    if dist.get_rank() == 0:
        print(json.dumps({"on": on[1:], "off": off[1:]}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    dist.barrier()
    dist.destroy_process_group()
