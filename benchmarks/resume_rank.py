"""A rank of ``benchmarks.resume``: trains until ``RESUME_DIR/over`` exists, and notes when it reaches which point.

Usage: resume_rank.py MEGABYTES LAYOUT; the layout is ddp, compiled or hsdp. If RESUME_READ is set, no rank keeps its
state; if RESUME_ONE_STEP is set, no rank leaves its loop. The notes are lines ``LAUNCH WORD SECONDS`` in ``rank<n>``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

DIRECTORY, RANK = Path(os.environ["RESUME_DIR"]), int(os.environ["RANK"])


def note(word: str) -> None:
    """Append the launch, ``word`` and the time on the machine's monotonic clock to this rank's file."""
    with (DIRECTORY / f"rank{RANK}").open("a") as log:
        log.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {word} {time.monotonic()}\n")


note("began")
(DIRECTORY / f"pid{RANK}").write_text(str(os.getpid()))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import ttp  # noqa: E402

MOMENTS = 3
"""Tensors in a checkpoint per weight: the weight and AdamW's two moments."""


def build(megabytes: float, layout: str) -> torch.nn.Module:
    """Return a model whose checkpoint (weights and AdamW's moments) has ``megabytes``."""
    width = max(8, int((megabytes * 1e6 / 4 / MOMENTS / 2) ** 0.5))
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model
    if layout == "compiled":
        compiled: Any = torch.compile(model)
        return torch.nn.parallel.DistributedDataParallel(compiled)
    return torch.nn.parallel.DistributedDataParallel(model)


def keep_nothing() -> None:
    """Make this rank read the checkpoint, as if its state were of a kind that cannot be kept."""
    from ttp.adapters.torch.restoring.kept import UnlikeError
    from ttp.adapters.torch.source import TorchSource

    mock.patch.object(TorchSource, "keep", side_effect=UnlikeError("as wished")).start()


@ttp.ttp_to_persist
def train(megabytes: float, layout: str) -> None:
    """Train in steps of about 20 ms, longer with a large model."""
    model = build(megabytes, layout)
    optimizer = torch.optim.AdamW(model.parameters())
    ttp.wrap_optimizer(optimizer, model=model, save_dir=DIRECTORY / "checkpoints")
    note("wrapped")
    ttp.restore()
    note("restored")
    width = next(model.parameters()).shape[-1]

    def update() -> None:
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if "RESUME_ONE_STEP" in os.environ:
        update = ttp.one_step(update)
    while not (DIRECTORY / "over").exists():
        update()
        note("step")
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RESUME_READ" in os.environ:
        keep_nothing()
    dist.init_process_group("gloo")
    note("grouped")
    train(float(sys.argv[1]), sys.argv[2])
    os._exit(0)  # without teardown, as the ranks may see ``over`` at different steps
