"""Megatron under ``ttp run``: a rank is killed, the others save, the launcher starts the job again, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron import jobs
from tests.adapters.megatron.jobs import EP2_DP2, KILLED_AT, PP2_DP2, STEPS, TP2_DP2
from tests.adapters.megatron.nursery import Nursery
from tests.e2e.harness import Job

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(600)]


def launch(directory: Path, shape: dict[str, Any], ranks: int, fault: dict[str, Any]) -> Job:
    env = {"JOB_SHAPE": json.dumps(shape), "JOB_FAULT": json.dumps(fault), "GLOG_v": "3"}
    script = Path(__file__).with_name("run_job.py")
    job = Job(directory, ranks=ranks, steps=STEPS, script=script, env=env, max_restarts=1)
    try:
        assert job.run(540) == 0, job.story()
    finally:
        job.stop()
    return job


def check(nursery: Nursery, directory: Path, shape: dict[str, Any], ranks: int, fault: dict[str, Any]) -> None:
    launched = launch(directory, shape, ranks, fault)
    (saved,) = launched.committed()
    assert saved in (KILLED_AT, KILLED_AT + 1), launched.story()  # a survivor may be through its update by then
    job = jobs.Job(nursery, directory, shape)
    assert job.starts() == [0, saved]
    job.run_state("unhurt", ranks=ranks, steps=KILLED_AT)
    for rank in range(ranks):
        resumed = json.loads((directory / f"result{rank}.json").read_text())
        assert resumed == job.after("unhurt", rank)


def test_a_killed_rank_is_saved_started_again_and_resumed(nursery: Nursery, tmp_path: Path) -> None:
    check(nursery, tmp_path, {"instances": 2}, 2, {"ranks": [1], "step": KILLED_AT, "phase": "reduced"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dead"),
    [
        pytest.param(TP2_DP2, [0], id="tp2-rank0"),
        pytest.param(PP2_DP2, [1, 2], id="pp2-one-per-stage"),
        pytest.param(EP2_DP2, [3], id="experts"),
    ],
)
def test_in_other_layouts(nursery: Nursery, tmp_path: Path, shape: dict[str, Any], dead: list[int]) -> None:
    check(nursery, tmp_path, shape, 4, {"ranks": dead, "step": KILLED_AT, "phase": "reduced"})
