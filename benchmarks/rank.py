"""A rank that trains without collectives: AdamW on constant gradients. Started by ``benchmarks.world.ranks``."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import ttp


@ttp.ttp_to_persist
def train() -> None:
    """Train until the process is killed or released."""
    elements = int(float(os.environ["BENCH_STATE_MB"]) * 1e6 / 12)  # weights and two moments, four bytes each
    ballast = torch.ones(int(float(os.environ["BENCH_RESIDENT_GIB"]) * 2**28))
    rows = max(1, elements // 4096)
    device = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))
    model = nn.Sequential(*(nn.Linear(4096, max(1, rows // 8), bias=False, device=device) for _ in range(8)))
    fused = device.type == "cuda"  # avoids temporaries as large as the state
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = ttp.wrap_optimizer(optimizer, model=model, save_dir=os.environ["BENCH_SAVE_DIR"])
    while True:
        if optimizer.state and elements > 1_000_000:
            time.sleep(0.05)  # large updates in a row would occupy the cores that the measured processes need
        optimizer.step()
        time.sleep(0.005)
        assert ballast is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
