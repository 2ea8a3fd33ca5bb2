"""One rank of a small DistributedDataParallel job that can save, stop, and be resumed; run by test_ddp_buckets.py.

``JOB`` is a JSON object, see ``Job``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch.checkpoints import digest, write_checkpoint
from ttp.adapters.torch.restoring import restore
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.sharding import data_parallel
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.store.manifest import Manifest

Watch = data_parallel.LayoutWatch


@dataclass
class Job:
    steps: int
    bucket_cap_mb: float | None = None
    widths: tuple[int, ...] = (20, 64, 64, 64, 10)
    accumulate: int = 1
    static_graph: bool = False
    save_at: tuple[int, ...] = ()
    save_to: str = ""
    load: str = ""
    forget_layout: bool = False
    frozen: bool = False
    hang_at: int = 0


class Model(nn.Module):
    """A model whose layers run in another order than defined, so the rebuilt buckets are no simple reversal."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.first = nn.Linear(widths[0], widths[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(job: Job, rank: int) -> dict[str, object]:
    torch.manual_seed(7)
    model = DistributedDataParallel(
        Model(tuple(job.widths)),
        bucket_cap_mb=job.bucket_cap_mb,
        static_graph=job.static_graph,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    registered: Any = model.module if job.load else model  # either will do, and the other one when it is resumed
    names, start = ModelNames(registered, optimizer), 0
    watch = data_parallel.LayoutWatch(data_parallel.ddps_of(registered), names)
    notes: list[str] = []
    if job.load:
        if job.forget_layout:
            vars(data_parallel)["apply_bucket_layout"] = lambda *_: "forgotten"
        model.requires_grad_(not job.frozen)
        manifest = Manifest.load(Path(job.load))
        restored, notes = restore.restore_into(Path(job.load), manifest, model=registered, optimizer=optimizer)
        start = restored.version
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        assert len(frozen) == (len(list(model.parameters())) if job.frozen else 0), "restoring leaves it as it is"
        model.requires_grad_(True)
    layouts, previous = [watch.layout], []
    for step in range(start, job.steps):
        if step and step == job.hang_at:
            hang(rank, partial(save, job, step, names, optimizer, watch), model)
        for micro in range(job.accumulate):
            data = torch.Generator().manual_seed(step * 1000 + micro * 100 + rank)
            x = torch.randn(16, job.widths[0], generator=data)
            last = micro == job.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.update_finished()
        layouts.append(watch.layout)
        previous.append(watch.previous)
        if rank == 0 and step + 1 in job.save_at:
            thread = threading.Thread(target=save, args=(job, step + 1, names, optimizer, watch))
            thread.start()
            thread.join()
    shown = cast("Any", model)._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return {
        "digest": digest(registered.state_dict(), optimizer),
        "layouts": layouts,
        "previous": previous,
        "shown": shown,
        "notes": notes,
    }


def hang(rank: int, save: Callable[[], None], model: DistributedDataParallel) -> None:
    """Rank 1 stops for ever. Rank 0 saves on a thread as soon as its main thread waits for rank 1 in the all-reduce."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    waiting = threading.Event()

    def work() -> None:
        waiting.wait()
        save()
        os._exit(0)

    if rank == 0:
        missing: set[torch.Tensor] = {*model.parameters()}

        def ready(parameter: torch.Tensor) -> None:
            missing.discard(parameter)
            if not missing:
                waiting.set()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(ready)
        threading.Thread(target=work).start()


def save(job: Job, version: int, names: ModelNames, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
    """Save as the processor's thread does."""
    state = JobState(version=version, ddp_buckets=watch.layout)
    write_checkpoint(Path(job.save_to) / str(version), names, optimizer, state)


def run(_directory: Path, rank: int) -> dict[str, object]:
    return train(Job(**json.loads(os.environ["JOB"])), rank)
