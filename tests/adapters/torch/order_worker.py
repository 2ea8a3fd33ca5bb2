"""Two ranks: rank 0 stops in its provisional capture, and rank 1 tries to get past its backward pass meanwhile."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.loop.hooks import Attachment, gradient_triggers
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.processor.gate.gate import Gate

HOLD_S = 0.3  # the other rank has that long to do the wrong thing; the right outcome does not depend on it
STEPS = 3
CASES = ["plain", "unused", "static", "accumulate", "nosync"]


class Model(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.unused = unused

    def forward(self, x: Any) -> Any:
        return self.layers(x if self.unused else self.spare(x))


class Holder:
    """Rank 0's capture, which sleeps in the last capture before the gradients' reduction can be complete."""

    def __init__(self, directory: Path, *, holds: bool) -> None:
        self.directory, self.holds = directory, holds
        self.last_batch = False
        self.held: list[int] = []

    def capture(self, version: int, final: bool, alone: bool = False) -> None:
        if self.holds and not final and version not in self.held and self.last_batch:
            self.held.append(version)
            time.sleep(HOLD_S)
            marker(self.directory, version).touch()

    def look_again(self, version: int) -> None:
        pass


class Reporter(Gate):
    """A gate with everything else that hooks report to a processor."""

    mark = 0
    activity = ""


def marker(directory: Path, version: int) -> Path:
    """Return the file that shows that rank 0 has captured."""
    return directory / f"captured-{version}"


def run(directory: Path, case: str, capture: Holder) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        Model(case == "unused"),
        bucket_cap_mb=0.001,
        find_unused_parameters=case == "unused",
        static_graph=case == "static",
    )
    assert len(gradient_triggers(ddp, [ddp])) == (8 if case in ("unused", "static") else 1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gate = Reporter()
    Attachment(
        [[optimizer]],
        ddp,
        gate,
        capture,
        post_step=PostStepState([optimizer]),
        fence=Fence(()),
        version=lambda: gate.version,
    )
    finished_early: list[bool] = []
    marks: list[int] = []
    for version in range(1, STEPS + 1):
        optimizer.zero_grad()
        batches = 2 if case in ("accumulate", "nosync") else 1
        for batch in range(batches):
            capture.last_batch = batch == batches - 1
            skip_reduction = case == "nosync" and not capture.last_batch
            with ddp.no_sync() if skip_reduction else contextlib.nullcontext():
                ddp(torch.randn(4, 8)).sum().backward()
        finished_early.append(not marker(directory, version).exists())
        marks.append(gate.mark)
        optimizer.step()
    return {
        "held": list(capture.held),
        "marks": marks,
        "early": sum(finished_early),
    }


def everything(directory: Path, rank: int) -> dict[str, Any]:
    """Return what this rank has seen, by case."""
    seen = {}
    for case in CASES:
        (directory / case).mkdir(exist_ok=True)
        dist.barrier()
        seen[case] = run(directory / case, case, Holder(directory / case, holds=rank == 0))
    return seen
