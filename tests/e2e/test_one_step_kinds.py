"""``@ttp.one_step`` with other kinds of updates: scalers, branches, micro-batches; real kills, bits of the unbroken
run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.e2e.test_keep import KEEP, TIMEOUT_S, again
from tests.e2e.test_one_step import repeated

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
STEP_JOB = Path(__file__).with_name("step_job.py")
pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def kill(rank: int, step: int, phase: str, **more: Any) -> dict[str, Any]:
    """Return a fault that waits for all ranks to come so far: survivors in different updates leave their loops."""
    fault = {"id": f"{rank} in {step}", "rank": rank, "step": step, "phase": phase, "action": "kill", "abreast": True}
    return fault | more


def run(make_job: MakeJob, kind: str, faults: list[dict[str, Any]], ranks: int = 3, **env: str) -> Job:
    """Run the job to its end and check that only dead ranks were started again."""
    steps = max(fault["step"] for fault in faults) + 4
    settings: dict[str, Any] = {"ranks": ranks, "steps": steps, "max_restarts": len(faults), "faults": faults}
    job = make_job(script=STEP_JOB, flags=[*KEEP], env={"JOB_KIND": kind, **env}, **settings)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] * len(faults), job.story()
    assert "ranks do not go on in their processes" not in job.log.read_text(), job.story()
    return job


def stayed(job: Job, faults: list[dict[str, Any]]) -> bool:
    """Whether every survivor repeated each broken call inside its loop."""
    at = list(zip(job.committed(), faults, strict=True))
    return all(
        repeated(job, rank) == [version + 1 for version, fault in at if fault["rank"] != rank]
        for rank in range(job.ranks)
    )


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        pytest.param("plain", [kill(1, 4, "micro2"), kill(0, 6, "micro3")], id="accumulation"),
        pytest.param("plain", [kill(2, 3, "micro0"), kill(1, 6, "micro1"), kill(0, 9, "loss")], id="accumulation-each",
                     marks=pytest.mark.slow),
        pytest.param("unused", [kill(1, 4, "loss"), kill(2, 7, "micro1"), kill(0, 10, "allreduced")], id="unused",
                     marks=pytest.mark.slow),
        pytest.param("two", [kill(1, 4, "loss"), kill(2, 8, "loss"), kill(0, 12, "allreduced")], id="two",
                     marks=pytest.mark.slow),
        pytest.param("scaler", [kill(1, 4, "loss"), kill(0, 7, "micro1")], id="scaler", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_update_is_made_again(
    make_job: MakeJob, unbroken: Unbroken, kind: str, faults: list[dict[str, Any]]
) -> None:
    """In ``two`` the second model's reducer has made no backward pass before the first death, and later one."""
    job = run(make_job, kind, faults)
    assert stayed(job, faults), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.parametrize(
    ("fault", "stays"),
    [
        pytest.param(kill(1, 5, "micro2"), True, id="in-it", marks=pytest.mark.slow),
        pytest.param(kill(1, 6, "micro2"), False, id="behind-it"),
        pytest.param(kill(1, 5, "allreduced"), False, id="at-its-end", marks=pytest.mark.slow),
    ],
)
def test_an_update_that_the_scaler_leaves_out(
    make_job: MakeJob, unbroken: Unbroken, fault: dict[str, Any], stays: bool
) -> None:
    """A skipped update is not a version. A rank that restores the version before has to repeat it, so all ranks do."""
    faults = [fault, kill(0, 9, "loss")]
    job = run(make_job, "scaler", faults, JOB_OVERFLOW="5")
    assert job.committed() == [5, 8], job.story()
    assert stayed(job, faults) == stays, job.story()
    why = "the call before the broken one made no update"
    assert (why in job.log.read_text()) != stays, job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("static", "the reducer of DistributedDataParallel with static_graph cannot be reset"),
        ("plain", "the function had not been called 2 times"),
        ("late", "a DistributedDataParallel was made after wrap_optimizer()"),
    ],
)
def test_what_cannot_be_made_again_leaves_train(make_job: MakeJob, unbroken: Unbroken, kind: str, why: str) -> None:
    """``plain``: a replacement is only in its second call, so its reducer has not made a second backward pass."""
    faults = [kill(0, 3, "micro0"), kill(1, 4, "loss")]
    job = run(make_job, kind, faults, ranks=2 if kind == "late" else 3)  # with three its buckets are others, as is said
    assert f"its loop is left: rank 0: {why}" in job.log.read_text(), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)
