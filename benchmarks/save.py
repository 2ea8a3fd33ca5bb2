"""Bytes per second of a save, against a plain sequential write with fsync of as many bytes in the same run."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.result import Result
from benchmarks.world import scratch
from ttp.adapters.torch.checkpoint import write_shard
from ttp.core.layout import REPLICATED, Rank

BLOCK = 8 << 20


def run(quick: bool) -> list[Result]:
    """Both writers take turns, so that a change of the disk's mood meets both."""
    size_mb, repeat = (50, 3) if quick else (500, 7)
    rows = size_mb * 1_000_000 // 4 // 4096 // 8
    state = {"model": nn.ModuleList(nn.Linear(4096, rows, bias=False) for _ in range(8)).state_dict()}
    ours, plain = [], []
    with scratch() as directory:
        for turn in range(repeat):
            begin = time.perf_counter()
            piece = write_shard(directory, f"shard{turn}", state, shard=REPLICATED, writer=Rank(0))
            ours.append(time.perf_counter() - begin)
            plain.append(plain_write_s(directory / f"plain{turn}", piece.size))
            for name in (f"shard{turn}", f"plain{turn}"):
                (directory / name).unlink()
    mine, base = statistics.median(ours), statistics.median(plain)
    how = f"{size_mb} MB, medians of {repeat}, taking turns; digest included"
    return [
        Result("persist / plain write + fsync", mine / base, "x", 1.2, how),
        Result("persist", size_mb / mine, "MB/s", None, f"plain: {size_mb / base:.0f} MB/s"),
    ]


def plain_write_s(path: Path, size: int) -> float:
    """Seconds to write ``size`` bytes sequentially and fsync them."""
    block = memoryview(torch.randint(0, 255, (BLOCK,), dtype=torch.uint8).numpy())
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = size
        while left > 0:
            left -= os.write(fd, block[: min(left, BLOCK)])
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - begin
