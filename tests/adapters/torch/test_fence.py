"""Which versions a made-up device has finished, and where their events stand in its queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import Loop
from tests.making import making
from ttp.adapters.torch.device.accelerator import AHEAD_MAX, Fence
from ttp.adapters.torch.loop.device_marks import with_marks
from ttp.adapters.torch.loop.hooks import Calls


class TestFence:
    def test_on_the_host_a_version_is_finished_at_once(self) -> None:
        fence = Fence((), 4)
        assert fence.finished_version() == 4
        fence.record(5)
        assert fence.finished_version() == 5
        assert fence.wait(5, 0) and not fence.wait(6, 0)

    def test_on_a_device_when_its_event_is(self, device: Any) -> None:
        fence = Fence([device], 4)
        device.moving.clear()
        for version in (5, 6):
            fence.record(version)
        assert fence.finished_version() == 4, "the host is two ahead"
        assert not fence.wait(5, 0.001)
        device.moving.set()
        assert fence.wait(6, 10)
        assert fence.finished_version() == 6

    def test_versions_finish_in_order(self, device: Any) -> None:
        fence = Fence([device])
        device.moving.clear()
        for version in (1, 2, 3):
            fence.record(version)
        events: list[Any] = [event for _, event in fence._devices[0]._pending]
        events[1].done = True
        assert fence.finished_version() == 0
        events[0].done = True
        assert fence.finished_version() == 2

    def test_a_broken_device_finishes_nothing_more(self, device: Any) -> None:
        fence = Fence([device], base=3)
        device.device.broken = True
        fence.record(4)
        assert fence.finished_version() == 3
        assert not fence.wait(4, 0.001)

    def test_nothing_piles_up_when_nobody_asks(self, device: Any) -> None:
        fence = Fence([device])
        for version in range(1, 1000):
            fence.record(version)
        assert len(fence._devices[0]._pending) <= AHEAD_MAX

    def test_of_several_devices_what_all_have_finished_and_any_has_begun(self) -> None:
        one, other = FakeRuntime(), FakeRuntime()
        finished, begun = Fence([one, other]), Fence([one, other], newest=True)
        other.moving.clear()
        for fence in (begun, finished):
            fence.record(1)
        assert (begun.finished_version(), finished.finished_version()) == (1, 0)
        assert not finished.wait(1, 0.001)
        other.moving.set()
        assert finished.wait(1, 10)


class Marked(Loop):
    """Tells in which order an update calls what."""

    def __init__(self, directory: Path) -> None:
        model = torch.nn.Linear(3, 1)
        super().__init__(directory, model, torch.optim.SGD(model.parameters()))
        self.start(directory / "pages")
        self.said: list[str] = []
        bracket, processor = self.adapter._attachment, self.processor
        processor.begin_update = partial(self.call, "gate", processor.begin_update)
        processor.end_update = partial(self.call, "end", processor.end_update)
        reduced, begun, bracket._fence = (self.fence(name) for name in ("reduced", "begun", "finished"))
        source: Any = SimpleNamespace(reduced=reduced, begun=begun, host_values=SimpleNamespace(note=self.note))
        before_gate, after_update = partial(self.said.append, "barrier"), partial(self.said.append, "after")
        calls = Calls(before_gate, lambda *how: self.said.append(f"copy {how}"), after_update=after_update)
        bracket._calls = with_marks(calls, source, self.gate)

    def call(self, name: str, then: Callable[..., None], *args: Any) -> None:
        self.said.append(name)
        then(*args)

    def fence(self, name: str) -> Any:
        return SimpleNamespace(record=lambda version: self.said.append(f"{name} {version}"))

    def note(self, version: int) -> None:
        self.said.append(f"numbers {version}")
        raise RuntimeError("no memory")

    def step(self, *, learn: bool = True) -> list[str]:
        """Make an update, and return what was called."""
        self.said.clear()
        if learn:
            self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        return list(self.said)


def test_marks_stand_around_the_gate_and_around_the_update(tmp_path: Path) -> None:
    """The gradient is there before a barrier holds the device, and a rank at the gate has not begun its update."""
    with making(partial(Marked, tmp_path), lambda job: job.source.close()) as make:
        job = make()
        end = ["numbers 1", "after", "end"]
        assert job.step() == ["reduced 1", "barrier", "gate", "begun 1", "copy (0, True)", "finished 1", *end]
        for learn in (False, True):
            with job.optimizer.register_step_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                job.step()
            version = job.gate.version + 1 + learn  # a half-made update uses up a number, unless it is repeated
            reduced = [f"reduced {version - 1}", "barrier"] if learn else []
            begun = [f"begun {version}", f"copy ({version - 1}, False)", f"finished {version}"]
            assert job.step(learn=learn) == [*reduced, "gate", *begun, f"numbers {version}", "after", "end"]
