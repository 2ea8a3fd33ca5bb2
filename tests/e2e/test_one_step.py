"""``@ttp.one_step`` with ``--continuity keep``: ranks stay in their loops when another rank dies; real kills.

The bits are those of the unbroken run each time. If a loop cannot go on, all ranks leave ``train()``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.e2e.test_faults import PHASES, kills
from tests.e2e.test_keep import HELD, KEEP, KILL, TIMEOUT_S, again

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def repeated(job: Job, rank: int) -> list[int]:
    """Return the updates that this rank made again in its loop."""
    said = rf"\[ttp rank {rank}\] its loop was not left: update (\d+) is called again"
    return [int(number) for number in re.findall(said, job.log.read_text())]


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
    "second",
    [
        {"rank": 0, "phase": "loss", "action": "kill"},
        pytest.param({"rank": 1, "phase": "data", "action": "kill"}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "loss", "action": "raise"}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "loss", "action": "deadlock"}, marks=pytest.mark.slow),
    ],
)
def test_a_second_fault_costs_no_step(make_job: MakeJob, unbroken: Unbroken, second: dict[str, Any]) -> None:
    """The second fault comes in the repeated call, so all ranks are restarted."""
    faults = [KILL, second | {"id": "second", "step": KILL["step"], "launch": "1"}]
    job = one_step(make_job, {"TTP_CONTINUE_S": "5"}, ranks=2, steps=9, max_restarts=1, faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job)[0] and repeated(job, 0) == [6], job.story()
    assert job.committed() == [KILL["step"]] and job.starts()[-1] == KILL["step"], job.story()
    assert "ranks do not go on in their processes" in job.log.read_text()
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
