"""A rank of a small training in one layout, with ttp's hooks on and off in turns. Started by ``benchmarks.layouts``
and ``benchmarks.zero``.

Prints a JSON object with the milliseconds per step of every block: with ttp on (``on``); with ttp off (``off``); with
only the barrier before the update, if ttp needs one (``barrier``); of plain DDP with AdamW, if it was chosen
(``plain``). Also with the bytes of ``weights`` and of optimizer ``state`` on this rank.
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ttp
from benchmarks.barrier_rank import Processor
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.loop.barrier import UpdateBarrier, needs_barrier
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer

Step = Callable[[], object]
"""A function that runs a forward and a backward pass and reduces the gradients."""


class Job:
    """A model in one layout over all ranks, the function that computes its gradients, and its optimizer.

    Args:
        kind: the layout; see ``make`` and ``make_optimizer``.
        width: width of a layer.
        layers: number of layers.
        batch: number of samples.
    """

    def __init__(self, kind: str, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        whole = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        self.model, self._step = make(kind, whole, torch.randn(batch, width))
        self.optimizer: Any = make_optimizer(kind, self.model)

    def block_ms(self, steps: int, pause_s: float) -> float:
        """Return the milliseconds per step of one block, from barrier to barrier; each step begins with a pause.

        A first step is not counted: in the first step after hooks are attached, the hooks do additional work.
        """
        self._make_step()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            time.sleep(pause_s)
            self._make_step()
        dist.barrier()
        return (time.perf_counter() - begin) / steps * 1e3

    def _make_step(self) -> None:
        self._step()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(kind: str, whole: nn.Sequential, data: torch.Tensor) -> tuple[nn.Module, Step]:
    """Return this rank's part of the model in a layout, and the function that computes its gradients."""
    if kind == "pp":
        return stage_of(whole, data)
    model = {"hsdp": hsdp, "tp": tensor_parallel}.get(kind, DistributedDataParallel)(whole)
    return model, lambda: model(data).square().mean().backward()


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW; plain, or sharded for ``zero`` and ``replicated:COPIES``."""
    name, _, copies = kind.partition(":")
    if name == "replicated":
        return ReplicatedOptimizer(model.parameters(), AdamW, int(copies), lr=1e-4)
    if name == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-4)
    return AdamW(model.parameters(), 1e-4)


def hsdp(model: nn.Sequential) -> nn.Module:
    """Shard the model by HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    return sharded


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Apply tensor parallelism: two replicas, every two layers cut by columns and then by rows."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {f"{n}.0": RowwiseParallel() if n % 2 else ColwiseParallel() for n in range(len(model))}
    parallelize_module(model, mesh["tp"], plan)
    wrapped: Any = replicate(model, mesh=mesh["dp"])
    return wrapped


def stage_of(model: nn.Sequential, data: torch.Tensor) -> tuple[nn.Module, Step]:
    """Return this rank's stage of a pipeline of two stages with two replicas, and its step."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    number, half = mesh["pp"].get_local_rank(), len(model) // 2
    mine = nn.Sequential(OrderedDict({f"stage{number}": model[half * number : half * (number + 1)]}))
    stage_model: Any = replicate(mine, mesh=mesh["dp"])
    stage = PipelineStage(stage_model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _target: output.square().mean())
    return stage_model, (lambda: schedule.step(target=data)) if number else (lambda: schedule.step(data))


@ttp.ttp_to_persist
def train(layout: str, beside: str, blocks: int, steps: int, step_ms: float, sizes: list[int]) -> None:
    """Run blocks of each kind in turns, and print the results.

    The first block of each kind is not counted. It determines the pause that makes a step ``step_ms`` long.

    Args:
        layout: layout, and ``-preimage`` for ``undo="preimage"``.
        beside: layout of a second job without ttp that takes turns (``ddp``); empty: none.
        blocks: number of blocks of each kind.
        steps: steps in a block.
        step_ms: least duration of a step.
        sizes: width, layers, batch.
    """
    kind, _, undo = layout.partition("-")
    job, plain = Job(kind, *sizes), Job(beside, *sizes) if beside else None
    ttp.wrap_optimizer(job.optimizer, model=job.model, save_dir=os.environ["BENCH_SAVE_DIR"], undo=undo or None)
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    barrier = None
    if needs_barrier(processor.layout, undo or None):
        barrier = UpdateBarrier(dist.get_world_size(), (), Processor(processor.page_dir))
    took: dict[str, list[float]] = {"on": [], "off": [], "barrier": [], "plain": []}
    pause_s = 0.0
    for number in range(blocks + 1):
        took["on"].append(job.block_ms(steps, pause_s))
        adapter.detach()
        took["off"].append(job.block_ms(steps, pause_s))
        if barrier is not None:
            hook = job.optimizer.register_step_pre_hook(lambda *_: barrier.wait())
            took["barrier"].append(job.block_ms(steps, pause_s))
            hook.remove()
        if plain is not None:
            took["plain"].append(plain.block_ms(steps, pause_s))
        adapter.attach(processor)
        if number == 0:
            pause = torch.tensor(max(0.0, step_ms - took["off"][0]) / 1e3)
            dist.broadcast(pause, 0)
            pause_s = float(pause)
    state = getattr(job.optimizer, "optim", job.optimizer).state
    held = sum(value.nbytes for values in state.values() for value in values.values())
    weights = sum(parameter.nbytes for parameter in job.model.parameters())
    print(json.dumps({"state": held, "weights": weights} | {k: v[1:] for k, v in took.items()}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layout, beside, blocks, steps, step_ms, *sizes = sys.argv[1:]
    train(layout, beside, int(blocks), int(steps), float(step_ms), list(map(int, sizes)))
    dist.barrier()
    dist.destroy_process_group()
