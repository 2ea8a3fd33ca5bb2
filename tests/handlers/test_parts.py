"""The parts of a participant, without a job around them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from ttp.config import Config, RankEnv
from ttp.core.layout import Rank, Version
from ttp.core.messages import Phase
from ttp.launch.again import Again, NextLaunch
from ttp.mindio.handlers import Ailment, Call, ForcedStop, HandlerKind, NextAction, Participant
from ttp.mindio.handlers.actor import Actor
from ttp.mindio.handlers.loop import Loop
from ttp.mindio.handlers.pause import PausePoint
from ttp.mindio.handlers.seat import Seat
from ttp.mindio.protocol.messages import Act, Acted, RepairWay, RoundKind, Transfer, TypeRanks
from ttp.processor.gate import gate
from ttp.processor.gate.gate import Gate

PATIENCE_S = 60.0


def aside(job: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run the job on a thread of its own; return the thread and what it returned or raised."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(job())
        except Exception as problem:
            came.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


# ---------------------------------------------------------------------------------------------------------------- gate


def test_who_stands_at_the_gate_can_be_told_to_leave_and_to_come_again() -> None:
    guard = Gate()
    guard.close()
    thread, came = aside(guard.begin_update)
    until(lambda: guard.state().parked)
    guard.halt()
    thread.join(PATIENCE_S)
    assert isinstance(came[0], gate.Halted) and not guard.state().parked
    with pytest.raises(gate.Halted):
        guard.begin_update()
    guard.revive(Version(4))
    guard.open()
    guard.begin_update()
    guard.mark_torn()
    guard.revive(Version(5))
    assert guard.state() == gate.GateState(Version(5), Phase.IDLE, False, closure=1)


# --------------------------------------------------------------------------------------------------------------- pause


def test_nobody_goes_beyond_the_end_of_the_step_that_was_named() -> None:
    """One rank is in step 3, the other at the end of step 4: both stop at the end of step 4."""
    slow, fast = PausePoint(), PausePoint()
    for step in (1, 2):
        slow.pass_by(step)
        fast.pass_by(step)
    fast.pass_by(3)
    assert (slow.hold(2), fast.hold(3)) == (3, 4)

    def two_steps() -> None:
        slow.pass_by(3)
        slow.pass_by(4)

    thread, _ = aside(two_steps)
    other, _ = aside(lambda: fast.pass_by(4))
    assert slow.stand_at(4, PATIENCE_S) and fast.stand_at(4, PATIENCE_S)
    assert not slow.stand_at(5, 0.0)
    slow.release()
    fast.release()
    thread.join(PATIENCE_S)
    other.join(PATIENCE_S)
    assert not thread.is_alive() and not other.is_alive()


def test_the_first_step_of_a_job_that_resumes_has_a_number_that_only_the_training_thread_knows() -> None:
    point = PausePoint()
    assert point.hold(0) == 1 and not point.stand_at(1, 0.0), "a step that never ends is no pause"
    aside(lambda: point.pass_by(1001))
    assert point.stand_at(1, PATIENCE_S)
    point.release()


@pytest.mark.parametrize("early", [False, True])
def test_who_stands_still_can_be_told_to_leave(early: bool) -> None:
    """``early``: the training thread arrives at the end of the step later, after an evaluation for example."""
    point = PausePoint()
    point.halt()  # nobody is held
    point.hold(6)
    if early:
        point.halt()
    thread, came = aside(lambda: point.pass_by(7))
    if not early:
        assert point.stand_at(7, PATIENCE_S)
        point.halt()
    thread.join(PATIENCE_S)
    assert isinstance(came[0], ForcedStop) and "FORCE STOP" in str(came[0])
    point.halt()
    point.restart()
    point.hold(6)
    aside(lambda: point.pass_by(7))
    assert point.stand_at(7, PATIENCE_S)  # what was said before the restart is forgotten
    point.release()


# ---------------------------------------------------------------------------------------------------------------- loop


def test_a_training_thread_waits_for_its_device_and_then_for_its_state() -> None:
    loop = Loop()
    assert not loop.wait_left(0.0)
    loop.leave()
    assert loop.wait_left(0.0)
    thread, came = aside(lambda: (loop.wait_cleaned(lambda: False), loop.wait_resumed(lambda: False)))
    loop.cleaned()
    loop.resume()
    thread.join(PATIENCE_S)
    assert came == [(NextAction.RETRY, NextAction.RETRY)] and not loop.wait_left(0.0)
    loop.leave()
    assert loop.wait_cleaned(lambda: True) is NextAction.EXIT
    assert loop.wait_resumed(lambda: True) is NextAction.EXIT


# --------------------------------------------------------------------------------------------------------------- actor


class Rank0:
    """An actor whose answers go into a list."""

    def __init__(self, run_dir: Path = Path("/nowhere"), **handlers: Callable[[Call], Any]) -> None:
        self.seat = Seat(run_dir)
        self.gate, self.loop, self.pause = Gate(), Loop(), PausePoint()
        self.gate.set_version(Version(5))
        self.answers: list[Acted] = []
        self.halted: list[bool] = []
        self.activity = ""
        self.say = lambda: None
        self.placed: list[HandlerKind] = []
        self.tell = lambda event: self.answers.append(event.report)
        known = {HandlerKind(kind): func for kind, func in handlers.items()}
        processor: Any = self  # a stand-in
        self.actor = Actor(
            Rank(0), processor, known, self.loop, self.pause, self.seat, self.halted.append, self.on_device
        )

    @contextlib.contextmanager
    def on_device(self, kind: HandlerKind) -> Iterator[None]:
        self.placed.append(kind)
        yield

    def act(self, kind: RoundKind, limit_ms: int = 60_000, **more: Any) -> Acted:
        number = len(self.answers)
        self.actor.start(Act(Rank(0), 1, number, kind, Version(5), limit_ms, "retry", **more))
        until(lambda: len(self.answers) > number)
        return self.answers[-1]


def test_after_a_repair_that_led_to_an_older_step_a_pause_is_at_the_end_of_the_next_one() -> None:
    """Else all ranks would train up to the step that they had reached before, and the pause would fail."""
    rank = Rank0()
    rank.pause.pass_by(5000)
    assert rank.act(RoundKind.RESUME).ok and rank.act(RoundKind.HOLD).result == 6


def test_a_rank_makes_way_and_makes_its_groups_in_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts the dead ranks when it sees the mark, and announces where the ranks meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "old")
    files, seen = Again(tmp_path), []
    rank = Rank0(tmp_path, rebuild=lambda call: seen.append((call.error_ranks, os.environ["MASTER_PORT"])))
    assert rank.act(RoundKind.REBUILD, error_ranks=(Rank(1),)).ok  # nobody has said anything
    assert rank.act(RoundKind.MAKE_WAY, limit_ms=50_000).ok and rank.seat.gives_way
    assert 0 < files.marks()[os.getpid()] - time.monotonic() <= 50
    files.announce(NextLaunch(3, (1,), "10.0.0.1", 4711, released=True))
    assert rank.act(RoundKind.REBUILD, error_ranks=(Rank(1),)).ok
    assert seen == [((1,), "old"), ((1,), "4711")] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "3"
    rank.seat.keep()
    assert not files.marks() and not rank.seat.gives_way
    assert not Rank0(tmp_path).act(RoundKind.REBUILD).ok  # without a handler it cannot be done


def test_what_a_handler_is_told() -> None:
    calls: list[Call] = []
    rank = Rank0(save=calls.append, repair=calls.append)
    lists = (TypeRanks(1, (Rank(0), Rank(5))),)
    assert rank.act(RoundKind.SAVE, lists=lists).ok
    transfers = (Transfer(0, Rank(3), Rank(0)), Transfer(1, Rank(4), Rank(0)))
    facts: dict[str, Any] = {"error_ranks": (Rank(0),), "ranks": (Rank(0), Rank(3), Rank(4)), "rebuild": True}
    assert rank.act(RoundKind.REPAIR, way=RepairWay.MEMORY_HIGH, transfers=transfers, **facts).ok
    save, repair = calls
    assert save.as_save_info() == [{"type": 1, "ranks": [0, 5]}] and save.step == 5
    assert repair.as_repair_info() == {
        "type": [0, 1], "repair_type": 1, "src": [3, 4], "dst": [0, 0], "rank_list": [0, 3, 4],
    }  # fmt: skip
    assert (repair.rebuild, repair.error_ranks, repair.repair_type) == (True, (0,), "retry")


def test_a_handler_that_raises_or_takes_too_long_or_is_not_there_is_a_failure_in_words() -> None:
    hangs = threading.Event()

    def full(call: Call) -> None:
        raise OSError("disk full")

    rank = Rank0(save=full, rename=lambda call: hangs.wait(PATIENCE_S), rollback=lambda call: "whatever")
    assert rank.act(RoundKind.SAVE) == Acted(Rank(0), 0, False, 0, Version(5), False, "OSError: disk full")
    assert rank.act(RoundKind.RENAME, limit_ms=1).text == "rename took too long: 1 ms"
    hangs.set()
    assert rank.act(RoundKind.REPAIR).text == "no repair handler is registered"
    assert Rank0().act(RoundKind.RENAME).ok  # there may be nothing to rename
    assert rank.act(RoundKind.REPAIR, way=RepairWay.MEMORY_LOW).ok
    assert rank.act(RoundKind.ROLLBACK).ok


def _only(wait: Callable[[], Any]) -> Callable[[Call], Any]:
    return lambda call: wait()


def test_what_belongs_to_the_training_thread_is_refused_in_a_handler_instead_of_waiting_for_itself() -> None:
    part = Participant(RankEnv.from_env({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}), Config(port=1))
    waits: list[Callable[[], Any]] = [
        part.begin_update, lambda: part.pause_train(1), lambda: part.report_error(Ailment.FATAL),
        part.wait_next_action, part.wait_repair_action, part.leave,
    ]  # fmt: skip
    for wait in waits:
        rank = Rank0(save=_only(wait))
        part._actor, part._processor = rank.actor, rank  # type: ignore[assignment]  # a stand-in for the processor
        answer = rank.act(RoundKind.SAVE)
        assert not answer.ok and "only the training thread may" in answer.text, answer
    assert rank.placed == [HandlerKind.SAVE]


def test_a_stop_waits_for_the_training_thread_and_is_made_once() -> None:
    calls: list[Call] = []
    rank = Rank0(stop=calls.append)
    assert rank.act(RoundKind.STOP, limit_ms=1).ok is False
    rank.loop.leave()
    assert rank.act(RoundKind.STOP).ok and len(calls) == 1
    assert rank.halted == [True]
    rank.act(RoundKind.RESUME)
    assert rank.halted == [True, False]
    until(lambda: not rank.loop.wait_left(0.0))


def test_a_stop_at_once_after_a_resume_waits_until_the_training_thread_has_left_its_loop_again() -> None:
    """Another rank may fail while this one still enters its loop."""
    rank = Rank0()
    rank.loop.leave()
    assert rank.act(RoundKind.STOP).ok
    note: Callable[[Any], None] = rank.tell

    def tell(event: Any) -> None:
        note(event)
        if event.report.serial == 1:
            rank.actor.start(Act(Rank(0), 1, 2, RoundKind.STOP, Version(5), 100))
            time.sleep(0.2)

    rank.tell = tell
    assert rank.act(RoundKind.RESUME).ok
    until(lambda: len(rank.answers) > 2)
    assert not rank.answers[2].ok


@pytest.mark.parametrize(("returned", "ok"), [(0, True), (None, True), (2, True), (1, False)])
def test_what_clean_returns_matters(returned: Any, ok: bool) -> None:
    calls: list[Call] = []

    def clean(call: Call) -> Any:
        calls.append(call)
        return returned

    rank = Rank0(clean=clean)
    answer = rank.act(RoundKind.CLEAN, memory_error=True)
    assert (answer.ok, answer.result) == (ok, (returned or 0) if ok else 0)
    rank.act(RoundKind.CLEAN)
    assert len(calls) == (1 if ok else 2) and calls[0].memory_error


@pytest.mark.parametrize(
    ("way", "spoilt"),
    [(RepairWay.SEND, False), (RepairWay.MEMORY_LOW, False), (RepairWay.MEMORY_HIGH, True), (RepairWay.RECEIVE, True)],
)
def test_a_copy_that_is_written_over_is_of_no_version_until_training_goes_on(way: RepairWay, spoilt: bool) -> None:
    seen: list[Phase] = []
    rank = Rank0(repair=lambda call: seen.append(rank.gate.state().phase))
    rank.loop.leave()
    answer = rank.act(RoundKind.REPAIR, way=way)
    assert answer.ok and answer.torn is spoilt and seen == [Phase.TORN if spoilt else Phase.IDLE]
    assert rank.act(RoundKind.RESUME).torn is False


def test_a_repair_that_loads_says_which_step() -> None:
    rank = Rank0(repair=lambda call: setattr(rank.actor, "loaded", 3))
    assert rank.act(RoundKind.REPAIR, way=RepairWay.LOAD).result == 3
    silent = Rank0(repair=lambda call: None)
    assert "has not reported the step" in silent.act(RoundKind.REPAIR, way=RepairWay.LOAD_REBUILD).text


def test_an_update_that_is_missing_is_made_by_who_stands_in_front_of_it() -> None:
    rank = Rank0()
    assert rank.act(RoundKind.CATCH_UP).ok  # it has made it already
    rank.gate.set_version(Version(4))
    assert "does not wait at the gate" in rank.act(RoundKind.CATCH_UP).text
    rank.gate.close()

    def train() -> None:
        rank.gate.begin_update()
        rank.gate.end_update(Version(5))
        rank.actor.updated()

    thread, _ = aside(train)
    until(lambda: rank.gate.state().parked)
    answer = rank.act(RoundKind.CATCH_UP)
    thread.join(PATIENCE_S)
    assert answer.ok and answer.version == 5
