"""Megatron under ``ttp run``: a rank is killed, the others save, the launcher starts the job again, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adapters.megatron import jobs
from tests.adapters.megatron.jobs import KILLED_AT, STEPS
from tests.adapters.megatron.nursery import Nursery
from tests.e2e.harness import Job

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(600)]


def test_a_killed_rank_is_saved_started_again_and_resumed(nursery: Nursery, tmp_path: Path) -> None:
    """Other layouts are killed and resumed in test_matrix.py and test_kills.py."""
    shape, fault = {"instances": 2}, {"ranks": [1], "step": KILLED_AT, "phase": "reduced"}
    env = {"JOB_SHAPE": json.dumps(shape), "JOB_FAULT": json.dumps(fault), "GLOG_v": "3"}
    script = Path(__file__).with_name("run_job.py")
    launched = Job(tmp_path, ranks=2, steps=STEPS, script=script, env=env, max_restarts=1)
    try:
        assert launched.run(540) == 0, launched.story()
    finally:
        launched.stop()
    (saved,) = launched.committed()
    assert saved in (KILLED_AT, KILLED_AT + 1), launched.story()  # a survivor may be through its update by then
    job = jobs.Job(nursery, tmp_path, shape)
    assert job.starts() == [0, saved]
    job.run_state("unhurt", ranks=2, steps=KILLED_AT)
    for rank in range(2):
        resumed = json.loads((tmp_path / f"result{rank}.json").read_text())
        assert resumed == job.after("unhurt", rank)
