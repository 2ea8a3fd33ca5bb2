"""A rank on a made-up device, whose collective hangs when another rank dies, leaves its training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.adapters.torch.fake_device import SIDE, TRAINING
from tests.adapters.torch.stub_processor import StubProcessor, registered
from tests.gpu.made_up import MadeUp
from tests.gpu.made_up_nccl import GARBAGE, UNKIND, Kernel, NcclOptions, ProcessGroupNCCL
from tests.waiting import until
from ttp.adapters.torch import transport
from ttp.config import Config
from ttp.core.layout import Version
from ttp.processor.continuing import Continuing
from ttp.processor.gate.gate import Halted

_dist: Any = dist
PATIENCE_S = 30.0


class LeftError(Exception):
    """Stands for an exit with 75."""


class Rank:
    """One rank that has made some updates, each with a collective before it."""

    def __init__(self, made_up: MadeUp, directory: Path, updates: int) -> None:
        self.made_up, self.device = made_up, made_up.device
        self.backend = ProcessGroupNCCL(_dist.HashStore(), 0, 1, NcclOptions())
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        made_up.put(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.adapter = registered(self.model, self.optimizer)
        stub: Any = StubProcessor(directory)
        self.processor = stub
        self.survivor = Continuing(Config(run_dir=str(directory), keep_cuda=True), None, None)
        self.survivor.enter()
        groups: Any = SimpleNamespace(aborts=True, let_go=lambda: transport.Nccl().let_go([self.backend]))
        self.survivor._groups, self.survivor.clock.within_s = groups, PATIENCE_S
        self.processor.survivor, self.processor.source = self.survivor, self.adapter.source
        self.adapter.attach(self.processor)
        for _ in range(updates):
            self.step()
        self.problem: BaseException | None = None

    def step(self, dead: bool = False) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 6)).square().mean().backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        kernel = Kernel(self.backend, grads)
        self.device.launch(kernel.start)
        kernel._broken = dead
        self.device.wait(kernel, self.device.current)
        self.optimizer.step()

    def in_a_thread(self, dead: bool) -> threading.Thread:
        def loop() -> None:
            try:
                with self.device.may_hang():
                    self.step(dead)
                    self.step(dead)
            except BaseException as problem:
                self.problem = problem

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        return thread

    def state(self) -> list[list[float]]:
        """Return the state from the device's memory, without waiting for streams."""
        kept = [v for values in self.optimizer.state.values() for v in values.values()]
        return [self.made_up.copy(t).reshape(-1).tolist() for t in (*self.model.parameters(), *kept)]


@pytest.fixture(params=[TRAINING, SIDE])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that makes a rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ProcessGroupNCCL, "on_abort", staticmethod(lambda _backend: None))

    def leave(_self: Continuing, why: str) -> None:
        raise LeftError(why)

    monkeypatch.setattr(Continuing, "leave", leave)
    made_up, made = MadeUp(), []
    made_up.device.order = request.param

    def make(updates: int = 3) -> Rank:
        made.append(Rank(made_up, tmp_path, updates))
        return made[-1]

    with made_up.watched():
        yield make
        for each in made:
            each.survivor.releasing = False
            each.survivor.update_begins()


Make = Callable[..., Rank]


def test_no_update_is_queued_behind_a_collective_that_hangs(rank: Make) -> None:
    """The collective is aborted and leaves garbage. The state is unchanged to the bit, and is kept."""
    one = rank()
    one.device.run()
    before, gate, source = one.state(), one.processor.gate, one.adapter.source
    thread = one.in_a_thread(dead=True)
    until(lambda: len(one.device.training.queue) > 1, PATIENCE_S)
    gate.close()
    assert source.device_version(Version(3), 0.02) == 3
    source.inspect(Version(3))
    one.survivor.released(one.processor, "incident")
    thread.join(PATIENCE_S)
    assert isinstance(one.problem, Halted) and one.backend.aborted.is_set()
    assert source.why_not_at_rest(PATIENCE_S) == ""
    gradient = next(iter(one.model.parameters())).grad
    assert gradient is not None and one.made_up.copy(gradient).eq(GARBAGE).all(), "it was as unkind as it may be"
    assert one.state() == before
    assert one.adapter.source.keep("incident").origin.version == 3


def test_an_update_that_runs_is_waited_for(rank: Make) -> None:
    """The host has passed the gate with a whole gradient, and the device is slow."""
    one, done = rank(), threading.Event()
    gate, source = one.processor.gate, one.adapter.source
    one.device.run()
    one.device.moving.clear()
    source.begun.record(4)  # as a step does, and its kernels would follow
    gate.version = Version(4)
    gate.close()

    def release() -> None:
        one.survivor.released(one.processor, "incident")
        done.set()

    one.device.moving.set()
    until(lambda: source.begun.finished_version() == 4, PATIENCE_S)
    threading.Thread(target=release, daemon=True).start()
    assert not one.backend.aborted.wait(0.2)
    source.finished.record(4)
    assert done.wait(PATIENCE_S) and one.backend.aborted.is_set()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("the gate is open", "its gate is open"),
        ("an update", "it is making an update"),
        ("the device", "its device has begun update 4"),
        ("the first steps", "not aborted before 2 updates, and this rank has made 1"),
        ("abort-hangs", "1 of 1 process groups of NCCL were not aborted within 0.1 s"),
        ("abort-raises", "could not be aborted: RuntimeError: NCCL error"),
    ],
)
def test_what_may_not_be_aborted_is_started_anew(
    rank: Make, monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    one = rank(1 if what == "the first steps" else 3)
    monkeypatch.setattr(one.survivor.clock, "start", lambda _launch: None)
    monkeypatch.setattr(transport, "ABORT_S", 0.1)
    one.survivor.clock.within_s = 0.1
    gate = one.processor.gate
    if what == "an update":
        gate.begin_update()
    if what == "the device":
        one.adapter.source.begun.record(4)
    if what != "the gate is open":
        gate.close()
    if what in UNKIND:
        monkeypatch.setattr(ProcessGroupNCCL, "on_abort", staticmethod(UNKIND[what]))
    with pytest.raises(LeftError, match=why):
        one.survivor.released(one.processor, "incident")
    assert not one.backend.aborted.is_set()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (True, "its device is broken: RuntimeError: CUDA error: unspecified launch failure"),
        (False, "does not finish its queued work"),
    ],
)
def test_a_broken_device_or_one_that_does_not_come_to_rest_is_started_anew(rank: Make, broken: bool, why: str) -> None:
    """A CUDA error lasts as long as the process."""
    one = rank()
    one.processor.gate.close()
    one.survivor.released(one.processor, "incident")
    one.survivor.clock.within_s = 0.1
    one.device.hang()
    one.device.broken = broken
    with pytest.raises(LeftError, match=why):
        one.survivor.out(Halted(), one.processor, one.adapter)
    one.device.broken = False
    one.device.release()
