"""A rank's answer to a freeze: all of it from one moment, whatever the threads do meanwhile."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

import pytest

from tests.processor.fake_source import FakeSource, alone, no_thread
from tests.waiting import until
from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.events import Quiet
from ttp.launch.leases import Leases
from ttp.processor import state_inspector
from ttp.processor.processor import Processor
from ttp.processor.state_inspector import Seen

CLOSE = act.CloseGate(1.0, hurry=True)
PATIENCE_S = 60.0


class SlowToLook(FakeSource):
    """A source whose first look, or first inspection, takes until ``seen``. Its gradient is always ready."""

    def __init__(self, what: str = "look") -> None:
        self.looking, self.seen, self.slow, self.inspections = threading.Event(), threading.Event(), what, 0

    def post_step_done(self) -> bool:
        return self._read("look")

    def gradient_ready(self) -> bool:
        return True

    def inspect(self, version: Version) -> Seen:
        self.inspections += 1
        self._read("inspection")
        return (), (f"inspection {self.inspections}",)

    def _read(self, what: str) -> bool:
        if what == self.slow and not self.looking.is_set():
            self.looking.set()
            assert self.seen.wait(PATIENCE_S)
        return True


@pytest.fixture
def source() -> SlowToLook:
    return SlowToLook()


@pytest.fixture
def processor(source: SlowToLook, tmp_path: Path) -> Processor:
    """Return a frozen processor that has begun to read its state while the training thread was not at the gate."""
    made = alone(source, tmp_path)
    made._inspector.freeze()
    assert source.looking.wait(PATIENCE_S)
    return made


def answers(processor: Processor) -> list[Quiet]:
    """Return all answers, after the last one has come."""
    said: list[Quiet] = []
    for _ in range(3):  # a look may ask for one more
        assert processor._inspector._worker.wait_done(PATIENCE_S)
    while True:
        try:
            event = processor._inbox.get_nowait()
        except queue.Empty:
            return said
        assert not isinstance(event, Quiet)
        quiet = getattr(event, "quiet", None)
        if isinstance(quiet, Quiet):
            said.append(quiet)


def comes_to_the_gate(processor: Processor) -> threading.Thread:
    parked = threading.Event()
    told = processor.gate._on_quiet

    def on_quiet() -> None:
        told()
        parked.set()

    processor.gate._on_quiet = on_quiet
    thread = threading.Thread(target=processor.begin_update, daemon=True)
    thread.start()
    assert parked.wait(PATIENCE_S)
    return thread


def test_who_comes_to_the_gate_while_somebody_looks_is_not_said_to_hang(
    processor: Processor, source: SlowToLook
) -> None:
    training = comes_to_the_gate(processor)
    source.seen.set()
    said = answers(processor)
    assert said, "it is answered"
    assert all(quiet.parked and quiet.has_gradient for quiet in said)
    processor.gate.open()
    training.join(PATIENCE_S)


def test_an_update_by_order_that_begins_meanwhile_is_said_to_run(processor: Processor, source: SlowToLook) -> None:
    training = comes_to_the_gate(processor)
    assert processor.gate.admit()
    training.join(PATIENCE_S)
    source.seen.set()
    said = answers(processor)
    assert said
    assert all(quiet.phase is m.Phase.UPDATING for quiet in said), "the version may be left at any moment"


def test_of_a_gate_that_was_opened_meanwhile_nothing_is_said(processor: Processor, source: SlowToLook) -> None:
    processor.gate.open()
    processor.begin_update()
    processor.end_update()
    source.seen.set()
    assert answers(processor) == []
    assert processor.gate.version == Version(1)


def test_what_nothing_disturbs_is_said_once(processor: Processor, source: SlowToLook) -> None:
    source.seen.set()
    (quiet,) = answers(processor)
    assert (quiet.version, quiet.phase, quiet.parked, quiet.has_gradient) == (0, m.Phase.IDLE, False, False)


class Watched(threading.Event):
    """An event that records when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


def test_who_waits_for_its_peers_with_its_gradient_has_a_moment_to_come_to_the_gate(
    source: SlowToLook, tmp_path: Path
) -> None:
    """A rank in the barrier polls the gate. If it counted as hung, a version that it can make would be lost."""
    source.seen.set()
    made = alone(source, tmp_path)
    made._inspector._came = came = Watched()
    in_barrier, admitted = threading.Event(), []

    def meet() -> None:
        with made.gate.nearby():
            in_barrier.set()
            assert came.awaited.wait(PATIENCE_S)
            admitted.append(made.gate.stand_aside())

    training = threading.Thread(target=meet, daemon=True)
    training.start()
    assert in_barrier.wait(PATIENCE_S)
    made._inspector.freeze()
    assert came.awaited.wait(PATIENCE_S), "it is waited for"
    said = answers(made)
    assert said
    assert all(quiet.parked and quiet.has_gradient for quiet in said)
    assert made.gate.admit()
    training.join(PATIENCE_S)
    assert admitted == [True]
    assert not made.gate.state().near, "the next answer does not wait"


def test_who_hangs_there_is_answered_for_all_the_same(
    source: SlowToLook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_inspector, "COMES_S", 0.01)
    source.seen.set()
    made = alone(source, tmp_path)
    with made.gate.nearby():
        made._inspector.freeze()
        (quiet,) = answers(made)
    assert not quiet.parked


def test_the_gate_closes_although_the_run_directory_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(Leases, "grant", lambda *_: hangs.wait(PATIENCE_S))
    processor = alone(SlowToLook(), tmp_path)
    processor._try(CLOSE)
    assert processor.gate.closed
    hangs.set()


def test_what_cannot_be_done_keeps_nothing_after_it_from_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = alone(SlowToLook(), tmp_path)
    monkeypatch.setattr("ttp.processor.link.connecting.aside", no_thread)
    processor._try(act.Connect(start_controller=False))
    processor._try(CLOSE)
    assert processor.gate.closed
    told = processor._inbox.get_nowait()
    assert isinstance(told, ev.StreamDown) and "new thread" in told.reason


def test_a_look_that_hangs_is_left_behind_by_the_next_freeze(processor: Processor, source: SlowToLook) -> None:
    processor._inspector.thaw()
    processor._inspector.freeze()
    (quiet,) = answers(processor)
    assert quiet.post_step_done
    source.seen.set()


def test_in_one_freeze_nothing_is_looked_at_twice_at_once(processor: Processor, source: SlowToLook) -> None:
    worker = processor._inspector._worker._thread
    processor._inspector.freeze()
    assert processor._inspector._worker._thread is worker
    source.seen.set()
    assert answers(processor)


def test_without_a_thread_to_save_in_it_is_said_that_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = m.SaverOrder(Rank(0), (), How.AS_IS, (), job_state=False)
    save = m.Save(Rank(0), 1, "i", 3, Version(1), ".draft", order, "")
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    processor = alone(SlowToLook(), tmp_path)
    processor._try(act.StartSave(save))
    told = processor._inbox.get_nowait()
    assert isinstance(told, ev.Worked) and isinstance(told.result, m.SaveFailed) and told.result.generation == 3
    assert "new thread" in told.result.text
    monkeypatch.setattr(threading.Thread, "start", start)
    processor._try(act.StartSave(save))
    assert isinstance(processor._inbox.get(timeout=PATIENCE_S), ev.Worked), "it is tried again"


def test_where_no_thread_can_be_started_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    made = alone(FakeSource(), tmp_path)
    made.begin_update()
    made.gate.close()
    made.end_update()  # which a controller waits for: it will do without this rank
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "cannot tell the controller" in told.getMessage()
    made._inspector.thaw()
    made.begin_update()
    made.end_update()
    assert (made.gate.version, made.gate.state().phase) == (2, m.Phase.IDLE)
    made.close()


def test_an_error_at_every_turn_uses_up_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = alone(FakeSource(), tmp_path)
    turns: list[float] = []

    def fails(event: object, now: float) -> list[act.Action]:
        turns.append(now)
        raise AssertionError("a turn that always fails")

    monkeypatch.setattr(processor._machine, "on_event", fails)
    monkeypatch.setattr(processor._machine, "deadline", lambda: 0.0)
    owner = threading.Thread(target=processor._run)
    owner.start()
    until(lambda: len(turns) > 3)
    processor._closed = True
    owner.join(PATIENCE_S)
    assert turns[3] - turns[0] >= 0.02 + 0.04 + 0.08, turns


def test_a_state_that_was_read_before_the_gate_closed_is_no_answer(tmp_path: Path) -> None:
    """The training thread has ended an update under the closed gate, and tells so after a thaw and another freeze."""
    processor = alone(FakeSource(), tmp_path)
    processor._inspector.on_quiet(asked=True)
    assert processor._inspector._worker.wait_done(PATIENCE_S)
    processor.begin_update()
    processor._try(CLOSE)
    assert [quiet.phase for quiet in answers(processor)] == [m.Phase.UPDATING]
    processor.end_update()
    assert [(quiet.phase, quiet.version) for quiet in answers(processor)] == [(m.Phase.IDLE, 1)]


def test_an_inspection_that_ends_after_a_thaw_is_not_the_answer_to_the_next_freeze(tmp_path: Path) -> None:
    """The state has changed in between, perhaps back to the same version by a repair."""
    source = SlowToLook("inspection")
    processor = alone(source, tmp_path)
    processor._try(CLOSE)
    assert source.looking.wait(PATIENCE_S)
    processor._try(act.OpenGate())
    source.seen.set()
    assert answers(processor) == []
    processor._try(CLOSE)
    (quiet,) = answers(processor)
    assert quiet.bad == ("inspection 2",)
