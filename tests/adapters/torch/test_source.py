"""What a torch rank says of itself when it is asked: is its gradient ready, can it go back, has its page changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.adapters.torch.fake_device import FakeRuntime  # noqa: E402
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, save  # noqa: E402
from ttp.adapters.torch.adapter import DeviceReporter, TorchAdapter  # noqa: E402
from ttp.adapters.torch.device import DeviceFence  # noqa: E402
from ttp.adapters.torch.preimage import PreImage  # noqa: E402
from ttp.adapters.torch.reader import read_values  # noqa: E402
from ttp.adapters.torch.table import items_of  # noqa: E402
from ttp.core.layout import Rank  # noqa: E402
from ttp.errors import CheckpointError  # noqa: E402
from ttp.store.manifest import Manifest  # noqa: E402

PATIENCE_S = 30


class Job:
    def __init__(self, directory: Path, optimizer: Callable[[Any], Any] | None = None) -> None:
        self.model = nn.Linear(3, 1)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.optimizer: Any = make(self.model.parameters())
        self.adapter = TorchAdapter(self.optimizer, model=self.model, scheduler=None, extra_state=None, scaler=None)
        self.processor = StubProcessor(directory)
        self.source: Any = self.adapter.source
        self.source.on_welcome(Rank(0), INCARNATION, directory / "pages")
        self.threads: list[threading.Thread] = []

    def step(self, *args: Any) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step(*args)

    def park(self, *args: Any) -> None:
        """The training thread comes to the closed gate."""
        parked = threading.Event()
        self.processor.gate._on_quiet = parked.set
        self.processor.gate.close()
        self.threads.append(threading.Thread(target=self.step, args=args, daemon=True))
        self.threads[-1].start()
        assert parked.wait(PATIENCE_S)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def made(*args: Any) -> Job:
        jobs.append(Job(tmp_path, *args))
        jobs[-1].adapter.attach(jobs[-1].processor)  # type: ignore[arg-type]
        return jobs[-1]

    yield made
    for job in jobs:
        job.processor.gate.open()
        for thread in job.threads:
            thread.join(PATIENCE_S)
        job.source.close()


class TestGradient:
    def test_it_is_ready_at_the_gate_only(self, make: Callable[..., Job]) -> None:
        job = make()
        assert not job.source.gradient_ready()
        job.step()
        assert not job.source.gradient_ready(), "it is used up"
        job.park()
        assert job.source.gradient_ready()

    def test_a_closure_would_need_the_other_ranks(self, make: Callable[..., Job]) -> None:
        job = make(torch.optim.LBFGS)
        job.park(lambda: job.model(torch.ones(2, 3)).sum())
        assert not job.source.gradient_ready()

    def test_an_update_that_the_program_ends_itself_may_never_end(self, make: Callable[..., Job]) -> None:
        job = make()
        job.step()
        job.adapter.step_done()
        job.park()
        assert not job.source.gradient_ready()

    def test_on_a_device_when_it_is_there(self, make: Callable[..., Job]) -> None:
        job = make()
        device: Any = FakeRuntime()
        job.source.on_device, job.source.reduced = True, DeviceFence(device)
        job.adapter._attachment._reporter = DeviceReporter(job.processor, job.source)  # type: ignore
        device.moving.clear()
        job.park()
        assert not job.source.gradient_ready()
        device.moving.set()
        assert job.source.gradient_ready()


def test_on_a_device_too_the_processor_is_told_where_the_step_is(make: Callable[..., Job]) -> None:
    job = make()
    reporter = DeviceReporter(job.processor, job.source)  # type: ignore[arg-type]
    reporter.mark, reporter.activity = 2, "evaluation"
    assert (job.processor.mark, job.processor.activity) == (reporter.mark, reporter.activity) == (2, "evaluation")


def test_on_a_device_the_pre_image_goes_with_what_the_device_has_finished(make: Callable[..., Job]) -> None:
    job, device = make(), FakeRuntime()
    source: Any = job.source
    runtime: Any = device
    source.on_device, source.preimage = True, PreImage(job.optimizer, runtime=runtime)
    source.begun, source.finished = DeviceFence(runtime), DeviceFence(runtime)
    fences = (source.preimage._begun, source.preimage._taken, source.begun, source.finished)

    def queue_update() -> None:
        job.processor.gate.begin_update()
        source.begun.record(job.processor.gate.version + 1)
        source.preimage.take(job.processor.gate.version)
        source.finished.record(job.processor.gate.version + 1)
        job.processor.gate.end_update()

    queue_update()
    assert source.has_preimage
    device.moving.clear()
    queue_update()
    assert job.processor.gate.version == 2 and source.has_preimage, "the device still stands at 1 and has 0"
    source.begun._pending[0][1].done = True
    assert not source.has_preimage, "an update is half done there"
    device.moving.set()
    assert source.has_preimage and all(fence.finished_version() >= 1 for fence in fences)


def test_counters_of_a_host_that_is_ahead_are_those_of_the_version(make: Callable[..., Job]) -> None:
    """The device hangs before the update that the host has queued: moments of version 1, and a count of 2."""
    job = make(torch.optim.AdamW)
    for _ in range(2):
        job.step()
    job.source.on_device = True
    path = save(job.adapter, job.processor, 1)
    items = [item for item in items_of(Manifest.load(path).pieces) if item.path[-1] == "step"]
    states = read_values(path, items)["optim"]["state"]
    assert [state["step"].item() for state in states.values()] == [1.0, 1.0]
    assert [state["step"].item() for state in job.optimizer.state.values()] == [2.0, 2.0], "the live ones stay"


def test_a_version_that_this_rank_does_not_hold_is_not_written(make: Callable[..., Job]) -> None:
    job = make()
    job.step()
    for version in (0, 2):
        with pytest.raises(CheckpointError, match=f"holds version 1, not {version}"):
            save(job.adapter, job.processor, version)


def test_every_written_page_is_told(make: Callable[..., Job]) -> None:
    job = make()
    told: list[tuple[int, bool]] = []
    job.step()
    job.source.watch_pages(lambda version, final: told.append((version, final)))
    job.step()
    assert told == [(2, False), (2, False), (2, True)]
