"""Hybrid parallel: each slice is written by one rank that holds it, and read back by the other ranks that hold it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.mindspore.job import HERE, STEP, Job, Kill
from tests.adapters.mindspore.test_kills import RUN_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(4000)]

SCRIPT = HERE / "hybrid_job.py"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same job without kills, with the barrier before each update."""
    directory = tmp_path_factory.mktemp("unbroken")
    return Job(directory, 4, arguments=["graph"], max_restarts=0, script=SCRIPT).run(RUN_S, ends=0)


Tour = list[tuple[list[Kill], int]]

TOUR: Tour = [
    # what hurts each launch, and the newest step that can be saved
    ([(0, 5, "meeting")], 5),
    ([(3, 9, "begin")], 8),
    ([(1, 13, "update"), (2, 13, "update")], 13),
]


@pytest.mark.parametrize(
    ("arguments", "tour"),
    [
        (["graph"], TOUR),
        (["pynative"], [([(3, 5, "meeting")], 5)]),
        (["graph", "preimage"], [([(0, 11, "gate")], 11)]),
    ],
)
def test_every_slice_is_saved_once(arguments: list[str], tour: Tour, tmp_path: Path, unbroken: Job) -> None:
    """Also if a rank dies that leaves others of its slice behind: they make the update alone."""
    kills = [kill for kill, _ in tour]
    job = Job(tmp_path, 4, kills[0], arguments, max_restarts=len(tour), script=SCRIPT, later=kills[1:])
    job.run(len(tour) * RUN_S, ends=0)
    assert len(job.begun) == len(tour) + 1, job.begun
    for step, (kill, newest) in zip(job.begun[1:], tour, strict=True):
        both = kill[0][2] in ("gate", "update")  # the survivors may be frozen before their update
        assert step == newest or (both and step == newest - 1), job.begun
    for rank, number, *seen in STEP.findall(job.output):
        assert tuple(seen) == unbroken.steps[int(rank)][int(number)], (rank, number)
    checkpoints = {int(path.name.rpartition("_")[2]): path for path in job.checkpoints}
    assert sorted(checkpoints) == job.begun[1:]
    for step, kill in zip(job.begun[1:], kills, strict=True):
        written = {p["shard"]: p["file"] for p in job.manifest(checkpoints[step])["pieces"] if p["kind"] == "shard"}
        assert written.keys() == {"slice_0", "slice_1"}
        for shard, file in written.items():
            rank = int(file.split("/")[0].removeprefix("rank_"))
            assert rank % 2 == int(shard.removeprefix("slice_")) and rank not in {who for who, _, _ in kill}
