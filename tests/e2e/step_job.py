"""The job of ``job.py`` with other kinds of updates, each made by one function with the decorator ``ttp.one_step``.

``JOB_KIND``: plain, unused (a branch that some batches do not take), two (DistributedDataParallel modules, the second
of which is used in every fourth iteration), static (``static_graph``), late (the DistributedDataParallel is made after
``ttp.restore()``), hook (gradients are rounded by a communication hook), compiled, bare (no wrapper: the program
averages gradients itself), or scaler (a GradScaler; iteration ``JOB_OVERFLOW`` overflows). ``JOB_OUTSIDE``: model and
optimizer are made before train(). ``JOB_LEAVE``: the function is not decorated. Iterations are counted in
``extra_state``: one that the scaler skips makes no version. The faults are those of ``job.py``, and ``micro0`` to
``micro3``: before that micro-batch, of which all but the last are under ``no_sync()``.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp.chaos.job import Losses, Schedule, TwoHalves, Watched

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e.job import (
    JOB_DIR,
    RANK,
    STEPS,
    WORLD,
    batch,
    build,
    finish,
    injector,
    make_schedule,
    note,
)

KIND = os.environ["JOB_KIND"]
OVERFLOW = int(os.environ.get("JOB_OVERFLOW", "-1"))
MICRO = 1 if KIND == "static" else 4
BARE = ("late", "two", "bare")
OPTIONS: dict[str, dict[str, Any]] = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


class Branches(nn.Module):
    """A model whose data choose the branch for each batch, so that ranks leave different parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = build()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.branches[int(x.sum() > 0)](self.trunk(x))


class Two(nn.Module):
    """Two models; the second one has no gradients in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = map(DistributedDataParallel, (build(), nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Any:
        found = self.first(x)
        return self.second(found) if injector.step % 4 == 0 and injector.step else found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.first.no_sync(), self.second.no_sync():
            yield


def make() -> tuple[Any, Any, Any]:
    """Return the model as it is called, the model as it was made, and its optimizer."""
    plain = {"unused": Branches, "two": Two}.get(KIND, build)()
    inner: Any = plain
    if KIND == "compiled":  # what hurts this process is no part of a graph
        compiler, watched = cast("Any", torch.compiler), cast("Any", Watched)
        watched.forward = compiler.disable(watched.forward)
        inner = torch.compile(plain, backend="aot_eager")
    model: Any = plain if KIND in BARE else DistributedDataParallel(inner, **OPTIONS.get(KIND, {}))
    if KIND == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model, plain, TwoHalves(plain.parameters(), lr=1e-2)


@ttp.ttp_to_persist
def train(made: tuple[Any, Any, Any] | None) -> None:
    model, plain, optimizer = made or make()
    scheduler = make_schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3, enabled=KIND == "scaler")
    losses = Losses()
    torch.manual_seed(100 + RANK)
    random.seed(200 + RANK)
    np.random.seed(300 + RANK)
    ttp.wrap_optimizer(
        optimizer,
        model=model,
        scheduler=scheduler,
        scaler=scaler if KIND == "scaler" else None,
        save_dir=JOB_DIR / "checkpoints",
        extra_state=losses,
    )
    note("start", ttp.restore())
    if KIND == "late":
        model = DistributedDataParallel(plain)
    Schedule.here = injector
    start = len(losses.values)
    batches = (batch(step, micro) for step in range(start, STEPS) for micro in range(MICRO))
    for step in range(start, STEPS):
        injector.step = step
        injector.at("data")
        update(model, optimizer, scheduler, scaler, losses, step, batches)
    finish(SimpleNamespace(module=plain), optimizer, scheduler, losses)


def update(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    losses: Losses,
    step: int,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> None:
    optimizer.zero_grad()
    total = 0.0
    for micro in range(MICRO):
        data, target = next(batches)
        injector.at(f"micro{micro}")
        last = micro == MICRO - 1
        with contextlib.nullcontext() if last or KIND == "bare" else model.no_sync():
            loss = cross_entropy(model(data + 0.01 * random.random()), target) / MICRO
            total += float(loss.detach())
            if last:
                injector.at("loss")
                losses.values.append(total)  # before the gradients leave this rank: it may die right after
            scaler.scale(loss * 1e36 if step == OVERFLOW and RANK == 0 else loss).backward()
    for parameter in model.parameters() if KIND == "bare" else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    injector.at("allreduced")
    scaler.step(optimizer)
    scaler.update()
    injector.at("stepped")
    note("version", step + 1)
    scheduler.step()
    injector.at("scheduled")


if "JOB_LEAVE" not in os.environ:
    update = ttp.one_step(update)


def main() -> None:
    """Run the job on this rank. Without a launcher ranks meet at ``JOB_STORE``."""
    dist.init_process_group("gloo", init_method=os.environ.get("JOB_STORE"), rank=RANK, world_size=WORLD)
    train(make() if "JOB_OUTSIDE" in os.environ else None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
