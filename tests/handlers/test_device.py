"""Handlers run on the device of the training thread, and a save does not wait for work that hangs there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config, RankEnv
from ttp.mindio.handlers import HandlerKind, Participant, device


class Runtime:
    """Has the interface of ``torch.cuda``. As there, every thread begins on device 0 and the default stream."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.log: list[str] = []
        self.used = True
        runtime = self

        class Stream:
            def wait_event(self, event: Any) -> None:
                runtime.log.append(f"side waits for {event.of}")

        class Event:
            def record(self) -> None:
                self.of = runtime.log[-1]

        self.Stream, self.Event = Stream, Event

    def is_initialized(self) -> bool:
        return self.used

    def current_device(self) -> int:
        return getattr(self.here, "device", 0)

    def set_device(self, index: int) -> None:
        self.here.device = index

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("onto side")
        yield
        self.log.append("off side")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=made))
    return made


def test_handlers_run_on_the_device_of_the_training_thread_and_a_save_waits_for_the_last_update_only(
    runtime: Runtime,
) -> None:
    """The device is found with the first update. Another thread, as of a handler, begins on device 0."""
    part = Participant(RankEnv.from_env({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}), Config(port=1))
    gate = SimpleNamespace(updating=True, closed=False, version=1)
    processor: Any = SimpleNamespace(gate=gate, begin_update=lambda: None, end_update=lambda version: None)
    part._processor = processor
    assert part.device_index is None
    runtime.set_device(3)
    for step in (1, 2):
        part.begin_update()
        runtime.log.append(f"update {step}")
        part.end_update(step)
    runtime.log.append("a collective that hangs")
    assert part.device_index == 3

    def handlers() -> None:
        for kind in (HandlerKind.SAVE, HandlerKind.REPAIR):
            with part._on_device(kind):
                runtime.log.append(f"{kind.value} on {runtime.current_device()}")

    thread = threading.Thread(target=handlers)
    thread.start()
    thread.join()
    assert runtime.log[3:] == ["side waits for update 2", "onto side", "save on 3", "off side", "repair on 3"]


def test_a_job_without_a_device_has_none_and_a_strange_one_hurts_nobody(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.used = False
    assert device.of_this_thread() is None
    monkeypatch.setattr(runtime, "is_initialized", None)
    assert device.of_this_thread() is None and "cannot find out which device" in caplog.text
    monkeypatch.delitem(sys.modules, "torch")
    assert device.of_this_thread() is None
