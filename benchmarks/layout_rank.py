"""A rank of a small training in one layout, with ttp's hooks on and off by turns. Started by ``benchmarks.layouts``.

Rank 0 prints JSON: milliseconds per step of every block, on and off.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.replicated_optimizer import ReplicatedOptimizer

WIDTH, BATCH = 512, 32


def make(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model over four ranks, and AdamW for it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for layer in list(model.children()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())
    model = DistributedDataParallel(model)
    if layout == "replicated":
        return model, ReplicatedOptimizer(model.parameters(), torch.optim.AdamW)
    return model, torch.optim.AdamW(model.parameters())


def block_ms(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, steps: int) -> float:
    """Milliseconds per step of one block, all ranks together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return (time.perf_counter() - begin) / steps * 1e3


@ttp.ttp_to_persist
def train(layout: str, blocks: int, steps: int) -> None:
    """Blocks by turns, after one of each that is not counted."""
    model, optimizer = make(layout)
    optimizer = ttp.wrap_optimizer(optimizer, model=model, save_dir=os.environ["BENCH_SAVE_DIR"])
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    data = torch.randn(BATCH, WIDTH)
    on, off = [], []
    for _ in range(blocks + 1):
        on.append(block_ms(model, optimizer, data, steps))
        adapter.detach()
        off.append(block_ms(model, optimizer, data, steps))
        adapter.attach(processor)
    if dist.get_rank() == 0:
        print(json.dumps({"on": on[1:], "off": off[1:]}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    dist.barrier()
    dist.destroy_process_group()
