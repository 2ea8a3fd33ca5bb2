"""The ranks of test_zero_sharding.py: ZeRO-1 saved from any copy, restored into any world.

Every checkpoint is compared element by element with a plain data-parallel training that made the same steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from tests.adapters.torch.stub_processor import StubProcessor, join, registered, save_together
from tests.adapters.torch.zero_worlds import Groups, Model, Training, plain, replicated
from tests.waiting import until
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import ConfigError

STEPS = 4
PATIENCE_S = 60.0
Make = Callable[[Groups], Any]


def given(make: Make) -> Make:
    """Give the optimizer the trained parameters only, as when a part of a model is tuned."""
    return lambda groups: make([{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups])


def torch_zero(groups: Groups) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups, AdamW, lr=1e-2, betas=(0.9, 0.999))


class Job:
    """A rank under a stub processor."""

    def __init__(self, directory: Path, make: Make, undo: str | None = None, mixed: bool = True) -> None:
        self.training, self.rank, self.directory = Training(given(make), mixed), dist.get_rank(), directory
        self.adapter = registered(
            self.training.ddp, self.training.optimizer, scheduler=self.training.scheduler, undo=undo
        )
        self.layout = self.adapter.layout(dist.get_world_size())
        self.processor = StubProcessor(directory, rank=self.rank, layout=self.layout)
        join(self.adapter, self.processor, directory / "pages", self.rank)

    def save(self, version: int, savers: dict[str, int], how: How = How.AS_IS) -> str:
        """Freeze, write the shards of which this rank is the saver, commit; return the path of the checkpoint."""
        shards = (Shard(shard) for shard, rank in savers.items() if rank == self.rank)
        path = save_together(self.adapter, self.processor, version, shards, how, pages=(Rank(self.rank),))
        self.processor.gate.open()
        return str(path)

    def restored(self, path: str) -> Job:
        self.adapter.load(Path(path), self.rank, dist.get_world_size(), protected=True)
        return self


def facts(training: Training) -> dict[str, Any]:
    """Return all state of a version, by name."""
    optimizer = getattr(training.optimizer, "optim", training.optimizer)
    names = {id(p): name for name, p in training.model.named_parameters()}
    return {
        "weights": {name: p.detach().clone() for name, p in training.model.state_dict().items()},
        "moments": {names[id(p)]: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in training.optimizer.param_groups],
        "schedule": training.scheduler.last_epoch,
    }


def differences(training: Training, expected: dict[str, Any]) -> list[str]:
    """Return the names of state that differs from ``expected``; of moments only those that this rank has."""
    mine = facts(training)
    found = [f"weight {name}" for name, w in expected["weights"].items() if not torch.equal(w, mine["weights"][name])]
    for name, state in mine["moments"].items():
        other = expected["moments"][name]
        found += [f"{name}.{key}" for key in other.keys() | state.keys() if not _equal(state.get(key), other.get(key))]
    found += [key for key in ("groups", "schedule") if mine[key] != expected[key]]
    optimizer = getattr(training.optimizer, "inner", getattr(training.optimizer, "optim", training.optimizer))
    own = {p for g in optimizer.param_groups for p in g["params"]}
    return found + ([] if own == set(optimizer.state) else ["not the state of its own parameters"])


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def reference(steps: int, mixed: bool = True) -> dict[str, Any]:
    """Return the state of a plain data-parallel training after so many steps."""
    training = Training(given(plain), mixed)
    training.step(steps)
    return facts(training)


def spoil(job: Job) -> None:
    """Leave the state of a torn exchange: parameters that other ranks update are garbage here."""
    optimizer = job.training.optimizer
    for parameter in optimizer.param_groups[0]["params"] + optimizer.param_groups[1]["params"]:
        if not optimizer.holds(parameter):
            parameter.detach().fill_(float("nan"))


# -------------------------------------------------------------------------------------------------------------- saves


def save_replicated(directory: Path) -> dict[str, Any]:
    """Save from copies in different columns after a torn exchange; the checkpoint is kept for other worlds."""
    expected = reference(STEPS)
    job = Job(directory / "replicated", replicated(2))
    job.training.step(STEPS)
    spoil(job)
    source: Any = job.adapter.source
    looks, bad = source.inspect(Version(STEPS))
    path = job.save(STEPS, {"model-0": 2, "model-1": 1, "common": 3})
    if job.rank == 0:
        torch.save({"path": path, "expected": expected}, directory / "replicated.pt")
    fresh = Job(directory / "fresh", replicated(2)).restored(path)
    return {
        "groups": {shard: list(ranks) for shard, ranks in job.layout.groups.items()},
        "differences": differences(fresh.training, expected),
        "looks": {look.shard: look.digest for look in looks},
        "bad": list(bad),
        "writes": {
            shard: sorted(source.sharding.parameters_of(shard)) for shard in job.layout.shards_of(Rank(job.rank))
        },
        "files": sorted(file.name for file in Path(path).glob("*.distcp")),
    }


def save_plain(directory: Path) -> dict[str, Any]:
    expected = reference(STEPS)
    job = Job(directory / "plain", plain)
    job.training.step(STEPS)
    path = job.save(STEPS, {"model": 1})
    if job.rank == 0:
        torch.save({"path": path, "expected": expected}, directory / "plain.pt")
    return {"differences": differences(Job(directory / "fresh plain", replicated(2)).restored(path).training, expected)}


def save_torch_zero(directory: Path) -> dict[str, Any]:
    """Every shard has one copy, which is logged once. The job is saved while all ranks live."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ttp.adapters.torch").addHandler(handler)
    expected = reference(STEPS, mixed=False)
    job = Job(directory / "zero", torch_zero, mixed=False)
    logging.getLogger("ttp.adapters.torch").removeHandler(handler)
    job.training.step(STEPS)
    path = job.save(STEPS, {"common": 0, **{f"model-{rank}": rank for rank in range(4)}})
    if job.rank == 0:
        torch.save({"path": path, "expected": expected}, directory / "zero.pt")
    found = [
        differences(Job(directory / f"zero {number}", make, mixed=False).restored(path).training, expected)
        for number, make in enumerate((torch_zero, replicated(2), plain))
    ]
    groups = {shard: list(ranks) for shard, ranks in job.layout.groups.items()}
    return {"groups": groups, "differences": found, "said": said}


def undone(directory: Path) -> dict[str, Any]:
    """Save the version before the last update, from the copy of the own partition."""
    steps = 7  # what follows the frozen weights is known by then
    expected = reference(steps - 1)
    job = Job(directory / "undo", replicated(2), undo="preimage")
    job.training.step(steps)
    spoil(job)
    preimage: Any = job.adapter.source.preimage
    held = {id(p) for p in job.training.optimizer.parameters_of(job.training.optimizer.shard)}
    held |= set(map(id, job.training.model.frozen.parameters()))  # they are small, and a loop may move them
    path = job.save(steps - 1, {"model-0": 0, "model-1": 3, "common": 2}, How.UNDO)
    fresh = Job(directory / "fresh undo", replicated(2)).restored(path)
    return {
        "differences": differences(fresh.training, expected),
        "kept": set(preimage.image(steps - 1).copies) == held,
        "ready": job.adapter.source.has_preimage,
    }


def redone(directory: Path) -> dict[str, Any]:
    """All ranks wait at the gate. Ranks 0 and 1 make the update on request, with no exchange before their release."""
    expected = reference(STEPS)
    job = Job(directory / "redo", replicated(2))
    job.training.step(STEPS - 1)
    gate, entered = job.processor.gate, threading.Event()
    job.training.optimizer.inner.register_step_post_hook(lambda *_: entered.set())
    gate.close()
    thread = threading.Thread(target=job.training.step)
    thread.start()
    until(lambda: gate.state().parked)
    seen: dict[str, Any] = {"ready": job.adapter.source.gradient_ready()}
    if job.rank in (0, 1):
        seen["admitted"] = gate.admit()
        until(lambda: gate.version == STEPS)
    draft_group = dist.new_group(range(dist.get_world_size()))
    dist.barrier(draft_group)
    seen |= {"version": gate.version, "entered": entered.is_set(), "settled": job.adapter.source.post_step_done()}
    gate.open()
    thread.join(PATIENCE_S)
    return {**seen, "left": entered.is_set(), "differences": differences(job.training, expected)}


def refused(directory: Path) -> dict[str, Any]:
    """An optimizer shards within half of the ranks. That is right if gradients are reduced over all ranks."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    half = replicated(1, process_group=mine)
    per_host = Job(directory / "hosts", half)
    model = Model()  # without a DistributedDataParallel
    optimizer = given(half)(model.groups())
    seen = {"hosts": {shard: list(ranks) for shard, ranks in per_host.layout.groups.items()}}
    cases: dict[str, Callable[[], Any]] = {
        "unconnected": lambda: registered(model, optimizer).layout(4),
        "layout": lambda: registered(model, optimizer, layout=Layout.data_parallel(4)).layout(4),
        "world": lambda: registered(model, optimizer).layout(8),
    }
    for name, attempt in cases.items():
        try:
            attempt()
        except ConfigError as problem:
            seen[name] = str(problem)  # type: ignore[assignment]
    return seen


# ------------------------------------------------------------------------------------------------------- other worlds


def restore(directory: Path, source: str, make: Make, mixed: bool = True) -> dict[str, Any]:
    saved = torch.load(directory / f"{source}.pt")
    job = Job(directory / f"{source} again", make, mixed=mixed).restored(saved["path"])
    found = differences(job.training, saved["expected"])
    return {"differences": found, "moments": sorted(facts(job.training)["moments"])}


def worlds(directory: Path) -> dict[int, dict[str, Callable[[], dict[str, Any]]]]:
    """Return the cases of each world. The one of four ranks saves."""
    saves = {
        "replicated": save_replicated,
        "plain": save_plain,
        "torch": save_torch_zero,
        "undone": undone,
        "redone": redone,
        "refused": refused,
    }
    return {
        4: {name: partial(case, directory) for name, case in saves.items()},
        3: {
            "replicated": partial(restore, directory, "replicated", replicated(1)),
            "plain": partial(restore, directory, "plain", replicated(1)),
        },
        2: {
            "replicated": partial(restore, directory, "replicated", replicated(1)),
            "torch": partial(restore, directory, "zero", torch_zero, mixed=False),
            "to plain": partial(restore, directory, "replicated", plain),
            "one shard": partial(restore, directory, "replicated", replicated(2)),
        },
    }


def everything(directory: Path, _rank: int) -> dict[str, Any]:
    return {name: case() for name, case in worlds(directory)[dist.get_world_size()].items()}
