"""A copy with a flipped bit in a real job: the other replicas outvote it, and the restart replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
TIMEOUT_S = 200


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("torchrun")
def test_the_replica_with_a_flipped_bit_does_not_save(make_job: MakeJob, unbroken: Unbroken) -> None:
    faults = [
        {"id": "flip", "rank": 0, "step": 3, "phase": "stepped", "action": "flip"},
        {"id": "kill", "rank": 3, "step": 4, "phase": "data", "action": "kill"},
    ]
    job = make_job(steps=6, max_restarts=1, faults=faults)
    assert job.run(TIMEOUT_S - 40) == 0, job.story()
    (events,) = job.incidents()
    plan = next(e for e in events if e["kind"] == "plan")
    assert plan["odd"] == [0] and plan["savers"] == {"model": 1}, job.story()
    assert job.committed() == [4] and job.starts() == [0, 4], job.story()
    assert job.results() == unbroken(job)
