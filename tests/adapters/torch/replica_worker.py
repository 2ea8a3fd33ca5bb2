"""One of two replicas under a real DistributedDataParallel and a stub processor; run by test_replicas.py.

``HOSTS`` is "one host" or "two hosts"; ranks do not share memory then.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch.stub_processor import StubProcessor, registered, two_shards
from tests.waiting import until
from ttp.core.layout import Layout, Version
from ttp.processor.faults import is_collective_error
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel import Sentinel

WORLD = 2
HOLD_S = 0.3  # the other rank has that long to do the wrong thing; the right outcome does not depend on it
PATIENCE_S = 60


class Model(nn.Module):
    """A model with statistics that differ on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Alive:
    """Shows that ranks live, as a real processor does for the ranks of its host."""

    page_dir: Path | None = None
    current: StubProcessor
    sentinel: Sentinel
    neighbours: PeerWatcher

    @classmethod
    def show(cls, page_dir: Path, rank: int) -> None:
        """Let neighbours see that this process lives, and see theirs."""
        page_dir.mkdir(exist_ok=True)
        cls.page_dir = page_dir
        cls.sentinel = Sentinel(page_dir, rank, f"{rank}", 0)
        cls.neighbours = PeerWatcher(page_dir, rank, 0, lambda *_: cls.current.on_death())
        cls.neighbours.start()


class Rank:
    def __init__(self, directory: Path, rank: int, layout: Layout, undo: str | None = None) -> None:
        torch.manual_seed(3)
        model = Model()
        torch.manual_seed(50 + rank)
        self.model: Any = DistributedDataParallel(model, broadcast_buffers=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.adapter = registered(self.model, self.optimizer, undo=undo)
        self.processor = StubProcessor(directory, rank=rank, layout=layout, page_dir=Alive.page_dir)
        Alive.current = self.processor

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()


def begin(directory: Path, rank: int) -> None:
    if os.environ["HOSTS"] == "one host":
        Alive.show(directory / "pages", rank)


def digests(directory: Path, rank: int) -> dict[str, Any]:
    job = Rank(directory, rank, Layout.data_parallel(WORLD))
    job.adapter.attach(job.processor)  # type: ignore[arg-type]
    for _ in range(40):
        job.step()
    (seen,), bad = job.adapter.source.inspect(Version(40))
    flip = job.model.module.layers[3].weight.detach().view(torch.int32)
    flip[0, 0] ^= rank  # a bit on rank 1
    (flipped,), _ = job.adapter.source.inspect(Version(40))
    statistics = job.model.module.layers[1].running_mean.tolist()
    return {"seen": seen.digest, "flipped": flipped.digest, "bad": bad, "statistics": statistics}


def barrier(directory: Path, rank: int) -> dict[str, Any]:
    """Rank 0 is late at the barrier. Returns whether rank 1 began its update before."""
    job = Rank(directory, rank, two_shards())
    late = directory / "late"

    def hold(*_: Any) -> None:
        if rank == 0:
            time.sleep(HOLD_S)
            late.touch()

    job.optimizer.register_step_pre_hook(hold)
    job.adapter.attach(job.processor)  # type: ignore[arg-type]
    early: list[bool] = []
    begins: Any = lambda _again: early.append(not late.exists())  # noqa: E731
    job.processor.begin_update = begins  # type: ignore[method-assign]
    job.step()
    assert job.adapter._barrier is not None
    return {"early": early, "shared": len(job.adapter._barrier.meeting._slots)}


def no_barrier(directory: Path, rank: int) -> dict[str, Any]:
    """Rank 0 begins its update only after rank 1. With a barrier neither would ever begin."""
    seen = {}
    for name, layout, undo in (
        ("one shard", Layout.data_parallel(WORLD), None),
        ("undo", two_shards(), "preimage"),
    ):
        job, begun = Rank(directory, rank, layout, undo), directory / f"begun {name}"

        def follow(*_: Any, begun: Path = begun) -> None:
            until(lambda: rank == 1 or begun.exists(), PATIENCE_S)

        job.optimizer.register_step_pre_hook(follow)
        job.adapter.attach(job.processor)  # type: ignore[arg-type]
        if rank == 1:
            begins: Any = lambda _again, begun=begun: begun.touch()  # noqa: E731
            job.processor.begin_update = begins  # type: ignore[method-assign]
        job.step()
        seen[name] = begun.exists()
        dist.barrier()
    return seen


def parked(job: Rank) -> bool:
    return bool(until(lambda: job.processor.gate.state().parked, PATIENCE_S))


def admitted(directory: Path, rank: int) -> dict[str, Any]:
    """Rank 0 comes to the barrier only after rank 1, frozen in the barrier, has made the update on request."""
    job = Rank(directory, rank, two_shards())
    redone, seen = directory / "redone", dict[str, Any]()

    def linger(*_: Any) -> None:
        until(lambda: rank == 1 or redone.exists(), PATIENCE_S)

    def control() -> None:
        job.processor.gate.close()
        seen.update(parked=parked(job), ready=job.adapter.source.gradient_ready(), admitted=job.processor.gate.admit())

    job.optimizer.register_step_pre_hook(linger)
    job.adapter.attach(job.processor)  # type: ignore[arg-type]
    control_thread = threading.Thread(target=control)
    if rank == 1:
        control_thread.start()
    job.step()
    if rank == 1:
        control_thread.join()
        redone.touch()
    return {**seen, "version": job.processor.gate.version}


def death(directory: Path, rank: int) -> dict[str, Any]:
    """Rank 0 dies before the barrier, so rank 1 waits. When released it raises; on request it makes the update."""
    begin(directory, rank)
    job = Rank(directory, rank, two_shards())
    if rank == 0:
        job.optimizer.register_step_pre_hook(lambda *_: os._exit(0))
    job.adapter.attach(job.processor)  # type: ignore[arg-type]
    gate, seen = job.processor.gate, dict[str, Any]()

    def control(then: str) -> None:
        while not job.processor.reported:
            time.sleep(0.005)
        gate.close()
        seen.update(parked=parked(job), ready=job.adapter.source.gradient_ready())
        seen.update(phase=gate.state().phase.value, version=gate.version, reported=list(job.processor.reported))
        gate.open() if then == "open" else gate.admit()

    for then in ("open", "admit"):
        job.processor.reported.clear()
        thread = threading.Thread(target=control, args=(then,))
        thread.start()
        try:
            job.optimizer.step() if then == "admit" else job.step()
            redone = gate.version
        except RuntimeError as problem:
            raised = is_collective_error(problem)
        thread.join()
    return {**seen, "raised": raised, "redone": redone}


def everything(directory: Path, rank: int) -> dict[str, Any]:
    begin(directory, rank)
    return {case.__name__: case(directory, rank) for case in (digests, barrier, no_barrier, admitted)}
