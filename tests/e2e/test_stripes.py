"""Replicas write parts of the state side by side, and one of them is killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job, newest_of_survivors
from ttp.store.manifest import Manifest

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.xdist_group("ttp")
def test_a_saver_is_killed_in_the_middle_of_its_part(make_job: MakeJob, unbroken: Unbroken) -> None:
    """Rank 1 is killed in training, and rank 3 while it writes a third of the state: only that is written again."""
    faults = [{"id": "kill", "rank": 1, "step": 4, "phase": "forward", "action": "kill"}]
    job = make_job(steps=9, max_restarts=1, faults=faults, script=Path(__file__).with_name("striped_job.py"))
    job.env |= {"TTP_STRIPES": "3", "JOB_DIES_SAVING": "3"}
    assert job.run(370) == 0, job.story()

    begun = (job.directory / "died_saving").read_text()
    committed = job.committed()
    assert committed == [newest_of_survivors(job, 0, {1, 3})], job.story()
    checkpoint = job.directory / "checkpoints" / f"tft_saved_checkpoints-step_{committed[0]}"
    pieces = {p.shard: p for p in Manifest.load(checkpoint).pieces if p.kind == "shard"}
    assert sorted(pieces) == ["model#1/3", "model#2/3", "model#3/3"]
    assert {p.writer for p in pieces.values()} == {0, 2}
    (again,) = (p for p in pieces.values() if f"_{p.shard[6]}of3" in begun)  # model#2/3 is in ..._2of3.distcp
    assert again.file != begun
    assert not (checkpoint / begun).exists()
    first = next(e for e in job.incidents()[0] if e["kind"] == "plan")
    assert {shard: rank for shard, rank in first["savers"].items() if rank == 3} == {again.shard: 3}

    assert job.ttp("verify", str(job.directory / "checkpoints")).returncode == 0
    assert "model#2/3" in job.ttp("inspect", str(checkpoint)).stdout
    told = " ".join(job.ttp("incidents", str(job.directory / "checkpoints"), "--last").stdout.split())
    assert "rank 3 writes model#" in told and "savers 3 were lost or failed" in told, told
    assert job.results() == unbroken(job)
