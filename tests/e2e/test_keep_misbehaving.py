"""Programs that do not meet the conditions of ``--continuity keep``: they are restarted as without it, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.e2e.test_keep import KEEP, KILL, TIMEOUT_S, again, ways
from ttp.chaos.inspection import checkpoints

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
ANEW = "ranks do not go on in their processes"

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def run(make_job: MakeJob, program: str) -> Job:
    """Run a job whose rank 1 is killed in step 5, and check what holds for every ``program``."""
    env = {"TTP_CONTINUE_S": "5", "JOB_AGAIN": program}
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=[KILL], flags=KEEP, env=env)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job)[0], job.story()
    assert job.committed()[0] == KILL["step"] and job.starts()[-1] == KILL["step"], job.story()
    found = checkpoints([job.directory / "checkpoints"])
    assert found and not any(checkpoint.problems for checkpoint in found), job.story()
    return job


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("end", "train() was called again, and has ended without restoring anything"),
        pytest.param("raise", "train() was called again, and raised ValueError", marks=pytest.mark.slow),
        pytest.param("exit", "", marks=pytest.mark.slow),
        pytest.param("hang", "it did not go on within 5 s", marks=pytest.mark.slow),
        pytest.param("swallow", "it did not go on within 5 s", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_go_on_is_started_anew(make_job: MakeJob, unbroken: Unbroken, program: str, why: str) -> None:
    job = run(make_job, program)
    assert ANEW in job.log.read_text() and why in job.log.read_text(), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["group", "thread"])
def test_what_a_loop_makes_and_leaves_is_no_obstacle(make_job: MakeJob, unbroken: Unbroken, program: str) -> None:
    """Groups that are made in every step are destroyed with the loop. A thread without end keeps its model alive."""
    job = run(make_job, program)
    assert ANEW not in job.log.read_text() and ways(job, 0), job.story()
    assert job.results() == unbroken(job)


def test_a_rank_that_gloo_does_not_wake_is_restarted_at_once(make_job: MakeJob, unbroken: Unbroken) -> None:
    """gloo forgets the thread that waits for a message of which a part was sent when the other end died."""
    half = [{"id": "half", "ranks": [0, 1], "step": 5, "phase": "data", "action": "half"}]
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=half, flags=KEEP, env={"TTP_CONTINUE_S": "60"})
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0, *job.committed()] == [0, 5], job.story()
    assert "a broken collective does not return" in job.log.read_text(), job.story()
    assert job.results() == unbroken(job)
