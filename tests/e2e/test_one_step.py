"""``@ttp.one_step`` with ``--continuity keep``: ranks stay in their loops when another rank dies; real kills.

The bits are those of the unbroken run each time. If a loop cannot go on, all ranks leave ``train()``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job, MakeJob, Unbroken
from tests.e2e.test_faults import PHASES, kills
from tests.e2e.test_keep import ANEW, HELD, KEEP, KILL, TIMEOUT_S, again, repeated

STEP_JOB = Path(__file__).with_name("step_job.py")
pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def one_step(make_job: MakeJob, env: dict[str, str] | None = None, **settings: Any) -> Job:
    return make_job(flags=[*KEEP], env={"JOB_ONE_STEP": "1"} | (env or {}), **settings)


@pytest.mark.parametrize(
    ("ranks", "phases"),
    [
        pytest.param(3, ["backward"], id="three"),
        pytest.param(4, PHASES, marks=pytest.mark.slow, id="every-phase"),
    ],
)
def test_the_loops_of_survivors_are_not_left(
    make_job: MakeJob, unbroken: Unbroken, ranks: int, phases: list[str]
) -> None:
    """Ranks die one after the other, and at last all but one."""
    faults, lost = kills(ranks, phases)
    job = one_step(make_job, ranks=ranks, steps=3 * len(faults) + 3, max_restarts=len(faults), faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] * len(faults), job.story()
    called_again = {version for rank in range(ranks) for version in repeated(job, rank)}
    missed = [version for version in job.committed() if version + 1 not in called_again]
    # who dies behind an update may leave one behind that has not made it
    assert not missed or "its loop is left: ranks stand in different updates" in job.log.read_text(), job.story()
    assert len(missed) < len(faults) / 2, job.story()
    for rank in range(ranks):
        others = [version + 1 for version, dead in zip(job.committed(), lost, strict=True) if rank not in dead]
        assert repeated(job, rank) == [update for update in others if update - 1 not in missed], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.parametrize(
    ("fault", "env", "why"),
    [
        pytest.param({}, {"JOB_ASKS": "1"}, "train() calls all_reduce() before its first update", id="asks"),
        pytest.param({"step": 1}, {}, "the function had not been called 2 times", id="early", marks=pytest.mark.slow),
    ],
)
def test_where_one_cannot_stay_all_leave_train(
    make_job: MakeJob, unbroken: Unbroken, fault: dict[str, Any], env: dict[str, str], why: str
) -> None:
    job = one_step(make_job, env, ranks=2, steps=9, max_restarts=1, faults=[KILL | fault])
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] and repeated(job, 0) == [], job.story()
    assert f"its loop is left: rank 0: {why}" in job.log.read_text()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
def test_who_is_behind_has_all_leave_train(make_job: MakeJob, unbroken: Unbroken) -> None:
    """While rank 0 makes the update, rank 1 is killed before its own, and rank 2 leaves the step with an error."""
    before = {"step": 5, "phase": "allreduced", "when": "done/updates.0"}
    faults = [
        {"id": "updates", "rank": 0, "step": 5, "phase": "in_step", "action": "hold"},
        {"id": "kill", "rank": 1, "action": "kill", **before},
        {"id": "behind", "rank": 2, "action": "collective", **before},
    ]
    job = one_step(make_job, ranks=3, steps=9, max_restarts=1, faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0, 6] and not repeated(job, 0) + repeated(job, 2), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
def test_a_program_is_tried_without_any_death(make_job: MakeJob, unbroken: Unbroken) -> None:
    job = one_step(make_job, ranks=2, steps=12, max_restarts=0, faults=[HELD]).start()
    job.wait_for_version(6)
    tried = job.ttp("save", "--again", "--token", job.token())
    assert tried.returncode == 0 and "all ranks go on from it" in tried.stdout, tried.stdout + tried.stderr
    assert job.wait(TIMEOUT_S - 60) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0], job.story()
    assert [len(repeated(job, rank)) for rank in range(2)] == [1, 1], job.story()
    assert job.results() == unbroken(job)


# ------------------------------------- other kinds of updates: scalers, branches, micro-batches


def kill(rank: int, step: int, phase: str, **more: Any) -> dict[str, Any]:
    """Return a fault that waits for all ranks to come so far: survivors in different updates leave their loops."""
    fault = {"id": f"{rank} in {step}", "rank": rank, "step": step, "phase": phase, "action": "kill", "abreast": True}
    return fault | more


def run_kind(make_job: MakeJob, kind: str, faults: list[dict[str, Any]], ranks: int = 3, **env: str) -> Job:
    """Run the job to its end and check that only dead ranks were started again."""
    steps = max(fault["step"] for fault in faults) + 4
    settings: dict[str, Any] = {"ranks": ranks, "steps": steps, "max_restarts": len(faults), "faults": faults}
    job = make_job(script=STEP_JOB, flags=[*KEEP], env={"JOB_KIND": kind, **env}, **settings)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] * len(faults), job.story()
    assert ANEW not in job.log.read_text(), job.story()
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
    job = run_kind(make_job, kind, faults)
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
    job = run_kind(make_job, "scaler", faults, JOB_OVERFLOW="5")
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
    ranks = 2 if kind == "late" else 3  # with three its buckets are others, as is said
    job = run_kind(make_job, kind, faults, ranks)
    assert f"its loop is left: rank 0: {why}" in job.log.read_text(), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)
