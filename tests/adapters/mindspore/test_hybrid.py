"""Hybrid parallel: slices of their own, each written by a rank that holds it and read back by the others that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.mindspore.job import HERE, Job, Kill
from tests.adapters.mindspore.test_kills import RUN_S, check_goes_on

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(1800)]

SCRIPT = HERE / "hybrid_job.py"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """With the barrier before each update, as the killed ones."""
    directory = tmp_path_factory.mktemp("unbroken")
    job = Job(directory, 4, arguments=["graph"], max_restarts=0, script=SCRIPT).run(RUN_S)
    assert job.code == 0, job.output[-6000:]
    return job


@pytest.mark.parametrize(
    ("arguments", "kills", "step"),
    [
        (["graph"], [(0, 11, "gate")], 11),
        (["graph"], [(3, 9, "begin")], 8),
        (["graph"], [(1, 7, "update"), (2, 7, "update")], 7),
        (["pynative"], [(2, 5, "gate")], 5),
        (["graph", "preimage"], [(0, 11, "gate")], 11),
    ],
)
def test_every_slice_is_saved_once(
    arguments: list[str], kills: list[Kill], step: int, tmp_path: Path, unbroken: Job
) -> None:
    job = Job(tmp_path, 4, kills, arguments, script=SCRIPT).run(RUN_S)
    checkpoint, _ = check_goes_on(job, unbroken, step)
    manifest = job.manifest(checkpoint)
    written = {piece["shard"]: piece["file"] for piece in manifest["pieces"] if piece["kind"] == "shard"}
    assert written.keys() == {"slice_0", "slice_1"}
    for shard, file in written.items():
        rank = int(file.split("/")[0].removeprefix("rank_"))
        assert rank % 2 == int(shard.removeprefix("slice_")) and rank not in {kill[0] for kill in kills}
