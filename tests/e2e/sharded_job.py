"""The job of ``job.py`` with its model cut in other ways, on four ranks.

``JOB_KIND`` is hsdp, fsdp, tp, pp, or, for the optimizer's state, replicated or zero. The faults are those of
``job.py``, with three more phases: ``barrier``: this rank has entered the barrier before the update and may or may not
have released others from it; ``passed``: it has left the barrier; ``halfway``: see ``Halfway``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp.adapters.torch import ReplicatedOptimizer
from ttp.adapters.torch.loop import barrier
from ttp.chaos.job import Losses, Schedule, TwoHalves, Watched

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e.job import (
    FAULTS,
    JOB_DIR,
    RANK,
    STEPS,
    WORLD,
    digest,
    injector,
    make_schedule,
    note,
    send_all,
)
from tests.halfway import Halfway, watched_meeting

KIND = os.environ["JOB_KIND"]
Step = Any
"""From a step's number to its loss; its gradients are reduced then."""


class Here(Halfway):
    """A fault of this job that divides its ranks in the running step."""

    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__(RANK, WORLD, fault["ranks"], fault["out"], broken=fault["broken"])
        self._id = fault["id"]

    @classmethod
    def now(cls) -> Here | None:
        """Return the fault for the running step of this rank; None: there is none."""
        for fault in FAULTS:
            here = (fault["phase"], fault["step"]) == ("halfway", injector.step)
            if here and not marked(fault["id"], fault["ranks"]):
                return cls(fault)
        return None

    def mark(self, what: str) -> None:
        mark(f"{what}{injector.step}")

    def marked(self, what: str, ranks: Iterable[int]) -> bool:
        return marked(self._id if what == "dying" else f"{what}{injector.step}", ranks)

    def die(self) -> None:
        injector.at("halfway")


def marked(name: str, ranks: Iterable[int]) -> bool:
    return all((JOB_DIR / "done" / f"{name}.{rank}").exists() for rank in ranks)


def mark(name: str) -> None:
    marker = JOB_DIR / "done" / f"{name}.{RANK}"
    marker.parent.mkdir(exist_ok=True)
    marker.touch()


class Whole(nn.Module):
    """A model with odd sizes, so that its shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.ModuleDict(
            {
                "lower": nn.Linear(16, 33),
                "norm": nn.BatchNorm1d(33),
                "fault": Watched(injector),
                "drop": nn.Dropout(0.2),
            }
        )
        self.back = nn.ModuleDict(
            {"fault": Watched(injector), "up": nn.Linear(33, 34), "drop": nn.Dropout(0.2), "head": nn.Linear(34, 5)}
        )

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "front"):
            x = self.front["drop"](self.front["fault"](self.front["norm"](self.front["lower"](x)).relu()))
        if hasattr(self, "back"):
            x = self.back["head"](self.back["drop"](self.back["up"](self.back["fault"](x)).relu()))
        return x


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def fsdp(model: Whole) -> Any:
    from torch.distributed.fsdp import fully_shard

    shape, names = ((4,), ("shard",)) if KIND == "fsdp" else ((2, 2), ("copies", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model.front["lower"], model.back["up"]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Whole) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"back.up": ColwiseParallel(), "back.head": RowwiseParallel()})
    return replicate(model, mesh=mesh["dp"])


def stepper(model: nn.Module) -> Step:
    """Return a function that makes a step. Ranks of one tensor-parallel group see the same data."""
    number = RANK // 2 if KIND == "tp" else RANK

    def step(n: int) -> Tensor:
        data, target = batch(n, number)
        loss = cross_entropy(model(data + 0.01 * random.random()), target)
        injector.at("loss")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def pipeline(model: Whole) -> tuple[nn.Module, Step]:
    """Make two stages with two replicas each: ranks 0 and 1 have the first stage, 2 and 3 the second."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    delattr(model, ("back", "front")[number])
    stage_model: Any = replicate(model, mesh=mesh["dp"])
    stage = PipelineStage(stage_model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=cross_entropy)

    def step(n: int) -> Tensor:
        data, target = batch(n, mesh["dp"].get_local_rank())
        injector.at("loss")
        if number == 0:
            schedule.step(data + 0.01 * random.random())
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return stage_model, step


def build() -> tuple[nn.Module, Step]:
    """Build the sharded model."""
    torch.manual_seed(1)
    whole = Whole()
    if KIND == "pp":
        return pipeline(whole)
    ddp = DistributedDataParallel
    cut: dict[str, Any] = {"tp": tensor_parallel, "replicated": ddp, "zero": ddp}
    model = cut.get(KIND, fsdp)(whole)
    return model, stepper(model)


def make_optimizer(model: nn.Module) -> tuple[Any, Any]:
    """Return the optimizer that the loop calls, and the one that makes the update."""
    if KIND == "replicated":
        replicated = ReplicatedOptimizer(model.parameters(), TwoHalves, lr=1e-2)
        replicated.inner.register_step_post_hook(lambda *_: injector.at("gather"))
        return replicated, replicated.inner
    if KIND == "zero":
        sharded: Any = ZeroRedundancyOptimizer(model.parameters(), TwoHalves, lr=1e-2)
        return sharded, sharded.optim
    sharded = KIND in ("hsdp", "fsdp")
    optimizer = TwoHalves(model.parameters(), lr=1e-2, fused=sharded)  # else DTensor plans each of its operations
    return optimizer, optimizer


@ttp.ttp_to_persist
def train() -> None:
    model, step = build()
    optimizer, inner = make_optimizer(model)
    scheduler = make_schedule(optimizer)
    losses = Losses()
    seed = RANK // 2 if KIND == "tp" else RANK
    torch.manual_seed(100 + seed)
    random.seed(200 + seed)
    np.random.seed(300 + seed)
    undo = os.environ.get("JOB_UNDO")
    ttp.wrap_optimizer(
        optimizer,
        model=model,
        scheduler=scheduler,
        save_dir=JOB_DIR / "checkpoints",
        extra_state=losses,
        undo=undo,
        buddy="JOB_BUDDY" in os.environ,
    )
    inner.register_step_pre_hook(lambda *_: injector.at("passed"))  # behind those of ttp
    inner.register_step_post_hook(lambda *_: mark(f"updated{injector.step}"))  # behind those of ttp, too
    start = ttp.restore()
    note("start", start)
    Schedule.here = injector
    for n in range(start, STEPS):
        injector.step = n
        injector.at("data")
        optimizer.zero_grad()
        losses.values.append(float(n))  # before the gradients leave this rank: it may die right after
        loss = step(n)
        losses.values[-1] = float(loss)
        if KIND in ("hsdp", "fsdp"):  # one more collective between the gradient and the update
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        injector.at("allreduced")
        ways_part = Here.now() if undo else None
        if ways_part is not None:
            ways_part.without_barrier()
        optimizer.step()
        injector.at("stepped")
        note("version", n + 1)
        show_bits(n + 1, model, inner)
        scheduler.step()
        injector.at("scheduled")
        time.sleep(float(os.environ.get("JOB_STEP_S", "0")))
    finish(model, scheduler)


def memory(tensor: Any) -> bytes:
    return bytes(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes())


def show_bits(version: int, model: nn.Module, optimizer: Any) -> None:
    """Append weights, moments and random streams of this rank at a version as one line to ``bits<rank>.log``."""
    weights = (memory(p) for _, p in sorted(model.named_parameters()))
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    moments = (memory(v) for p in trained for _, v in sorted(optimizer.state.get(p, {}).items()))
    streams = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode())
    with (JOB_DIR / f"bits{RANK}.log").open("a") as log:
        log.write(f"{version} {digest(*weights)} {digest(*moments)} {digest(*streams)}\n")


def finish(model: nn.Module, scheduler: Any) -> None:
    buffers = digest(*(memory(b) for _, b in sorted(model.named_buffers())))
    result = {"buffers": buffers, "schedule": repr(scheduler.get_last_lr())}
    (JOB_DIR / f"result{RANK}.json").write_text(json.dumps(result, sort_keys=True))


def main() -> None:
    """Run the job on this rank. Exits without waiting for threads, because those of a broken job may never end."""
    if "JOB_TRANSFER" in os.environ:
        send_all()
    library: Any = barrier
    library.Meeting = watched_meeting(injector.at, Here.now)
    dist.init_process_group("gloo", init_method=os.environ.get("JOB_STORE"), rank=RANK, world_size=WORLD)
    train()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
