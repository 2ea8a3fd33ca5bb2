"""Every copy is torn: without a pre-image nothing can be saved, with one the job goes on with its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job

TIMEOUT_S = 240


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_an_update_that_every_rank_has_left_half_done(
    make_job: Callable[..., Job], unbroken: Callable[[Job], list[dict[str, Any]]]
) -> None:
    fault = {"id": "all", "ranks": [0, 1], "step": 4, "phase": "in_step", "action": "raise", "together": True}
    job = make_job(ranks=2, steps=8, max_restarts=1, faults=[fault], env={"JOB_UNDO": "preimage"})
    assert job.run(TIMEOUT_S - 60) == 0, job.story()
    assert job.committed() == [4] and job.starts() == [0, 4], job.story()
    (incident,) = job.incidents()
    assert [set(e["how"].values()) for e in incident if e["kind"] == "plan"] == [{"undo"}]
    assert job.results() == unbroken(job)
