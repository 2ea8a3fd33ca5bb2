"""The logic of fences and copies, on a device that is made up. What CUDA itself does is not shown here."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ttp.adapters.torch import buffers, staging  # noqa: E402
from ttp.adapters.torch.capture import LocalCapture, LocalState  # noqa: E402
from ttp.adapters.torch.device import DeviceFence, HostCopier, HostFence, make_fence  # noqa: E402
from ttp.processor.pages import Page, PageWriter, read_page  # noqa: E402


def _load_fake() -> Any:
    """Test folders are no packages."""
    spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["fake_device"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _load_fake()
LARGE = buffers.LARGE_BYTES // 4


@pytest.fixture
def device() -> Any:
    return fake.FakeRuntime()


class TestFence:
    def test_on_the_host_a_version_is_finished_at_once(self) -> None:
        fence = make_fence(torch.device("cpu"), base=4)
        assert isinstance(fence, HostFence) and fence.finished_version() == 4
        fence.record(5)
        assert fence.finished_version() == 5
        assert fence.wait(5, 0) and not fence.wait(6, 0)

    def test_on_a_device_when_its_event_is(self, device: Any) -> None:
        fence = make_fence(torch.device("cpu"), device, base=4)
        device.moving.clear()
        for version in (5, 6):
            fence.record(version)
        assert fence.finished_version() == 4, "the host is two ahead"
        assert not fence.wait(5, 0.001)
        device.moving.set()
        assert fence.wait(6, 10)
        assert fence.finished_version() == 6

    def test_versions_finish_in_order(self, device: Any) -> None:
        fence: Any = DeviceFence(device)
        device.moving.clear()
        for version in (1, 2, 3):
            fence.record(version)
        fence._pending[1][1].done = True
        assert fence.finished_version() == 0
        fence._pending[0][1].done = True
        assert fence.finished_version() == 2

    def test_a_broken_device_finishes_nothing_more(self, device: Any) -> None:
        fence = DeviceFence(device, base=3)
        device.broken = True
        fence.record(4)
        assert fence.finished_version() == 3
        assert not fence.wait(4, 0.001)

    def test_nothing_piles_up_when_nobody_asks(self, device: Any) -> None:
        fence = DeviceFence(device)
        for version in range(1, 1000):
            fence.record(version)
        assert len(fence._pending) <= 1


def tensors() -> list[Any]:
    torch.manual_seed(0)
    on_host = torch.tensor(5.0)
    on_host.on_host = True
    return [
        torch.randn(7),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(300),
        on_host,
        torch.randn(5, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(40)[::4],
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([True, False]),
        nn.Parameter(torch.randn(16)),
    ]


class TestHostCopier:
    @pytest.mark.parametrize("ring", [1, 2, 3])
    @pytest.mark.parametrize("size", [16, 64, 100_000])
    def test_the_same_tensors_in_the_same_order(self, device: Any, ring: int, size: int) -> None:
        given = tensors()
        got = list(HostCopier(device, ring=ring, buffer_bytes=size).copy_to_host(given))
        assert len(got) == len(given)
        for before, after in zip(given, got, strict=True):
            assert after.dtype == before.dtype and after.shape == before.shape and not after.requires_grad
            assert torch.equal(before, after)
        assert got[6].is_contiguous(memory_format=torch.channels_last)

    def test_they_are_the_callers(self, device: Any) -> None:
        copier = HostCopier(device, buffer_bytes=64)
        kept = list(copier.copy_to_host([torch.ones(8)]))
        list(copier.copy_to_host([torch.zeros(100)]))
        assert kept[0].tolist() == [1.0] * 8

    def test_one_chunk_is_under_way_while_another_is_moved(self, device: Any) -> None:
        device.moving.clear()
        copier = HostCopier(device, ring=2, buffer_bytes=40, timeout_s=0.01)
        with pytest.raises(TimeoutError, match="40 bytes did not leave the device"):
            list(copier.copy_to_host([torch.zeros(100)]))
        assert device.log.count("side") == 2

    def test_without_a_device_they_are_handed_through(self) -> None:
        given = tensors()
        got = list(HostCopier(None).copy_to_host(given))
        assert [a.data_ptr() for a in got] == [b.data_ptr() for b in given]


class TestBuffers:
    @pytest.fixture
    def page(self, tmp_path: Path) -> Iterator[PageWriter]:
        writer = PageWriter(tmp_path / "pages", 0, incarnation=1)
        yield writer
        writer.close(unlink=True)

    def model(self) -> Any:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model.register_buffer("mask", torch.ones(LARGE))
        model.register_buffer("strided", torch.arange(6.0)[::2])
        return model

    def state(self, page: PageWriter, version: int) -> LocalState | str:
        found = read_page(page.path.parent, 0, version, 1)
        return LocalCapture.decode(found.data) if isinstance(found, Page) else found

    def arrived(self, page: PageWriter, version: int) -> LocalState:
        deadline = time.monotonic() + 30
        while isinstance(state := self.state(page, version), str):
            assert time.monotonic() < deadline, state
            time.sleep(0.001)
        return state

    def test_they_arrive_as_they_were(self, device: Any, page: PageWriter) -> None:
        model = self.model()
        capture = LocalCapture(model, page=page, runtime=device)
        device.moving.clear()
        expected = {}
        for version in (1, 2):
            model(torch.randn(5, 3))
            if version == 2:
                with torch.no_grad():
                    model.mask[3] = 7.0
            expected[version] = {name: tensor.clone() for name, tensor in model.named_buffers()}
            capture.capture(version, final=True)
        model(torch.randn(5, 3))  # the training goes on while they are on their way
        assert isinstance(self.state(page, 1), str)
        device.moving.set()
        for version in (2, 1):
            found = self.arrived(page, version)
            assert set(found.buffers) == set(expected[version])
            for name, tensor in expected[version].items():
                assert torch.equal(found.buffers[name], tensor), name
            assert found.rng
        capture.close()
        assert not capture.problem

    def test_the_side_stream_waits_for_the_packing(self, device: Any, page: PageWriter) -> None:
        capture = LocalCapture(self.model(), page=page, runtime=device)
        device.log.clear()
        capture.capture(1, final=True)
        assert device.log == ["mark", "wait", "side", "mark side"]
        capture.close()

    def test_many_in_turn(self, device: Any, page: PageWriter) -> None:
        model = self.model()
        capture = LocalCapture(model, page=page, runtime=device)
        for version in range(1, 40):
            model(torch.randn(5, 3))
            if version % 10 == 0:
                model[1].register_buffer("running_mean", torch.full((3,), float(version)))
            expected = model[1].running_mean.clone()
            for final in (False, True):
                capture.capture(version, final)
            assert torch.equal(self.arrived(page, version).buffers["1.running_mean"], expected)
        capture.close()

    def test_a_large_constant_one_is_brought_once(self, device: Any, page: PageWriter) -> None:
        capture = LocalCapture(self.model(), page=page, runtime=device)
        before = len(device._pinned)
        for version in range(1, 12):
            capture.capture(version, final=True)
        assert len(device._pinned) == before + 1
        assert self.arrived(page, 11).buffers["mask"].tolist() == [1.0] * LARGE
        capture.close()

    def test_a_device_that_does_not_move_does_not_stop_training(
        self, device: Any, page: PageWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "_PATIENCE_S", 0.001)
        capture = LocalCapture(self.model(), page=page, runtime=device)
        device.moving.clear()
        for version in range(1, 12):
            capture.capture(version, final=True)
        device.moving.set()
        self.arrived(page, 4)
        assert isinstance(self.state(page, 11), str)
        assert not capture.problem
        capture.close()

    def test_a_broken_device_does_not_end_the_writer(self, device: Any, page: PageWriter) -> None:
        model = self.model()
        capture = LocalCapture(model, page=page, runtime=device)
        device.broken = True
        capture.capture(1, final=True)
        capture.close()
        assert isinstance(self.state(page, 1), str)
