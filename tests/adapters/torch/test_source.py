"""What a torch rank reports of itself: whether its gradient is ready, whether it can go back, whether its page has
changed.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from tests.adapters.torch.fake_device import Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import Loop, write
from tests.making import making
from ttp.adapters.torch.around_update import with_marks
from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.device.to_host import HostCopier
from ttp.adapters.torch.loop.swapped import Swapped
from ttp.adapters.torch.restoring.reader import read_values
from ttp.adapters.torch.saving import standing
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.adapters.torch.saving.preimage import PreImage
from ttp.core.layout import Rank, Version
from ttp.errors import CheckpointError
from ttp.processor.source import MovedError
from ttp.store.manifest import Manifest

PATIENCE_S = 30


class Job(Loop):
    def __init__(self, directory: Path, make: Callable[[Any], Any] = torch.optim.SGD) -> None:
        model = nn.Linear(3, 1)
        super().__init__(directory, model, make(model.parameters()))
        self.start(directory / "pages")
        self.threads: list[threading.Thread] = []

    def step(self, *args: Any) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step(*args)

    def park(self, *args: Any) -> None:
        """Let the training thread wait at the closed gate."""
        parked = threading.Event()
        self.gate._on_quiet = parked.set
        self.gate.close()
        self.threads.append(threading.Thread(target=self.step, args=args, daemon=True))
        self.threads[-1].start()
        assert parked.wait(PATIENCE_S)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    def end(job: Job) -> None:
        job.gate.open()
        for thread in job.threads:
            thread.join(PATIENCE_S)
        job.source.close()

    with making(partial(Job, tmp_path), end) as made:
        yield made


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
        job.source.runtimes, job.source.reduced = [device], Fence([device])
        job.adapter._attachment._calls = with_marks(job.adapter._attachment._calls, job.source, job.gate)
        device.moving.clear()
        job.park()
        assert not job.source.gradient_ready()
        device.moving.set()
        assert job.source.gradient_ready()


def test_on_a_device_the_pre_image_goes_with_what_the_device_has_finished(make: Callable[..., Job]) -> None:
    job, device = make(), FakeRuntime()
    source: Any = job.source
    runtime: Any = device
    for parameter in job.model.parameters():
        device.device.put(parameter)
    source.runtimes, source.preimage = [runtime], PreImage(job.optimizer, runtimes=[runtime])
    source.begun, source.finished = Fence([runtime]), Fence([runtime])
    fences = (source.preimage._begun, source.preimage._taken, source.begun, source.finished)

    def queue_update() -> None:
        job.gate.begin_update()
        source.begun.record(job.gate.version + 1)
        source.preimage.take(job.gate.version)
        source.finished.record(job.gate.version + 1)
        job.gate.end_update()

    queue_update()
    assert source.has_preimage
    device.moving.clear()
    queue_update()
    assert job.gate.version == 2 and source.has_preimage, "the device still stands at 1 and has 0"
    event: Any = source.begun._devices[0]._pending[0][1]
    event.done = True
    assert not source.has_preimage, "an update is half done there"
    device.moving.set()
    assert source.has_preimage and all(fence.finished_version() >= 1 for fence in fences)


class OnDevice:
    """A job with parameters, moments and buffers on a device. The host makes updates, and the device may hang."""

    def __init__(self, job: Job, device: Any) -> None:
        self.job, self.device = job, device
        source, runtime = job.source, device
        source.runtimes = [runtime]
        source.begun, source.finished, source.reduced = (Fence([runtime]) for _ in range(3))
        self.put()
        job.adapter._trial._devices = frozenset({str(device.device.name)})  # as if it had been there from the start
        source.swapped = Swapped([job.optimizer], {}, [runtime])
        source._copier = HostCopier([runtime], buffer_bytes=256)
        attachment: Any = job.adapter._attachment
        attachment._calls, attachment._fence = with_marks(attachment._calls, source, job.gate), source.finished

    def put(self) -> None:
        kept = [v for values in self.job.optimizer.state.values() for v in values.values() if v.dim()]
        for tensor in [*self.job.model.parameters(), *kept]:
            if isinstance(tensor, torch.Tensor):
                self.device.device.put(tensor)

    def step(self) -> None:
        """Queue an update from the host."""
        for parameter in self.job.model.parameters():
            if parameter.grad is None:
                parameter.grad = self.device.device.put(torch.ones_like(parameter))
        self.job.optimizer.step()

    def weights(self) -> list[Any]:
        return [parameter.detach().clone() for parameter in self.job.model.parameters()]


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, foreach=False)


@pytest.fixture
def on_device(make: Callable[..., Job], device: Any) -> Callable[..., OnDevice]:
    """Return a function that makes such a job, which has made an update."""

    def made(kind: Any = adam) -> OnDevice:
        on = OnDevice(make(kind), device)
        with Watching(device.device):
            on.step()
            on.put()
        return on

    return made


def saved(path: Path) -> Any:
    return read_values(path, items_of(Manifest.load(path).pieces))


def test_a_host_that_is_ahead_saves_what_its_device_has(on_device: Callable[..., OnDevice], device: Any) -> None:
    """Three updates are queued behind a collective that hangs. The schedule of each version is kept, too."""
    on = on_device()
    job = on.job
    with Watching(device.device):
        device.device.run()
        expected = on.weights()
        device.device.hang()
        for _ in range(3):
            on.step()
        assert job.gate.version == 4 and job.source.device_version(4, 0.01) == 1
        device.device.seal()
        with device.device.no_waiting():
            path = job.save(1)
    assert not device.device.sins
    found = saved(path)
    assert [torch.equal(found["model"][n], e) for n, e in zip(("weight", "bias"), expected, strict=True)] == [True] * 2
    assert [state["step"].item() for state in found["optim"]["state"].values()] == [1.0, 1.0]
    assert [state["step"].item() for state in job.optimizer.state.values()] == [4.0, 4.0], "the live ones stay"


def test_so_it_does_when_the_program_has_loaded_the_state_of_the_optimizer(
    on_device: Callable[..., OnDevice], device: Any
) -> None:
    on = on_device()
    job = on.job
    with Watching(device.device):
        for _ in range(3):
            on.step()
        device.device.run()
        for parameter, values in list(job.optimizer.state.items()):
            job.optimizer.state[parameter] = {**values, "step": values["step"].clone()}
        on.step()
        device.device.run()
        device.device.hang()
        on.step()
        found = saved(job.save(5))["optim"]["state"]
    assert [state["step"].item() for state in found.values()] == [5.0, 5.0]


def test_so_it_does_of_what_the_optimizer_keeps_on_the_host(on_device: Callable[..., OnDevice], device: Any) -> None:
    """NAdam's product of momenta, the step count of a parameter without gradient, and a number that a program added."""
    on = on_device(lambda parameters: torch.optim.NAdam(parameters, foreach=False))
    job = on.job
    weight, bias = job.model.parameters()

    def numbers() -> list[Any]:
        return [[float(state[key]) for key in ("step", "mu_product")] for state in job.optimizer.state.values()]

    with Watching(device.device):
        job.optimizer.state[weight]["seen"] = 0
        on.step()
        bias.grad = None
        job.optimizer.state[weight]["seen"] = 5
        job.optimizer.step()
        expected = numbers()
        device.device.run()
        device.device.hang()
        bias.grad = device.device.put(torch.ones_like(bias))
        job.optimizer.state[weight]["seen"] = 9
        for _ in range(2):
            on.step()
        assert numbers() != expected and expected[0][0] == 3.0 and expected[1][0] == 2.0
        found = saved(job.save(3))["optim"]["state"]
    assert [[float(found[name][key]) for key in ("step", "mu_product")] for name in ("weight", "bias")] == expected
    assert found["weight"]["seen"] == 5


def test_a_device_that_goes_on_while_it_is_saved_is_an_error(
    on_device: Callable[..., OnDevice], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator is aborted, so queued work runs on what the collective left behind."""
    on = on_device()
    job = on.job
    bring = job.source._to_host

    def aborted(tensor: Any) -> Any:
        found = bring(tensor)
        device.device.release()
        device.device.run()
        return found

    with Watching(device.device):
        device.device.run()
        device.device.hang()
        on.step()
        monkeypatch.setattr(job.source, "_to_host", aborted)
        with pytest.raises(MovedError, match="no longer that of version 1: the device has finished version 2"):
            job.save(1)


def test_half_an_update_is_of_no_version(
    on_device: Callable[..., OnDevice], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "INSIDE_S", 0.01)
    on = on_device()
    job = on.job
    with Watching(device.device):
        job.optimizer.register_step_pre_hook(lambda *_: device.device.hang())  # behind the hook that marks
        on.step()
        assert job.source.device_version(2, 0.001) is None
        with pytest.raises(MovedError, match="finished version 1 and begun 2"):
            job.save(1)
        device.device.release()
        assert job.source.device_version(2, 0.001) == 2


def test_a_device_that_hangs_is_not_waited_for_one_that_moves_is(
    on_device: Callable[..., OnDevice], device: Any
) -> None:
    """A device that stands still before an update is at the version before, however long the host may wait."""
    on = on_device()
    job = on.job
    with Watching(device.device):
        device.device.hang()
        on.step()
        assert job.source.device_version(2, 0.0) == job.source.device_version(2, 0.002) == 1
        threading.Timer(0.05, device.device.release).start()
        assert job.source.device_version(2, PATIENCE_S) == 2


class Moments(dict[str, Any]):
    """A class of the optimizer's own, which torch's pytree does not look into."""


@pytest.mark.parametrize("kind", [dict, UserDict, Moments])
def test_state_on_both_sides_is_whole_only_when_the_device_has_come_to_the_hosts_version(
    on_device: Callable[..., OnDevice], device: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """With moments on the host, the moments belong to an update that the device has not made yet."""
    monkeypatch.setattr(standing, "INSIDE_S", 0.01)
    on = on_device()
    job = on.job
    with Watching(device.device):
        job.optimizer.state[job.model.weight]["offloaded"] = kind(here=torch.ones(3))
        device.device.hang()
        on.step()
        assert job.source.device_version(2, 0.001) is None
        device.device.release()
        assert job.source.device_version(2, PATIENCE_S) == 2
        found = saved(job.save(2))
    assert found["optim"]["state"]["weight"]["offloaded"]["here"].tolist() == [1.0] * 3


def test_on_the_host_an_update_that_begins_while_it_is_saved_is_an_error(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    job.step()
    bring = job.source._to_host

    def begun(tensor: Any) -> Any:
        job.gate.open()
        if not job.gate.updating:
            job.gate.begin_update()
        return bring(tensor)

    monkeypatch.setattr(job.source, "_to_host", begun)
    with pytest.raises(MovedError, match=r"holds version 1, not 1 \(updating\)"):
        job.save(1)


def test_a_version_that_this_rank_does_not_hold_is_not_written(make: Callable[..., Job]) -> None:
    job = make()
    job.step()
    for version in (0, 2):
        with pytest.raises(CheckpointError, match=f"holds version 1, not {version}"):
            job.save(version)


def test_a_rank_stopped_before_its_update_brings_its_own_pages(make: Callable[..., Job]) -> None:
    """Its pages fit the version that another rank has finished, because this rank has finished its passes, too."""
    job = make()
    job.step()
    job.park()
    written = write(job.adapter, job.processor, 2, (), pages=(Rank(0),), job_state=False, generation=0)
    assert [piece.file for piece in written] == ["rank_local_0_0.msgpack"]
    found = job.source.read_pages((Rank(0),), Version(2))
    assert Rank(0) in found.data and not found.missing


def test_a_closed_source_leaves_no_hook(make: Callable[..., Job]) -> None:
    """A program may go on to use the model, or register it again."""
    job = make()
    job.step()
    job.source.close()
    job.step()
    assert job.gate.version == 1 and not any(module._forward_pre_hooks for module in job.model.modules())


def test_what_a_detached_adapter_holds_is_closed_with_its_source(make: Callable[..., Job]) -> None:
    """A recovery in the same process detaches the adapter first, and then closes the source with the processor."""
    job = make()
    job.step()
    job.adapter.detach()
    job.source.close()
    assert job.adapter.capture._pages.page is None


def test_every_written_page_is_told(make: Callable[..., Job]) -> None:
    job = make()
    told: list[tuple[int, bool]] = []
    job.step()
    job.source.watch_pages(lambda version, final: told.append((version, final)))
    job.step()
    assert told == [(2, False), (2, True)]
