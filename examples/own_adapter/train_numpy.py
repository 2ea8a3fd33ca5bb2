"""Trains with ``numpy_adapter`` on several ranks; see ``CONTRIBUTING.md``, "Add an adapter in an hour"."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy_adapter import Sgd, protect

import ttp


def gradient(step: int, rank: int) -> Any:
    """Return a rank's gradient, of whole numbers: the sum over ranks has the same bits in any order."""
    return np.random.default_rng([step, rank]).integers(-8, 9, size=1000).astype(np.float64)


@ttp.ttp_to_persist
def train(save_dir: Path, steps: int, kill_at: int | None) -> None:
    """Train from the newest checkpoint to the end. In the first launch, rank 1 kills itself at step ``kill_at``."""
    rank = dist.get_rank()
    optimizer = protect(Sgd({"w": np.zeros(1000)}, rate=0.125), save_dir)
    start = ttp.restore()
    print(f"rank {rank} begins with version {start}", flush=True)
    for step in range(start, steps):
        mine = torch.from_numpy(gradient(step, rank))
        if step == kill_at and rank == 1 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(mine)
        optimizer.step({"w": mine.numpy()})
    np.save(save_dir / f"final_{rank}.npy", optimizer.weights["w"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with an adapter of our own")
    parser.add_argument("--save-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", type=int, help="rank 1 kills itself at this step")
    given = parser.parse_args()
    given.save_dir.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    train(given.save_dir, given.steps, given.kill)
    dist.barrier()
    dist.destroy_process_group()
