"""Ranks that do not die but stop: the lack of progress reveals them, they are named with their stacks, and the job is
saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job, MakeJob, Unbroken
from ttp.cli.main import main

MakeForked = Callable[..., ForkedJob]

QUICK = {"TTP_HEARTBEAT_S": "0.1", "TTP_HANG_S": "3", "TTP_ANSWER_S": "2", "JOB_STEP_S": "0.05"}
TIMEOUT_S = 280

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("hangs")]


def evidence(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(e for e in events if e["kind"] == "evidence" and e["evidence"] == kind)


def test_a_rank_that_hangs_is_named_explained_and_done_without(make_job: MakeJob, unbroken: Unbroken) -> None:
    """A deadlocked rank is found; a rank that evaluates in ``ttp.paused`` is not taken for one."""
    faults = [
        {"id": "evaluate", "ranks": [0, 1], "step": 18, "phase": "data", "action": "pause"},
        {"id": "deadlock", "rank": 1, "step": 22, "phase": "data", "action": "deadlock"},
    ]
    job = make_job(ranks=2, steps=26, max_restarts=1, faults=faults, env=QUICK)
    assert job.run(TIMEOUT_S - 40) == 0, job.story()
    check(job, unbroken, {1: "wait_for_ever"})


STUCK = [
    {"id": "stop", "rank": 1, "step": 22, "phase": "forward", "action": "stop"},
    {"id": "gil", "rank": 0, "step": 42, "phase": "scheduled", "action": "hold-gil"},
]


@pytest.mark.slow
def test_without_a_launcher_too(forked_job: MakeForked, unbroken: Unbroken) -> None:
    """One rank is stopped, and one holds the interpreter lock. Only the program that started them can end them."""
    job = forked_job(ranks=2, steps=46, faults=STUCK, env=QUICK)
    for hung in (1, 0):
        survivor = job.begin().ranks_now[1 - hung]
        survivor.join(TIMEOUT_S / 4)
        job.kill(hung)
        assert job.end(TIMEOUT_S / 4)[1 - hung] == 75, job.story()
    assert job.live(TIMEOUT_S / 4) == [0, 0], job.story()
    check(job, unbroken, {1: "stopped", 0: "in act"})


@pytest.mark.slow
def test_a_launcher_ends_ranks_that_cannot_end_by_themselves(make_job: MakeJob, unbroken: Unbroken) -> None:
    job = make_job(ranks=2, steps=46, max_restarts=2, faults=STUCK, env=QUICK)
    assert job.run(TIMEOUT_S - 40) == 0, job.story()
    check(job, unbroken, {1: "stopped", 0: "in act"})


@pytest.mark.slow
@pytest.mark.supports("LBFGS")
def test_ranks_that_wait_in_a_closure_go_back_to_where_the_step_began(forked_job: MakeForked, tmp_path: Path) -> None:
    """LBFGS has changed the weights when, in the closure's second evaluation, a rank is killed and later one hangs."""
    env = QUICK | {"JOB_OPTIMIZER": "lbfgs"}
    faults = [
        {"id": "kill", "rank": 1, "step": 2, "phase": "again", "action": "kill"},
        {"id": "deadlock", "rank": 0, "step": 24, "phase": "again", "action": "deadlock"},
    ]
    job = forked_job(ranks=2, steps=27, faults=faults, env=env)
    assert job.live(TIMEOUT_S / 4) == [75, -9], job.story()
    assert job.live(TIMEOUT_S / 4) == [75, 75], job.story()
    assert job.live(TIMEOUT_S / 4) == [0, 0], job.story()
    assert job.committed() == [2, 24] and job.starts() == [0, 2, 24], job.story()
    plans = [e for events in job.incidents() for e in events if e["kind"] == "plan"]
    assert [set(e["how"].values()) for e in plans] == [{"undo"}] * 2
    reference = ForkedJob(tmp_path / "unbroken", 2, 27, env=env, module="tests.e2e.job", protected=False)
    assert reference.live(TIMEOUT_S / 4) == [0, 0], reference.story()
    assert job.results() == reference.results()


def check(job: Job, unbroken: Unbroken, hung: dict[int, str]) -> None:
    """Check that each incident names the hung rank and shows its stack, and that no step was lost."""
    incidents = job.incidents()
    assert [evidence(events, "hung")["rank"] for events in incidents] == list(hung), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert all(22 + 20 * i <= version <= 23 + 20 * i for i, version in enumerate(job.committed())), job.story()
    stacks = [next(e["text"] for e in events if e["kind"] == "stack") for events in incidents]
    assert all(text in stack for text, stack in zip(hung.values(), stacks, strict=True)), stacks
    assert main(["verify", str(job.directory / "checkpoints")]) == 0
    assert job.results() == unbroken(job)
