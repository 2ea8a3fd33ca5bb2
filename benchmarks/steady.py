"""The steady state: step time with ttp on and off, and what the adapter does around an update."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.result import Result, median_of, time_us
from benchmarks.world import controller, scratch
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.api import wrap_optimizer

STEP_S = 0.010
BLOCK_STEPS = 20


def run(quick: bool) -> list[Result]:
    """One real rank with a real controller; ttp's hooks are on and off in alternating blocks of one run."""
    with scratch() as directory:
        (directory / "run").mkdir()
        with controller(directory / "run") as (port, _, _):
            os.environ |= {
                "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "TTP_PORT": str(port), "TTP_RUN_DIR": str(directory / "run"), "TTP_LOG": "ERROR",
            }  # fmt: skip
            try:
                return measure(str(directory / "checkpoints"), 6 if quick else 60)
            finally:
                for name in [n for n in os.environ if n.startswith("TTP_")]:
                    del os.environ[name]


def measure(save_dir: str, blocks: int) -> list[Result]:
    """A model with BatchNorm and dropout, AdamW, a scheduler; each step does a fixed 10 ms of work."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    step = _fixed_work(model, optimizer, scheduler)
    wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    on, off = [], []
    for _ in range(blocks):
        on += [step() for _ in range(BLOCK_STEPS)]
        adapter.detach()
        off += [step() for _ in range(BLOCK_STEPS)]
        adapter.attach(processor)
    samples = time_us(lambda: adapter.capture.capture(processor.gate.version, True), 2_000)
    value, p90 = median_of(samples)
    size = sum(b.numel() * b.element_size() for b in model.buffers())
    current.left()
    session.reset()
    bare_ms = statistics.median(off) * 1e3
    how = f"{len(on)} steps each, blocks of {BLOCK_STEPS} taking turns, medians; off: {bare_ms:.2f} ms"
    return [
        Result("step time, ttp on / off", statistics.median(on) / statistics.median(off), "x", 1.005, how),
        Result("capture at the end of an update", value, "us", 40.0, f"random streams, {size} bytes of buffers", p90),
    ]


def _fixed_work(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> Callable[[], float]:
    """A training step of about ``STEP_S`` that always does the same work; returns its seconds."""
    data, target, square = torch.randn(64, 64), torch.randint(0, 10, (64,)), torch.randn(256, 256)
    loops = 0

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        for _ in range(loops):
            torch.mm(square, square)
        optimizer.step()
        scheduler.step()
        return time.perf_counter() - begin

    bare = statistics.median(step() for _ in range(50))
    one = statistics.median(time_us(lambda: torch.mm(square, square), 200)) / 1e6
    loops = max(0, int((STEP_S - bare) / one))
    return step
