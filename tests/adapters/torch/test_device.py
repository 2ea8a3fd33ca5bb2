"""The logic of copies and fences on a made-up device. It does not show how CUDA behaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.fake_device import FakeDevice, Sin, Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import Loop
from tests.making import making
from ttp.adapters.torch.around_update import with_marks
from ttp.adapters.torch.device import to_host
from ttp.adapters.torch.device.accelerator import AHEAD_MAX, Fence, holder
from ttp.adapters.torch.device.to_host import HostCopier
from ttp.adapters.torch.loop.hooks import Calls
from ttp.adapters.torch.sharding import unconnected
from ttp.adapters.torch.tensor_memory import copied_bytes, sample_of
from ttp.errors import CheckpointError


def tensors() -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.randn(7),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(300),
        torch.tensor(5.0),
        torch.randn(5, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(40)[::4],
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([True, False]),
        nn.Parameter(torch.randn(16)),
        torch.randn(6, 8)[:, ::2].to(torch.float8_e4m3fn),
        torch.randn(6, 8)[1:, 1:5],
        torch.randn(4, 6, 2, dtype=torch.complex128).permute(2, 0, 1)[:, ::2],
        torch.randn(3, 5, dtype=torch.bfloat16)[:, :3],
        torch.empty(0, 3)[:, ::2],
        torch.arange(9.0)[::4].view(3, 1).expand(3, 3),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(6, dtype=torch.complex64).conj().imag,
    ]


ON_HOST = 4


def on_device(device: Any, given: list[Any]) -> list[Any]:
    return [tensor if place == ON_HOST else device.device.put(tensor) for place, tensor in enumerate(given)]


def test_bytes_of_one_element_of_a_row() -> None:
    """Its stride is that of the row, which no view as bytes allows."""
    one = torch.full((1, 5), 2.0)[:, 0]
    read = [sample_of(one).numpy().tobytes(), *unconnected._some([one])]
    assert one.stride() == (5,) and read == [copied_bytes(torch.tensor(2.0))] * 2


class TestHostCopier:
    @pytest.mark.parametrize("gaps", [0, 128 << 10], ids=["without gaps", "with gaps"])
    @pytest.mark.parametrize("ring", [1, 3])
    @pytest.mark.parametrize("size", [16, 64, 100_000])
    def test_the_same_tensors_in_the_same_order_past_a_stream_that_hangs(
        self, device: Any, ring: int, size: int, gaps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(to_host, "_COPY_BYTES", gaps)
        given = on_device(device, tensors())
        with Watching(device.device):
            copier = HostCopier([device], ring=ring, buffer_bytes=size)
        device.device.seal()
        device.device.hang()
        with Watching(device.device), device.device.no_waiting():
            got = list(copier.copy_to_host(given))
        assert len(got) == len(given) and not device.device.sins
        for before, after in zip(given, got, strict=True):
            assert after.dtype == before.dtype and after.shape == before.shape and not after.requires_grad
            assert (after.is_conj(), after.is_neg()) == (before.is_conj(), before.is_neg())
            assert copied_bytes(before) == copied_bytes(after)
        assert got[6].is_contiguous(memory_format=torch.channels_last)
        assert got[ON_HOST] is not None and got[ON_HOST].data_ptr() == given[ON_HOST].data_ptr()

    def test_they_are_the_callers(self, device: Any) -> None:
        copier = HostCopier([device], buffer_bytes=64)
        with Watching(device.device):
            kept = list(copier.copy_to_host([device.device.put(torch.ones(8))]))
            list(copier.copy_to_host([device.device.put(torch.zeros(100))]))
        assert kept[0].tolist() == [1.0] * 8

    def test_one_chunk_is_under_way_while_another_is_moved(self, device: Any) -> None:
        copier = HostCopier([device], ring=2, buffer_bytes=40, timeout_s=0.01)
        device.moving.clear()
        device.log.clear()
        with pytest.raises(TimeoutError, match="40 bytes did not leave the device"):
            list(copier.copy_to_host([device.device.put(torch.zeros(100))]))
        assert device.log.count("side") == 2

    def test_without_a_device_they_are_handed_through(self) -> None:
        given = tensors()
        got = list(HostCopier().copy_to_host(given))
        assert [a.data_ptr() for a in got] == [b.data_ptr() for b in given]

    @pytest.mark.supports("several devices in a process")
    def test_each_comes_from_its_own_device(self) -> None:
        """A stream of one device may do nothing for the other."""
        one = FakeRuntime()
        other = FakeRuntime(FakeDevice(beside=one.device))
        given = [one.device.put(torch.ones(30)), torch.zeros(2), other.device.put(torch.full((4, 9), 2.0).t()[::2])]
        copier = HostCopier([one, other], buffer_bytes=64)
        one.log.clear()
        other.log.clear()
        with Watching(one.device, other.device), one.device.no_waiting(), other.device.no_waiting():
            got = list(copier.copy_to_host(given))
        assert all(torch.equal(a, b) for a, b in zip(got, given, strict=True))
        assert one.log.count("side") == 2 and other.log.count("side") == 3

    def test_what_is_somewhere_else_is_refused(self, device: Any) -> None:
        elsewhere: Any = SimpleNamespace(device=torch.device("xpu", 0), is_meta=False, layout=torch.sparse_coo)
        with pytest.raises(CheckpointError, match="a tensor of the state is on xpu:0"):
            holder([device], elsewhere)

    def test_the_stand_in_notices_what_a_device_would_not_forgive(self, device: Any) -> None:
        """Shows that the tests above can fail."""
        there = device.device.put(torch.randn(6, 8)[:, ::2])
        device.device.seal()
        device.device.hang()
        with Watching(device.device):
            with pytest.raises(Sin, match="first time behind"):
                there.clone()
            with pytest.raises(Sin, match="may never start"), device.on_side():
                there.copy_(there.t().t())
            with pytest.raises(Sin, match="waits for ever"):
                there[0, 0].item()

    def test_the_stand_in_takes_numbers_of_the_host_when_it_is_asked(self, device: Any) -> None:
        """Queued work uses a host scalar's value at the call, even if it changes later. Results go to the device."""
        there, scale, found = device.device.put(torch.ones(3)), torch.tensor(8.0), torch.zeros(1)
        with Watching(device.device):
            scaled = there * scale
            scale.fill_(16.0)
            torch._amp_foreach_non_finite_check_and_unscale_([scaled], found, torch.tensor(0.5))
            assert device.device.has(found)
            assert torch.equal(scaled, there * 4) and found.item() == 0
        assert device.device.waits[threading.get_ident()] == 2

    def test_a_program_that_waits_for_what_hangs_goes_on_when_it_is_released(self, device: Any) -> None:
        there = device.device.put(torch.ones(1))
        with Watching(device.device):
            there += 1
        device.device.hang()
        with Watching(device.device):
            there += 1
        seen: list[float] = []

        def read() -> None:
            with Watching(device.device), device.device.may_hang():
                seen.append(there.item())

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        while not device.device.waits:
            assert reading.is_alive()
        assert not seen
        device.device.release()
        reading.join(60.0)
        assert seen == [3.0]


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

    def test_only_what_was_queued_is_waited_for(self, device: Any) -> None:
        fence = Fence([device], 4)
        device.moving.clear()
        fence.record(5)
        assert [fence.passed(version) for version in (4, 5, 6)] == [True, False, True]

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
        end = ["numbers 1", "after", "finished 1", "end"]  # what is noted of the weights is there with the version
        assert job.step() == ["reduced 1", "barrier", "gate", "begun 1", "copy (0, True)", *end]
        for learn in (False, True):
            with job.optimizer.register_step_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                job.step()
            version = job.gate.version + 1 + learn  # a half-made update uses up a number, unless it is repeated
            reduced = [f"reduced {version - 1}", "barrier"] if learn else []
            begun = [f"begun {version}", f"copy ({version - 1}, False)"]
            end = [f"numbers {version}", "after", f"finished {version}", "end"]
            assert job.step(learn=learn) == [*reduced, "gate", *begun, *end]
