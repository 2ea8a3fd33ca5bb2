"""Ranks that do not die but stop: they are found by what the job does, named, explained, and the job is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]

QUICK = {"TTP_HEARTBEAT_S": "0.1", "TTP_HANG_S": "3", "TTP_ANSWER_S": "2", "JOB_STEP_S": "0.05"}
TIMEOUT_S = 280


def evidence(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(e for e in events if e["kind"] == "evidence" and e["evidence"] == kind)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("hangs")
def test_a_rank_that_hangs_is_named_explained_and_done_without(make_job: MakeJob, unbroken: Unbroken) -> None:
    """A deadlock, a SIGSTOP, a thread that keeps the interpreter lock; and an evaluation, which is none of these."""
    faults = [
        {"id": "evaluate", "ranks": [0, 1, 2], "step": 18, "phase": "data", "action": "pause"},
        {"id": "deadlock", "rank": 1, "step": 22, "phase": "data", "action": "deadlock"},
        {"id": "stop", "rank": 2, "step": 42, "phase": "forward", "action": "stop"},
        {"id": "gil", "rank": 0, "step": 62, "phase": "scheduled", "action": "hold-gil"},
    ]
    job = make_job(ranks=3, steps=66, max_restarts=3, faults=faults, env=QUICK)
    assert job.run(TIMEOUT_S - 40) == 0, job.story()
    incidents = job.incidents()
    assert [evidence(events, "hung")["rank"] for events in incidents] == [1, 2, 0], job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert all(22 + 20 * i <= version <= 23 + 20 * i for i, version in enumerate(job.committed())), job.story()
    stacks = [next(e["text"] for e in events if e["kind"] == "stack") for events in incidents]
    assert "wait_for_ever" in stacks[0]
    assert "stopped" in stacks[1]
    assert "in act" in stacks[2]
    assert job.ttp("verify", str(job.directory / "checkpoints")).returncode == 0
    assert job.results() == unbroken(job)
