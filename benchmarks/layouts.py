"""Step time with ttp on and off in every layout, as ratios within one run of four ranks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.result import Result
from benchmarks.world import controller, free_port, scratch

LAYOUTS = {"ddp": "DDP", "hsdp": "HSDP 2x2", "replicated": "ReplicatedOptimizer, 2 copies"}
RANKS = 4
BUDGET = 1.005
"""For a step of 10 ms; these are shorter or longer, as the machine has it."""


def run(quick: bool) -> list[Result]:
    """Each layout in a job of its own, with a real controller."""
    blocks, steps = (3, 10) if quick else (15, 40)
    return [_measure(layout, title, blocks, steps) for layout, title in LAYOUTS.items()]


def _measure(layout: str, title: str, blocks: int, steps: int) -> Result:
    with scratch() as directory:
        (directory / "run").mkdir()
        with controller(directory / "run") as (port, _, _):
            found = json.loads(_train(directory, port, layout, blocks, steps))
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    how = f"{blocks} blocks of {steps} steps by turns, {RANKS} ranks; off: {statistics.median(found['off']):.2f} ms"
    return Result(f"step time, ttp on / off, {title}", statistics.median(ratios), "x", BUDGET, how)


def _train(directory: Path, port: int, layout: str, blocks: int, steps: int) -> str:
    """What rank 0 printed."""
    command = [sys.executable, "-m", "benchmarks.layout_rank", layout, str(blocks), str(steps)]
    common = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TTP_PORT": str(port),
        "TTP_RUN_DIR": str(directory / "run"),
        "TTP_LOG": "ERROR",
        "BENCH_SAVE_DIR": str(directory / "checkpoints"),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{layout}: ranks ended with {[rank.returncode for rank in ranks]}")
    return said[0].strip().splitlines()[-1]
