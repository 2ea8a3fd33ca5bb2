"""Elastic training of a program for MindIO through the checkpoint: fewer ranks when one dies, more when a host
comes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.compat import sharded_program
from tests.compat.jobs import Job as Processes
from tests.compat.test_hot_switch import prepared, told
from tests.compat.test_recover import PROGRAM, notes, story
from tests.e2e.harness import Job
from tests.waiting import until
from ttp.compat.mindio.placing import tell_children
from ttp.errors import EXIT_SAVED
from ttp.mindio.handlers import Manager

STEPS, WAIT_S = 20, 120
TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # not in its stubs

pytestmark = [pytest.mark.timeout(4 * WAIT_S), pytest.mark.xdist_group("ttp")]


class Told:
    """A manager that records what it is told, and answers as a test says."""

    def __init__(self, job: Job, token: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.changed = threading.Condition()
        self.manager = Manager(
            "127.0.0.1", job.port, token, wait_s=60.0,
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


def chosen(desk: Told, faults: dict[int, int], strategy: str, times: int, go: Path) -> None:
    """Do the handshake of one fault, in which this strategy is chosen. ``go``: then release the ranks that wait."""
    assert desk.hear("faults", 2 * times - 1)[1].keys() >= faults.keys()
    go.touch()
    assert desk.manager.stop_train(faults) in (0, 1)  # 1: that is no news
    assert desk.hear("stopped", times)[1] == 0
    assert desk.manager.on_global_rank(faults) == 0
    offered = desk.hear("strategies", times)[2]
    assert offered[:3] == ["exit", "dump", strategy]
    assert desk.manager.change_strategy(strategy) == 0


def test_a_launch_with_fewer_ranks_is_what_the_manager_has_chosen(job: Callable[..., Processes]) -> None:
    """Success is reported after that launch has made a step."""
    env = {"TTP_ELASTIC": "on", "TTP_ABANDONED_S": "60"}
    this = prepared(job, "downgrade", options={"enable_zit": True}, env=env)
    this.processes[3].kill()
    assert [process.wait(WAIT_S) for process in this.processes[:4]] == [EXIT_SAVED] * 3 + [-signal.SIGKILL]
    assert told(this, "report_strategies")[0][:3] == ["exit", "dump", "downgrade"], this.story()
    assert told(this, "report_result") == [] and this.of("rename")
    this.base |= {"WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert [process.wait(WAIT_S) for process in [this.launch(rank) for rank in range(2)]] == [0, 0], this.story()
    this.until(lambda: told(this, "report_result") == [("downgrade", 0)])


def test_a_program_that_allows_it_is_offered_no_fewer_ranks_by_a_job_that_is_not_elastic(
    job: Callable[..., Processes],
) -> None:
    this = prepared(job, "dump", options={"enable_zit": True})
    this.processes[3].kill()
    assert [process.wait(WAIT_S) for process in this.processes[:3]] == [EXIT_SAVED] * 3, this.story()
    assert told(this, "report_strategies")[0] == ["exit", "dump", "recover"], this.story()


@pytest.mark.slow
def test_a_manager_chooses_fewer_ranks_and_then_all_of_them_again(make_job: Callable[..., Job]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    flags = ["--nnodes", "2", "--elastic", "--mindio", "--rdzv-conf", "last_call_timeout=8"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    dies = {"rank": 3, "step": 5, "at": "data", "after": "go", "warm": False}
    waits = {"rank": 0, "step": 12, "at": "data", "after": "up", "warm": False, "what": "nothing"}
    job = make_job(
        script=PROGRAM, ranks=4, local=2, steps=STEPS, nodes=[flags, flags], hosts=["one", "two"], faults=[dies, waits]
    )
    saves = {"TTP_SAVE_DIR": str(job.directory / "checkpoints")}
    job.env = {"PYTHONPATH": str(job.directory), "TTP_TOKEN": "secret", "JOB_ZIT": "1", **saves}
    tell_children(job.env)
    job.start()
    until(
        lambda: all(any(note["what"] == "train" for note in notes(job, rank)) for rank in range(4)),
        WAIT_S,
        lambda: story(job),
    )
    desk = Told(job, "secret")
    try:
        (job.directory / "go").touch()
        chosen(desk, {3: 1}, "downgrade", 1, job.directory / "go")
        until(lambda: any(process.poll() is not None for process in job.processes), WAIT_S, lambda: story(job))
        (left,) = (index for index, process in enumerate(job.processes) if process.poll() is not None)
        assert job.processes[left].wait() == EXIT_SAVED and "this host is drained" in story(job), story(job)
        assert desk.hear("result") == ("result", 0, "downgrade"), story(job)
        job.processes[left] = job.launch(left)
        chosen(desk, {}, "upgrade", 2, job.directory / "up")
        assert [process.wait(WAIT_S) for process in job.processes] == [0, 0], story(job)
        assert desk.hear("result", 2) == ("result", 0, "upgrade"), story(job)
    finally:
        desk.manager.close()
    ends = [notes(job, rank)[-1].get("digest") for rank in range(4)]
    assert ends == sharded_program.unbroken((4, 4), (11, 2), (STEPS, 4)), story(job)
    assert [note["step"] for note in notes(job, 0) if note["what"] == "train"] == [0, 4, 11], story(job)
