"""Second copies on another host (``buddy=True``): step time, wait of an update for a copy, duration of a copy."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from benchmarks.copy_receiver import take
from benchmarks.result import Result, median_of, time_us
from benchmarks.world import protected, scratch
from ttp import session
from ttp.api import wrap_optimizer
from ttp.core.copy_messages import CopyTo
from ttp.core.layout import Rank
from ttp.core.rank.events import CopyMade
from ttp.processor.copies.copier import Copying

STEP_S = 0.05
EVERY = 10
"""Updates from one copy to the next (k, ``TTP_BUDDY_EVERY``)."""
ROUNDS = 4
"""Number of copies in a block with copies on; a block with copies off has the same number of steps."""


def run(quick: bool) -> list[Result]:
    """Measure one training rank, with a process that receives its copies; blocks with copies on and off alternate."""
    with scratch() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        ours, theirs = multiprocessing.Pipe()
        buddy = multiprocessing.get_context("spawn").Process(target=take, args=(theirs, memory), daemon=True)
        buddy.start()
        with protected(directory, TTP_BUDDY_EVERY=str(EVERY)) as save_dir:
            try:
                address = f"127.0.0.1:{ours.recv()}"
                results = []
                for megabytes in (16,) if quick else (16, 128):
                    results += _measure(save_dir, address, megabytes, *((1, 1) if quick else (8, ROUNDS)))
                return results
            finally:
                buddy.kill()


def _measure(save_dir: str, address: str, megabytes: int, blocks: int, rounds: int) -> list[Result]:
    """Measure with weights and two moments of ``megabytes`` in all. A step takes 50 ms, mostly in matrix products."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(max(1, round(megabytes / 12.6)))))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    wrap_optimizer(optimizer, model=model, save_dir=save_dir, buddy=True)
    current = session.current()
    assert current.processor is not None and current.processor.copying is not None
    copying = current.processor.copying
    copying.named(CopyTo(Rank(0), 1, Rank(1), address))
    arrived = _watch(copying)
    on, off = _steps(copying, optimizer, blocks, rounds)
    waited = copying.waited_s / max(1, len(arrived)) * 1e3
    current.left()
    session.reset()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) * 3 / 1e6
    how = f"{size:.0f} MB of state, k = {EVERY}, {len(arrived)} copies; off: {statistics.mean(off) * 1e3:.1f} ms a step"
    value, p90 = median_of(arrived or [float("nan")])
    return [
        Result(f"step time, buddy on / off, {size:.0f} MB", statistics.mean(on) / statistics.mean(off), "x", None, how),
        Result("wait of an update for a copy", waited, "ms", None, "mean per copy, before the next update"),
        Result("a copy, until it is whole on the other host", value, "ms", None, "from the end of its update", p90),
    ]


def _watch(copying: Copying) -> list[float]:
    """Return a list, to which the milliseconds from the begin of each copy until it is whole will be appended."""
    arrived: list[float] = []
    watched: Any = copying
    tell, updated = watched._tell, watched.updated
    began = [0.0]

    def turn(version: int) -> None:
        if version % copying.every == 0 and copying._copies.pending is None:
            began[0] = time.perf_counter()
        updated(version)

    def told(event: object) -> None:
        if isinstance(event, CopyMade) and event.stored:
            arrived.append((time.perf_counter() - began[0]) * 1e3)
        tell(event)

    watched._tell, watched.updated = told, turn
    return arrived


def _steps(
    copying: Copying, optimizer: torch.optim.Optimizer, blocks: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of every step with copies on, and with copies off."""
    on: list[float] = []
    off: list[float] = []
    square = torch.randn(512, 512)
    loops = max(1, round(STEP_S * 1e6 / statistics.median(time_us(lambda: torch.mm(square, square), 50))))
    for _ in range(blocks):
        for taken, every in ((on, EVERY), (off, 1 << 60)):
            copying.every = every
            for _ in range(rounds * EVERY):
                began = time.perf_counter()
                for _ in range(loops):
                    torch.mm(square, square)
                optimizer.step()
                taken.append(time.perf_counter() - began)
    return on, off
