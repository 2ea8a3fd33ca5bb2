"""A rank of ``benchmarks.peers``: the same training under each of several systems, until ``PEERS_DIR/over`` exists.

Usage: peers_rank.py SYSTEM MEGABYTES [SLOT]. The code for each system follows that system's documentation. The script
runs in the Python that has the system, so it imports only that system and torch. It appends a line
``PID STEPS SECONDS`` to the file ``slot<SLOT>`` after each step.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DIRECTORY = Path(os.environ["PEERS_DIR"])
SLOT = sys.argv[3] if len(sys.argv) > 3 else os.environ["RANK"]
EVERY = 10
"""Steps between two checkpoints, under systems that save at intervals."""
MOMENTS = 3
"""Tensors in a checkpoint per weight: the weight and AdamW's two moments."""


def build(megabytes: float) -> Any:
    """Return a model whose checkpoint (weights and AdamW's moments) has ``megabytes``."""
    width = max(8, int((megabytes * 1e6 / 4 / MOMENTS / 2) ** 0.5))
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))


def steps(first: int, model: Any, optimizer: Any, count: Callable[[], int] | None = None) -> Iterator[int]:
    """Train until the benchmark is over; after each step yield the number of steps that have been made.

    Args:
        first: number of steps already made.
        model: the wrapped model; ``model.module`` is the bare one.
        optimizer: the model's optimizer.
        count: returns the number of steps, for a system that may skip a step; None: each call is a step.
    """
    made = first
    while not (DIRECTORY / "over").exists():
        optimizer.zero_grad()
        model(torch.ones(1, model.module[0].in_features)).sum().backward()
        optimizer.step()
        made = count() if count else made + 1
        with (DIRECTORY / f"slot{SLOT}").open("a") as log:
            log.write(f"{os.getpid()} {made} {time.monotonic()}\n")
        yield made
        time.sleep(0.02)


def under_ttp(megabytes: float) -> None:
    """Train under ttp, which saves only when a rank dies."""
    import ttp

    @ttp.ttp_to_persist
    def train() -> None:
        model = DistributedDataParallel(build(megabytes))
        optimizer = torch.optim.AdamW(model.parameters())
        ttp.wrap_optimizer(optimizer, model=model, save_dir=DIRECTORY / "checkpoints")
        for _ in steps(ttp.restore(), model, optimizer):
            pass

    dist.init_process_group("gloo")
    train()


def under_a_restart(megabytes: float) -> None:
    """Train under torchrun or NVRx's launcher: all ranks restart, and load rank 0's last checkpoint."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build(megabytes))
    optimizer = torch.optim.AdamW(model.parameters())
    saved, draft, first = DIRECTORY / "saved.pt", DIRECTORY / "saved.new", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in steps(first, model, optimizer):
        if SLOT == "0" and step % EVERY == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
            draft.rename(saved)


def under_torchft(megabytes: float) -> None:
    """Train one replica under torchft: the others continue without a lost replica, which later gets their state."""
    torchft: Any = importlib.import_module("torchft")
    module = build(megabytes)
    adam = torch.optim.AdamW(module.parameters())

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"replica{SLOT}",
    )
    model, optimizer = torchft.DistributedDataParallel(manager, module), torchft.Optimizer(manager, adam)
    for _ in steps(0, model, optimizer, manager.current_step):
        pass


SYSTEMS = {"ttp": under_ttp, "restart": under_a_restart, "torchft": under_torchft}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SYSTEMS[sys.argv[1]](float(sys.argv[2]))
    os._exit(0)  # without teardown, as the ranks may see ``over`` at different steps
