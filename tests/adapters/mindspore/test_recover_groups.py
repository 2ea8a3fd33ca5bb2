"""``ttp recover``: which ranks count as replicas, and what else the manifest of a checkpoint decides."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.adapters.mindspore.jobs import add_manifest, make_job
from tests.adapters.mindspore.reshard_worlds import Cut, write_strategy
from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import CkptContents, StoredTensor
from ttp.mindspore_files.group_info import write_group_info
from ttp.mindspore_files.rank_folders import Known, known_replicas
from ttp.mindspore_files.redundancy import groups_of_stages
from ttp.mindspore_files.redundancy_plan import Seen, recover
from ttp.mindspore_files.redundancy_recovery import examine, write
from ttp.mindspore_files.strategy_file import read_stages

pytestmark = pytest.mark.xdist_group("mindspore-files")


@pytest.mark.parametrize("name", ["inputs_embed.w", "accu_grads_norm.w"])
def test_a_parameter_is_one_whatever_its_name_begins_with(name: str, tmp_path: Path) -> None:
    """MindSpore leaves these names out, so that ranks with different slices would count as replicas."""
    cuts = {name: Cut((2, 2), (0, -1)), "l.w": Cut((2, 2), (-1, -1))}
    groups, _ = groups_of_stages(read_stages(write_strategy(tmp_path / "s.ckpt", cuts)))
    assert groups == ((0, 2), (1, 3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint of ttp of 4 ranks in 2 slices, of which ranks 0 and 1 have written one each."""
    return add_manifest(make_job(tmp_path / "step", [(0,), (1,)], step=12), {"s0": (0, 2), "s1": (1, 3)})


def test_digests_are_checked_whoever_tells_the_replicas(saved: Path, tmp_path: Path) -> None:
    strategy = write_strategy(tmp_path / "s.ckpt", {"l1.w": Cut((2, 2), (0, -1))})
    other = make_job(tmp_path / "other", [(3,)], step=12)  # sound, and of the same step
    shutil.copy(other / "rank_3/checkpoint-2_1875.ckpt", saved / "rank_1/checkpoint-2_1875.ckpt")
    found, _ = examine(saved, lambda place: known_replicas(place, strategy=strategy))
    assert [fate.state for fate in found.outcome.fates] == ["own", "lost", "replica", "lost"]
    assert "does not have the digest" in found.outcome.lost[0].why
    (saved / "manifest.json").write_text("{")
    found, _ = examine(saved, lambda place: known_replicas(place, strategy=strategy))
    assert not found.outcome.lost and "digests were not checked, as " in found.known.told_by


def test_the_manifest_tells_how_many_ranks_there_are(saved: Path, tmp_path: Path) -> None:
    assert known_replicas(saved, data_parallel=True, ranks=2).groups == ((0, 1, 2, 3),)
    small = write_strategy(tmp_path / "small.ckpt", {"l1.w": Cut((2,), (0,))})
    with pytest.raises(CheckpointError, match=r"small.ckpt is for 2 ranks, but by its manifest .* was saved by 4"):
        known_replicas(saved, strategy=small)
    write_group_info(tmp_path / "g.pb", [0, 5])
    with pytest.raises(CheckpointError, match=r"g.pb is for 5 ranks"):
        known_replicas(saved, group_info=[tmp_path / "g.pb"])
    (saved / "manifest.json").unlink()
    assert "of 2 ranks, as the highest folder says" in known_replicas(saved, data_parallel=True).told_by
    assert known_replicas(saved, data_parallel=True, ranks=3).told_by == "data parallelism"


def test_the_step_that_all_groups_have_beats_that_of_most_files() -> None:
    def of(step: int) -> Seen:
        contents = CkptContents({"w": StoredTensor("Float32", (1,), "x")}, {"step_num": step})
        return Seen("f", contents)

    seen = {0: of(12), 1: of(12), 2: of(12), 3: of(13), 4: of(13), 5: Seen(problem="gone")}
    outcome = recover(seen, ((0, 1, 2, 3), (4, 5)), "-")
    assert [fate.source for fate in outcome.fates] == [3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("way", ["link", "copy"])
def test_a_file_that_is_replaced_after_it_was_examined_is_not_used(way: str, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [(0, 1), (2,)])
    found, _ = examine(job, lambda _: Known(((0, 1), (2,)), "us"))
    drafts = [tmp_path / f".out.{os.getpid()}.making", tmp_path / f".out.draft-{os.getpid()}"]
    for draft in drafts:  # of another host that makes the same with the same process id
        draft.mkdir()
    file = "checkpoint-2_1875.ckpt"
    Path(shutil.copy(job / "rank_2" / file, tmp_path / file)).replace(job / "rank_0" / file)
    with pytest.raises(CheckpointError, match=r"rank_0/.* was changed after it had been examined"):
        write(found, tmp_path / "out", way)
    assert not (tmp_path / "out").exists() and sorted(tmp_path.glob(".*")) == sorted(drafts)
