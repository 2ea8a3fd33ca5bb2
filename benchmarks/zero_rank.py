"""A rank that trains with one optimizer, ttp on and off, and with AdamW, by turns. Started by ``benchmarks.zero``.

Prints JSON: bytes of weights and of optimizer state on this rank, milliseconds per step of every block of each kind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ttp
from ttp import session
from ttp.adapters.torch import ReplicatedOptimizer
from ttp.adapters.torch.adapter import TorchAdapter

LAYERS, BATCH = 8, 8


class Job:
    """A model of its own, and its optimizer."""

    def __init__(self, kind: str, width: int) -> None:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.data = torch.randn(BATCH, width)
        self.optimizer: Any = make(kind, self.model)

    def block_ms(self, steps: int) -> float:
        """Milliseconds per step of one block, all ranks together."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            loss: Tensor = self.model(self.data).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return (time.perf_counter() - begin) / steps * 1e3


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """``ddp``, ``zero`` or ``replicated:COPIES``."""
    name, _, copies = kind.partition(":")
    if name == "replicated":
        return ReplicatedOptimizer(model.parameters(), AdamW, int(copies), lr=1e-4)
    return (
        ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-4)
        if name == "zero"
        else AdamW(model.parameters(), 1e-4)
    )


@ttp.ttp_to_persist
def train(kind: str, blocks: int, steps: int, width: int) -> None:
    """Blocks by turns, after one of each that is not counted."""
    plain, job = Job("ddp", width), Job(kind, width)
    ttp.wrap_optimizer(job.optimizer, model=job.model, save_dir=os.environ["BENCH_SAVE_DIR"])
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    took: dict[str, list[float]] = {"on": [], "off": [], "plain": []}
    for _ in range(blocks + 1):
        took["on"].append(job.block_ms(steps))
        adapter.detach()
        took["off"].append(job.block_ms(steps))
        took["plain"].append(plain.block_ms(steps))
        adapter.attach(processor)
    state = getattr(job.optimizer, "optim", job.optimizer).state
    held = sum(value.nbytes for values in state.values() for value in values.values())
    weights = sum(parameter.nbytes for parameter in job.model.parameters())
    print(json.dumps({"state": held, "weights": weights} | {k: v[1:] for k, v in took.items()}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(sys.argv[1], *map(int, sys.argv[2:]))
    dist.barrier()
    dist.destroy_process_group()
