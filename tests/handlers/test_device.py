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


def test_another_thread_gets_the_device_of_the_training_thread(runtime: Runtime) -> None:
    runtime.set_device(3)
    mine = device.of_this_thread()
    assert mine is not None and mine.index == 3
    seen: list[int] = []

    def handler() -> None:
        seen.append(runtime.current_device())
        with mine.borrowed(aside=False):
            seen.append(runtime.current_device())

    thread = threading.Thread(target=handler)
    thread.start()
    thread.join()
    assert seen == [0, 3] and runtime.log == []


def test_a_save_waits_for_the_last_update_and_for_nothing_that_came_after_it(runtime: Runtime) -> None:
    mine = device.of_this_thread()
    assert mine is not None
    for what in ("update 1", "update 2"):
        runtime.log.append(what)
        mine.updated()
    runtime.log.append("a collective that hangs")
    with mine.borrowed(aside=True):
        runtime.log.append("save")
    assert runtime.log[3:] == ["side waits for update 2", "onto side", "save", "off side"]


def test_a_participant_finds_its_device_with_its_first_update_and_has_its_saves_wait_for_the_last(
    runtime: Runtime,
) -> None:
    part = Participant(RankEnv.from_env({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}), Config(port=1))
    gate = SimpleNamespace(updating=True, closed=False)
    processor: Any = SimpleNamespace(gate=gate, begin_update=lambda: None, end_update=lambda version: None)
    part._processor = processor
    assert part.device_index is None
    runtime.set_device(3)
    part.begin_update()
    runtime.log.append("update 1")
    part.end_update(1)
    assert part.device_index == 3
    for kind in (HandlerKind.SAVE, HandlerKind.REPAIR):
        with part._on_device(kind):
            runtime.log.append(kind.value)
    assert runtime.log == ["update 1", "side waits for update 1", "onto side", "save", "off side", "repair"]


def test_a_job_without_a_device_has_none_and_a_strange_one_hurts_nobody(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.used = False
    assert device.of_this_thread() is None
    monkeypatch.setattr(runtime, "is_initialized", None)
    assert device.of_this_thread() is None and "cannot find out which device" in caplog.text
    monkeypatch.delitem(sys.modules, "torch")
    assert device.of_this_thread() is None
