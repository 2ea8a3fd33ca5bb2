"""What ``CudaRuntime`` asks of CUDA, which cannot run here: with several devices, and if the driver refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttp.adapters.torch.device import cuda
from ttp.adapters.torch.device.stream_hold import StreamHold

OURS, FIRST = 3, 0


class Library:
    """The part of ``torch.cuda`` that is used; notes the current device of each call that CUDA relates to one.

    Another thread captures a CUDA graph: that breaks at a call of a thread whose mode is not relaxed.
    """

    def __init__(self) -> None:
        self.current = FIRST
        self.asked_on: list[int] = []
        self.relaxed, self.capture_is_whole = False, True

    def asked(self) -> bool:
        self.asked_on.append(self.current)
        self.capture_is_whole &= self.relaxed
        return True

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - its name in the driver
        mode._obj.value, self.relaxed = 2 * self.relaxed, mode._obj.value == 2
        return 0

    @contextlib.contextmanager
    def device(self, device: int | torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index if isinstance(device, torch.device) else device
        yield
        self.current = before

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.asked()
        yield
        self.asked()

    def current_stream(self, device: Any) -> Any:
        return SimpleNamespace(cuda_stream=0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    library: Any = Library()
    event = SimpleNamespace(record=lambda _: library.asked(), query=library.asked, synchronize=library.asked)
    library.Event = lambda blocking: event
    library.Stream = lambda device, priority: f"torch's, priority {priority}"
    library.ExternalStream = lambda handle, device: f"own, {handle}"
    monkeypatch.setattr(cuda, "_cuda", library)
    monkeypatch.setattr(cuda, "_own", {})
    monkeypatch.setattr(cuda, "driver", lambda: library)
    cuda._exchange_mode.cache_clear()
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(library, name))
    yield library
    cuda._exchange_mode.cache_clear()


def test_a_thread_asks_with_the_device_of_the_state_as_the_current_one(library: Library) -> None:
    """A thread begins with the first device, which is another rank's: it would make a context there.

    And it leaves a CUDA graph whole that another thread captures meanwhile.
    """
    runtime = cuda.CudaRuntime(torch.device("cuda", OURS))
    event = runtime.event(side=True)
    assert event.query()
    event.synchronize()
    with runtime.on_side():
        pass
    assert library.asked_on == [OURS] * 5 and library.current == FIRST
    assert library.capture_is_whole and not library.relaxed


def test_without_the_driver_of_this_maker_it_asks_all_the_same(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "driver", SimpleNamespace)  # has no such function
    assert cuda.CudaRuntime(torch.device("cuda", OURS)).event(side=True).query()


def test_a_hold_is_on_the_stream_of_its_own_device(library: Library) -> None:
    """The default stream has the same handle on each device: the one of the current device would wait."""
    hold: Any = StreamHold.__new__(StreamHold)
    hold._device, hold._address = torch.device("cuda", OURS), 0
    hold._wait = lambda *_: not library.asked()  # 0: no error
    hold.queue(1)
    assert library.asked_on == [OURS]


def test_all_rescues_of_a_device_have_one_stream(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(device: torch.device) -> int:
        made.append(device.index)
        return device.index

    monkeypatch.setattr(cuda, "_make_stream", make)
    for index in (OURS, OURS, FIRST):
        assert cuda.rescue_stream(torch.device("cuda", index)) == f"own, {index}"
    assert made == [OURS, FIRST]


@pytest.mark.parametrize("problem", [OSError("no driver"), AttributeError("too old"), RuntimeError("refused")])
def test_if_the_driver_makes_none_a_stream_of_torch_serves(
    library: Library, problem: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: torch.device) -> int:
        raise problem

    monkeypatch.setattr(cuda, "_make_stream", refuse)
    assert cuda.rescue_stream(torch.device("cuda", OURS)) == "torch's, priority -2"
    assert f"may hang in a failure: {problem}" in caplog.text
