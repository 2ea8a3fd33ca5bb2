"""``@ttp.one_step`` with ``--continuity keep``: a loop that is not left when another rank dies; real kills.

The bits are those of the unbroken run each time. Where a loop cannot go on all leave ``train()``, as without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.e2e.test_faults import PHASES, kills
from tests.e2e.test_keep import KEEP, TIMEOUT_S, again

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def repeated(job: Job, rank: int) -> list[int]:
    """The updates that this rank was called for again in its loop."""
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
    faults, _ = kills(ranks, phases)
    job = one_step(make_job, ranks=ranks, steps=3 * len(faults) + 3, max_restarts=len(faults), faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert all(again(job)) and len(again(job)) == len(faults), job.story()
    stayed = [repeated(job, rank) for rank in range(ranks)]
    assert sum(map(len, stayed)) == (ranks - 1) * len(faults), (stayed, job.story())
    assert job.results() == unbroken(job)
