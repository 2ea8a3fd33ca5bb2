"""Buffers on a made-up device: captured in the order of its work, and written when they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.fake_device import SIDE, TRAINING, FakeDevice, Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.pages import read
from tests.making import making
from tests.waiting import until
from ttp.adapters.torch.device import staging
from ttp.adapters.torch.device.accelerator import poll
from ttp.adapters.torch.local_state import buffers
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.image import LocalState, decode
from ttp.adapters.torch.local_state.rng import RngState
from ttp.processor.local_state import pages
from ttp.processor.local_state.pages import PageWriter, read_page

LARGE = buffers.LARGE_BYTES // 4


class Page:
    """A page of a model, with a reader."""

    def __init__(self, directory: Path, runtimes: list[Any], model: Any) -> None:
        self.writer, self.model = PageWriter(directory / "pages", 0), model
        self.capture = LocalCapture(model, page=self.writer, runtimes=runtimes)

    def close(self) -> None:
        self.capture.close()
        self.writer.close()

    def found(self, version: int) -> pages.Page | str:
        return read_page(self.writer.path.parent, 0, version, 0)

    def state(self, version: int) -> LocalState | str:
        found = self.found(version)
        if isinstance(found, pages.Page):
            return decode(found.data) if found.final else "it is not final"
        return found

    def arrived(self, version: int) -> LocalState:
        until(lambda: not isinstance(self.state(version), str), 30, lambda: self.state(version), 0.001)
        state = self.state(version)
        assert not isinstance(state, str)
        return state


class Example(Page):
    """One of a model with buffers of all kinds on a device, and one that is on the host."""

    def __init__(self, directory: Path, device: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model.register_buffer("mask", torch.ones(LARGE))
        model.register_buffer("strided", torch.arange(6.0)[::2])
        for buffer in model.buffers():
            device.device.put(buffer)
        model.register_buffer("counter", torch.tensor(7))
        super().__init__(directory, [device], model)

    def step(self, version: int) -> dict[str, Any]:
        """Queue one update in which every buffer changes in place. Returns their values afterwards."""
        expected = self.change(version)
        self.capture.capture(version, final=True)
        return expected

    def change(self, version: int) -> dict[str, Any]:
        with torch.no_grad():
            self.model[1].running_mean.fill_(version)
            self.model.mask.fill_(version)
            self.model.strided.add_(1)
            self.model.counter += 1
        strided = torch.arange(6.0)[::2] + version
        return {
            "1.running_mean": torch.full((3,), float(version)),
            "mask": torch.full((LARGE,), float(version)),
            "strided": strided,
            "counter": torch.tensor(7 + version),
        }

    def check(self, version: int, expected: dict[str, Any]) -> None:
        found = self.arrived(version)
        assert set(found.buffers) == {name for name, _ in self.model.named_buffers()} and found.rng
        for name, tensor in expected.items():
            assert torch.equal(found.buffers[name], tensor), (version, name)


class TestBuffers:
    @pytest.fixture(params=[TRAINING, SIDE])
    def device(self, request: Any) -> Any:
        return FakeRuntime(order=request.param)

    @pytest.fixture
    def page(self, tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
        monkeypatch.setattr(staging, "_TWIN_BYTES", LARGE)  # a large buffer takes several turns
        made = Example(tmp_path, device)
        with Watching(device.device):
            yield made
        device.device.release()
        device.moving.set()
        made.close()
        assert not device.device.sins

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Callable[..., Page]]:
        with making(partial(Page, tmp_path), Page.close) as make:
            yield make

    def test_they_arrive_as_they_were_however_far_the_training_is(self, device: Any, page: Example) -> None:
        device.moving.clear()
        expected = {version: page.step(version) for version in (1, 2, 3)}
        page.model.counter += 100
        assert isinstance(page.state(1), str)
        device.moving.set()
        for version in (3, 2, 1):
            page.check(version, expected[version])
        assert not page.capture.problem

    def test_pages_are_those_of_versions_that_the_device_has_reached(self, device: Any, page: Example) -> None:
        """The host is three updates ahead of a device that hangs. The page of the device's version is kept."""
        expected = page.step(1)
        page.arrived(1)
        device.device.hang()
        for version in (2, 3, 4):
            page.step(version)
        device.device.run()
        page.check(1, expected)
        assert all(isinstance(page.state(version), str) for version in (2, 3, 4))

    def test_in_the_steady_state_nothing_is_set_aside_and_nobody_waits(self, device: Any, page: Example) -> None:
        for version in range(1, 10):
            expected = page.step(version)
        page.check(9, expected)
        device.device.seal()
        with device.device.no_waiting():
            for version in range(10, 14 + staging._POOL):  # all memory is used again
                if version % 10 == 0:
                    page.model[1].register_buffer("running_mean", device.device.put(torch.zeros(3)))
                page.check(version, page.step(version))
        assert not device.device.waits

    def whole_update(self, page: Example, version: int, at_gate: Any = None) -> dict[str, Any]:
        """Queue an update as a training does, with a capture in the backward pass, one at the gate and a final one."""
        expected = page.change(version)
        page.capture.capture(version, final=False)
        if at_gate is not None:
            at_gate()
        page.capture.look_again(version)
        page.capture.capture(version, final=True)
        return expected

    def test_what_has_not_changed_since_the_backward_pass_is_not_copied_again(self, device: Any, page: Example) -> None:
        for version in range(1, 7):
            page.check(version, self.whole_update(page, version))
        finished: list[tuple[int, bool]] = []
        page.capture.on_written = lambda version, final: finished.append((version, final))
        device.log.clear()
        page.check(7, self.whole_update(page, 7))
        until(lambda: (7, True) in finished, 30)
        assert device.log.count("side") == 1 + LARGE * 4 // staging._TWIN_BYTES  # the small ones, and a large one
        assert finished == [(7, False), (7, True)]
        finished.clear()
        page.change(8)
        page.capture.capture(8, final=False)
        until(lambda: finished == [(8, False)], 30)
        device.device.hang()
        page.capture.capture(8, final=True)
        device.device.run()
        assert not poll(lambda: len(finished) > 1, 0.1), "it is not final before the device has finished it"
        device.device.release()
        until(lambda: finished == [(8, False), (8, True)], 30)

    @pytest.mark.parametrize("what", ["buffer", "numbers"])
    def test_what_changes_at_the_gate_is_copied_again(self, page: Example, what: str) -> None:
        def act() -> None:
            page.model[1].num_batches_tracked.add_(1) if what == "buffer" else torch.rand(1)

        for version in range(1, 8):
            expected = self.whole_update(page, version, act if version == 7 else None)
        expected |= {"1.num_batches_tracked": page.model[1].num_batches_tracked}
        drawn = torch.rand(4)
        page.check(7, expected)
        RngState([]).restore(page.arrived(7).rng)
        assert torch.equal(torch.rand(4), drawn)

    def test_a_buffer_whose_writes_torch_does_not_count_is_copied_each_time(self, device: Any, page: Example) -> None:
        def uncounted() -> None:
            page.model[1].running_var.data.add_(1)

        for version in range(1, 9):
            expected = self.whole_update(page, version, uncounted)
            expected |= {"1.running_var": torch.full((3,), 1.0 + version)}
            page.check(version, expected)

    def test_a_host_that_is_ahead_while_it_learns(self, make: Callable[..., Page], device: Any) -> None:
        """What the first captures show is not known before they have arrived."""
        model: Any = nn.Module()
        model.register_buffer("b", device.device.put(torch.zeros(3)))
        page = make([device], model)
        with Watching(device.device):
            for version in range(1, 10):
                device.moving.clear() if version % 3 == 1 else None
                page.capture.capture(version, final=False)
                if version > 3:
                    model.b.data.add_(1)  # torch does not count it
                page.capture.capture(version, final=True)
                if version % 3 == 0:
                    device.moving.set()
                    for each in (version, version - 1, version - 2):
                        assert page.arrived(each).buffers["b"].tolist() == [max(0, each - 3)] * 3

    @pytest.mark.parametrize("learning", [True, False])
    def test_a_large_one_whose_writes_torch_does_not_count(self, device: Any, page: Example, learning: bool) -> None:
        """It is noticed in the first updates; of a graph that is replayed, because the graph was captured.

        Forward and backward pass run once for the capture of the graph, and call the hooks: nothing becomes part of it.
        """
        for version in range(1, 11):
            if version == 8 and not learning:
                device.device.capturing = True
                page.capture.capture(version, final=False)
                device.device.capturing = False
            page.capture.capture(version, final=False)
            if version > 8 or learning:
                page.model.mask.data.fill_(version)
            page.capture.capture(version, final=True)
            expected = float(version) if version > 8 or learning else 1.0
            page.check(version, {"mask": torch.full((LARGE,), expected)})
        assert not page.capture.problem

    def test_several_backward_passes_of_a_version_without_buffers(self, make: Callable[..., Page], device: Any) -> None:
        page = make([device], nn.Linear(2, 2))
        device.moving.clear()
        for _ in range(3):
            torch.rand(1)
            page.capture.capture(1, final=False)
            drawn = torch.rand(4)
            RngState([]).restore(read(page.writer, 1).rng)
            assert torch.equal(torch.rand(4), drawn)
        device.moving.set()

    def test_a_buffer_made_in_inference_mode_is_copied_each_time(self, page: Example, device: Any) -> None:
        with torch.inference_mode():
            page.model[1].register_buffer("running_var", device.device.put(torch.zeros(3)))
        for version in range(1, 9):

            def write(version: int = version) -> None:
                with torch.inference_mode():
                    page.model[1].running_var.fill_(version)

            expected = self.whole_update(page, version, write)
            page.check(version, expected | {"1.running_var": torch.full((3,), float(version))})
        assert not page.capture.problem

    def test_buffers_of_another_form_are_described_as_such(self, device: Any, page: Example) -> None:
        page.step(1)
        page.model[1].register_buffer("running_mean", device.device.put(torch.full((5,), 6.0)))
        page.capture.capture(2, final=True)
        assert page.arrived(2).buffers["1.running_mean"].tolist() == [6.0] * 5

    def test_a_large_constant_one_is_brought_once(self, device: Any, page: Example) -> None:
        for version in range(6):
            page.capture.capture(version, final=True)
            page.arrived(version)
        before = device.device.allocated
        device.log.clear()
        for version in range(6, 17):
            page.capture.capture(version, final=True)
            page.arrived(version)
        assert device.device.allocated == before
        assert device.log.count("side") == 11, "the small ones, each time"

    def test_without_any_buffer_it_waits_for_the_device_too_unless_the_host_is_not_ahead(
        self, make: Callable[..., Page], device: Any
    ) -> None:
        """So a rank that dies right after its gradients have left has a page of the version that its peers make."""
        page = make([device], nn.Linear(2, 2))
        capture = page.capture
        told: list[tuple[int, bool]] = []
        capture.on_written = lambda version, final: told.append((version, final))

        def settled(version: int) -> bool:
            arrivals: Any = capture._pages
            return (version, True) in told and arrivals._given == arrivals._done

        for version in range(1, 7):
            device.moving.clear()
            capture.capture(version, final=True)
            assert isinstance(page.found(version), str)
            device.moving.set()
            until(partial(settled, version), 30)
        device.moving.clear()
        torch.rand(1)
        capture.capture(7, final=False)
        assert isinstance(page.found(7), pages.Page)
        capture.capture(7, final=True)
        torch.rand(1)
        capture.capture(8, final=False)
        assert isinstance(page.found(8), str), "the host is ahead: older pages are needed"
        assert told[-1] == (6, True), "it is not told to others before the device has come so far"
        device.moving.set()
        until(lambda: told[-3:] == [(7, False), (7, True), (8, False)], 30)
        assert isinstance(page.found(8), pages.Page)

    def test_a_device_that_does_not_move_does_not_stop_training(
        self, device: Any, page: Example, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "_PATIENCE_S", 0.001)
        device.moving.clear()
        for version in range(1, 20):
            page.step(version)
        device.moving.set()
        page.arrived(staging._COPIES_MAX)
        assert isinstance(page.state(19), str) and not page.capture.problem

    def test_a_broken_device_does_not_end_the_writer(self, device: Any, page: Example) -> None:
        page.capture.capture(1, final=True)
        device.device.broken = True
        page.capture.capture(2, final=True)
        page.capture.close()
        assert isinstance(page.state(2), str)

    @pytest.mark.supports("several devices in a process")
    def test_buffers_of_several_devices_arrive_together(self, make: Callable[..., Page], device: Any) -> None:
        other = FakeRuntime(FakeDevice(beside=device.device))
        model: Any = nn.Module()
        model.register_buffer("one", device.device.put(torch.ones(3)))
        model.register_buffer("two", other.device.put(torch.full((LARGE,), 2.0)))
        model.register_buffer("three", torch.full((2,), 3.0))
        page = make([device, other], model)
        other.moving.clear()
        with Watching(device.device, other.device):
            page.capture.capture(1, final=True)
        time.sleep(0.01)
        assert isinstance(page.found(1), str)
        other.moving.set()
        got = page.arrived(1).buffers
        assert [set(got[name].tolist()) for name in ("one", "two", "three")] == [{1.0}, {2.0}, {3.0}]
