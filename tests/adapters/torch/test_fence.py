"""Which versions a made-up device has finished."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.adapters.torch.fake_runtime import FakeRuntime
from ttp.adapters.torch.device.accelerator import AHEAD_MAX, Fence


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
