"""An outside manager: its messages, its choices, and a job that is paused and goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.handlers.jobs import Job, after
from ttp.errors import EXIT_SAVED
from ttp.mindio.handlers import Manager


class Told:
    """A manager that records what it is told, and answers as a test says."""

    def __init__(self, job: Any, wait_s: float = 60.0, token: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.changed = threading.Condition()
        self.manager = Manager(
            "127.0.0.1", job.port, token, wait_s=wait_s,
            report_fault_ranks=lambda faults, codes: self.add("faults", faults, codes),
            report_stop_complete=lambda code, text, faults: self.add("stopped", code, faults),
            report_strategies=lambda faults, strategies: self.add("strategies", faults, strategies),
            report_result=lambda code, text, faults, strategy: self.add("result", code, strategy),
        )  # fmt: skip
        self.manager.start()
        assert self.manager.wait_attached(60)

    def add(self, *call: Any) -> None:
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def hear(self, what: str, times: int = 1) -> tuple[Any, ...]:
        def heard() -> list[tuple[Any, ...]]:
            return [call for call in self.calls if call[0] == what]

        with self.changed:
            assert self.changed.wait_for(lambda: len(heard()) >= times, 60), self.calls
            return heard()[times - 1]


@pytest.fixture
def told() -> Iterator[Any]:
    managers: list[Told] = []

    def make(*args: Any, **kwargs: Any) -> Told:
        managers.append(Told(*args, **kwargs))
        return managers[-1]

    yield make
    for one in managers:
        one.manager.close()


def trains(job: Job, step: int = 2) -> None:
    job.until(lambda: all(len(job.of("step").get(r, [])) >= step for r in range(job.ranks)))


def test_the_manager_chooses_to_repair(job: Any, told: Any) -> None:
    """It repeats a notice, chooses an impossible strategy, and gets the result after the job's next step."""
    running: Job = job(ranks=2, steps=60, options={"step_s": 0.05}, faults=[{"rank": 1, "step": 40, "what": "memory"}])
    running.start()
    trains(running)
    desk = told(running)
    assert desk.manager.high_availability()
    assert desk.hear("faults") == ("faults", {1: 0}, {1: "1234"})
    assert desk.manager.stop_train({1: 0}) == 0 and desk.manager.stop_train({1: 0}) == 0
    assert desk.hear("stopped") == ("stopped", 0, {1: 0})
    assert desk.manager.on_global_rank({1: 0}) == 0
    assert desk.hear("strategies") == ("strategies", {1: 0}, ["exit", "dump", "retry"])
    assert desk.manager.change_strategy("recover") == 0
    assert desk.hear("result") == ("result", 406, "recover")
    assert desk.manager.change_strategy("retry") == 0
    assert desk.hear("result", 2) == ("result", 0, "retry")
    assert running.wait() == [0, 0]
    assert {notes[0]["value"] for notes in running.of("done").values()} == {after(60)}
    assert [call[0] for call in desk.calls] == ["faults", "stopped", "faults", "strategies", "result", "result"]


def test_after_a_kill_the_manager_has_it_saved_and_ended(job: Any, told: Any) -> None:
    running: Job = job(ranks=2, steps=10_000, options={"step_s": 0.05}).start()
    trains(running)
    desk = told(running)
    running.workers[0].kill()
    desk.hear("faults")
    assert desk.manager.stop_train({0: 1}) == 0
    assert desk.hear("stopped") == ("stopped", 0, {0: 1})
    assert desk.manager.on_global_rank({0: 1}) == 0
    assert desk.hear("strategies") == ("strategies", {0: 1}, ["exit", "dump"])
    assert desk.manager.change_strategy("dump") == 0
    assert desk.hear("result") == ("result", 0, "dump")
    assert desk.manager.change_strategy("exit") == 0
    assert running.wait() == [-signal.SIGKILL, EXIT_SAVED]
    assert running.order(1, "raised", "next") == ["save", "rename", "exit"]


def test_a_pause_is_at_the_same_step_everywhere_and_ends(job: Any, told: Any) -> None:
    running: Job = job(ranks=2, steps=60, options={"step_s": 0.02}).start()
    trains(running)
    desk = told(running)
    assert desk.manager.change_strategy("continue") == 1  # of what?
    assert desk.manager.stop_train({}, "pause", 30) == 0 and desk.manager.stop_train({}, "pause", 30) == 0
    assert desk.hear("stopped") == ("stopped", 0, {})
    steps = {notes[-1]["step"] for notes in running.of("step").values()}
    assert steps == {notes[0]["step"] for notes in running.of("sync").values()} and len(steps) == 1
    assert desk.manager.change_strategy("continue") == 0
    assert desk.hear("result") == ("result", 0, "continue")
    assert running.wait() == [0] * 2
    assert desk.manager.prepare_action("hot switch", {0: 1}) == 1 == desk.manager.prepare_action("switch", {0: 1})


@pytest.mark.slow
def test_a_manager_that_stumbles_is_not_waited_for(job: Any, told: Any) -> None:
    running: Job = job(ranks=2, steps=10_000, options={"step_s": 0.05}).start()
    trains(running)
    desk = told(running)
    desk.add = lambda *call: 1 / 0
    running.workers[1].kill()
    assert running.wait() == [EXIT_SAVED, -signal.SIGKILL]
    assert set(running.of("save")) == {0}
