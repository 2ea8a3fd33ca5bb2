"""``load_newest``: the layouts of seed documents, damaged files, checkpoints of ttp."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters.mindspore.jobs import add_manifest, make_job, saved_by_ttp
from tests.damage import flip
from ttp.adapters.mindspore import load_newest
from ttp.core.layout import Version
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files import newest_whole
from ttp.store.catalog import CatalogEntry, look
from ttp.store.names import draft_name

pytestmark = pytest.mark.xdist_group("mindspore-files")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "RANK_ID", "MS_ROLE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def save(path: Path, value: float, *, age: int, crc: bool = True, **append: Any) -> Path:
    """Write a checkpoint with weight ``value``, whose time is ``age`` seconds before the others'."""
    import mindspore as ms

    path.parent.mkdir(parents=True, exist_ok=True)
    data = [{"name": "w", "data": ms.Tensor(np.full((4,), value, np.float32))}]
    ms.save_checkpoint(data, str(path), integrated_save=False, append_dict=append or None, crc_check=crc)
    path.chmod(0o600)
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    return path


def damage(path: Path) -> None:
    kept = path.stat()
    flip(path, -40)
    os.utime(path, (kept.st_atime, kept.st_mtime))


def found_in(*given: Any, **how: Any) -> Any:
    """Return what ``load_newest`` finds."""
    found = load_newest(*given, **how)
    assert found is not None
    return found


def weight(found: Any) -> float:
    return float(found.parameters["w"].asnumpy()[0])


def test_resnets_layout_newest_first_and_damaged_ones_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ResNet's glob(pre_trained + "*/*.ckpt"): newest by its time, up to five attempts."""
    root = tmp_path / "imagenet2012" / "ckpt"
    newest = save(root.with_name("ckpt_0") / "resnet50-3_5004.ckpt", 3, age=0, epoch_num=3, step_num=15012)
    middle = save(root.with_name("ckpt_0") / "resnet50-2_5004.ckpt", 2, age=9, epoch_num=2, step_num=10008)
    save(root.with_name("ckpt_1") / "resnet50-9_5004.ckpt", 1, age=20, epoch_num=1, step_num=5004)
    found = found_in(f"{root}*/*.ckpt")
    assert (found.path, weight(found), found.skipped) == (newest, 3, ())
    assert (found.epoch_num, found.step_num) == (3, 15012)
    damage(newest)
    middle.write_bytes(b"")
    os.utime(middle, (1_699_999_991,) * 2)
    with caplog.at_level(logging.WARNING, logger="ttp"):
        found = found_in(f"{root}*/*.ckpt")
    assert weight(found) == 1 and len(found.skipped) == 2
    assert "its CRC" in found.skipped[0] and "it is empty" in found.skipped[1]
    assert all(reason in caplog.text for reason in found.skipped)


def test_pangus_layout_breakpoints_last(tmp_path: Path) -> None:
    folder = tmp_path / "8p" / "rank_3"
    save(folder / "pangu3-1_40_breakpoint.ckpt", 9, age=0)
    normal = save(folder / "pangu3-1_20.ckpt", 2, age=50, epoch_num=1, step_num=20)
    for pattern in (f"{folder}/pangu*.ckpt", folder, tmp_path / "8p"):
        found = found_in(pattern, rank=3)
        assert weight(found) == 2 and found.step_num == 20
    damage(normal)
    found = found_in(folder)
    assert weight(found) == 9 and found.step_num is None


def test_brackets_in_names_of_what_exists_are_no_pattern(tmp_path: Path) -> None:
    """As in the directories of Hydra's sweeps."""
    run = tmp_path / "sizes=[1,2]"
    save(run / "net-1_5.ckpt", 5, age=1)
    best = save(run / "net[best].ckpt", 6, age=0)
    assert found_in(f"{run}/*.ckpt").path == found_in(best).path == found_in(f"{run}/net[[]*").path == best


def test_five_attempts_and_no_silent_start_from_nothing(tmp_path: Path) -> None:
    for place in range(7):
        path = save(tmp_path / f"a-1_{place}.ckpt", place, age=place)
        if place < 5:
            damage(path)
    with pytest.raises(CheckpointError, match=r"2 older ones were not tried.*a-1_0.*a-1_4"):
        load_newest(tmp_path)
    found = found_in(tmp_path, attempts=6)
    assert weight(found) == 5 and len(found.skipped) == 5


def test_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest([str(tmp_path / "no" / "*.ckpt"), tmp_path / "no"]) is None
    (tmp_path / "checkpoint-graph.meta").touch()
    (tmp_path / ".a.ckpt").touch()
    assert load_newest(tmp_path) is None
    with pytest.raises(UsageError, match="attempts"):
        load_newest(tmp_path, attempts=0)


def test_what_mindspore_itself_refuses_is_skipped(tmp_path: Path) -> None:
    """The file has a type that MindSpore does not know, but no damaged byte."""
    good = save(tmp_path / "a-1_1.ckpt", 1, age=10)
    odd = save(tmp_path / "a-1_2.ckpt", 2, age=0, crc=False)
    odd.write_bytes(odd.read_bytes().replace(b"Float32", b"Float99"))
    os.utime(odd, (1_700_000_000,) * 2)
    found = found_in(tmp_path)
    assert found.path == good and "cannot be loaded" in found.skipped[0]


def test_arguments_of_load_checkpoint_are_passed_on(tmp_path: Path) -> None:
    save(tmp_path / "a-1_1.ckpt", 1, age=0, epoch_num=1)
    assert set(found_in(tmp_path, choice_func=lambda name: name == "w").parameters) == {"w"}


def test_checkpoints_of_ttp_by_their_step_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = saved_by_ttp(tmp_path, 12)
    saved_by_ttp(tmp_path, 9)  # written later, but of an older step
    for rank, writer in ((0, 0), (1, 3), (2, 0), (3, 3)):
        found = found_in(tmp_path, rank=rank)
        assert found.step_num == 12 and found.path.parent.name == f"rank_{writer}"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "h")
    one = found_in(str(tmp_path)).path
    assert one == newer / "rank_3" / "ttp_rank_3-1_12.ckpt"
    other = make_job(tmp_path / "else", [(3,)], lambda rank: one.name, step=13) / "rank_3" / one.name
    one.write_bytes(other.read_bytes())  # sound, but another one
    found = found_in(tmp_path)
    assert found.step_num == 9 and f"{one.name} is damaged" in found.skipped[0]
    assert found_in(tmp_path, rank=0).step_num == 9, "rank 0's own file is whole, but all ranks take one step"
    (newer / "manifest.json").write_text("{")
    found = found_in(tmp_path)
    assert found.step_num == 9 and "manifest.json is damaged" in found.skipped[0]
    found = found_in(tmp_path / "tft_saved_checkpoints-step_*" / "rank_0" / "*.ckpt", rank=0)
    assert found.step_num == 9 and len(found.skipped) == 1


def saved_by_two_replicas(save_dir: Path, version: int) -> Path:
    """Return a checkpoint of a data-parallel job of two ranks, which rank 1 has written."""
    step = make_job(save_dir / f"tft_saved_checkpoints-step_{version}", [(1,)], lambda _rank: "a.ckpt", step=version)
    return add_manifest(step, {"model": (0, 1)}, version)


def test_a_rank_that_the_saving_job_did_not_have_takes_the_same_step(tmp_path: Path) -> None:
    """Such as in a job with more ranks; an older checkpoint of its own must not hide the newest."""
    saved_by_two_replicas(tmp_path, 12)
    saved_by_ttp(tmp_path, 9)
    for rank in range(4):
        assert found_in(tmp_path, rank=rank).step_num == 12


def test_a_rank_without_a_slice_loads_no_older_step(tmp_path: Path) -> None:
    """The other ranks would load the newest step, and train on with it."""
    saved_by_ttp(tmp_path, 12)
    saved_by_two_replicas(tmp_path, 9)
    with pytest.raises(UsageError, match="step 12 was saved by 4 ranks in 2 slices, and holds none for rank 4"):
        load_newest(tmp_path, rank=4)


def test_slices_of_another_number_of_ranks_are_no_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of two ranks each would load one of the slices, and train on with it."""
    step = saved_by_ttp(tmp_path, 12)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")):
        monkeypatch.setenv(name, value)
    for rank in (None, 1):
        with pytest.raises(UsageError, match="by 4 ranks in 2 slices, and holds none for rank 1 of a job of 2 ranks"):
            load_newest(tmp_path, rank=rank)
    # not this process's rank: whoever asks knows which slice it is
    assert found_in(tmp_path, rank=3).path.parent == step / "rank_3"


def test_a_rank_without_a_folder_does_not_begin_anew_beside_others(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / f"rank_{rank}" / "a-1_1.ckpt", rank, age=0)
    (tmp_path / "rank_2").mkdir()
    for rank in (2, 5):
        with pytest.raises(CheckpointError, match=rf"has checkpoints of ranks 0-1, but none of rank {rank}, .*recover"):
            load_newest(tmp_path, rank=rank)
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}" / "a-1_1.ckpt").unlink()
    assert load_newest(tmp_path, rank=5) is None, "the others have made their folders, and begin anew as well"


def test_what_reshard_makes_is_one_checkpoint_by_any_name(tmp_path: Path) -> None:
    made = saved_by_ttp(tmp_path, 12).rename(tmp_path / "made")
    assert found_in(made, rank=2).path.parent.name == "rank_0"
    flip(made / "rank_3" / "ttp_rank_3-1_12.ckpt", -40)
    with pytest.raises(CheckpointError, match=r"rank_3/ttp_rank_3-1_12.ckpt is damaged"):
        load_newest(made, rank=0)
    (made / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        load_newest(made, rank=0)
    older = saved_by_ttp(tmp_path, 9)
    assert found_in([made, older], rank=0).step_num == 9


# MindSpore leaves such a file open, which Python warns of when it collects it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_links_to_nothing_and_other_formats_are_skipped(tmp_path: Path) -> None:
    good = save(tmp_path / "a-1_1.ckpt", 1, age=10)
    (tmp_path / "a-1_2.safetensors").write_bytes(b"\x10" + bytes(7) + b'{"a":1}         ')
    found = found_in(tmp_path)
    assert found.path == good and "cannot be loaded" in found.skipped[0]
    foreign = tmp_path / "tft_saved_checkpoints-step_3" / "rank_0"
    kept = save(foreign / "x-1_3.ckpt", 3, age=0)
    (foreign / "y-1_3.ckpt").symlink_to("/nowhere")
    assert found_in(foreign / "*.ckpt", rank=0).path == kept


def test_a_checkpoint_is_one_attempt_however_many_of_its_files_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is looked at once: a look reads each piece, and a look per file would be a million reads for 1,000 files."""
    newer, seen = saved_by_ttp(tmp_path, 12), list[Path]()
    saved_by_ttp(tmp_path, 9)
    everything = tmp_path / "*" / "rank_*" / "*.ckpt"

    def look_and_note(path: Path) -> CatalogEntry:
        seen.append(path)
        return look(path)

    monkeypatch.setattr(newest_whole, "look", look_and_note)
    for rank, writer in ((0, 0), (1, 3), (2, 0), (3, 3)):
        found = found_in(everything, rank=rank)
        assert (found.step_num, found.path.parent.name) == (12, f"rank_{writer}")
    assert seen.count(newer) == 4
    flip(newer / "rank_0" / "ttp_rank_0-1_12.ckpt", -40)
    found = found_in(everything, rank=3, attempts=2)
    assert found.step_num == 9 and len(found.skipped) == 1


def test_what_cannot_be_looked_at_is_no_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*: File name too long"):
        load_newest(tmp_path / ("x" * 300))


def test_damage_that_only_reading_finds_and_drafts(tmp_path: Path) -> None:
    """The rules of ``ttp.restore``: superseded checkpoints count only without their successor, drafts never."""
    newer = saved_by_ttp(tmp_path, 12)
    saved_by_ttp(tmp_path, 9)
    newer.rename(tmp_path / draft_name(Version(12), "i"))
    assert found_in(tmp_path, rank=0).step_num == 9


def test_checkpoints_of_the_original_have_no_manifest(tmp_path: Path) -> None:
    """Its directories have the same names: steps count, and each rank has its own file or none."""
    for version in (12, 9):
        (saved_by_ttp(tmp_path, version) / "manifest.json").unlink()
    for where in (tmp_path / "*" / "rank_*" / "*.ckpt", tmp_path):
        found = found_in(where, rank=3)
        assert (found.step_num, found.path.parent.name) == (12, "rank_3")
    flip(found.path, -40)
    found = found_in(tmp_path, rank=3)
    assert found.step_num == 9 and "its CRC" in found.skipped[0]
    with pytest.raises(CheckpointError, match="has no file of rank 1, and no manifest that lists replicas"):
        load_newest(tmp_path, rank=1, attempts=1)
