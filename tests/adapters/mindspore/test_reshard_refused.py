"""What ``ttp reshard`` refuses before it writes anything, and what it can do if some of the files are missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from tests.adapters.mindspore.jobs import add_manifest
from tests.adapters.mindspore.reshard_worlds import (
    S4,
    S8,
    S8O,
    STRATEGIES,
    TENSORS,
    Cut,
    assert_cut,
    real_cuts,
    run,
    save,
    write_strategy,
)
from tests.damage import flip
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files import reshard_rank
from ttp.mindspore_files.reshard import JOB_BYTES
from ttp.mindspore_files.reshard_fit import TargetTensor
from ttp.mindspore_files.reshard_rank import blocks
from ttp.store.digest import digest_file
from ttp.store.manifest import MANIFEST

pytestmark = pytest.mark.xdist_group("mindspore-files")

TO_FOUR = STRATEGIES / "s8.ckpt", STRATEGIES / "s4.ckpt"
WHOLE = {"model": range(8)}
NEWER = {name: full + 1 for name, full in TENSORS.items()}


@pytest.fixture
def s8(files: dict[str, Path], tmp_path: Path) -> Path:
    """Return files of eight ranks, to be damaged."""
    shutil.copytree(files["s8"], tmp_path / "s8")
    for file in (tmp_path / "s8").rglob("*.ckpt"):
        file.chmod(0o600)  # MindSpore makes them unwritable
    return tmp_path / "s8"


def file_of(directory: Path, rank: int) -> Path:
    (file,) = (directory / f"rank_{rank}").glob("*.ckpt")
    return file


def refused(source: Path, src: Path | None, dst: Path | None, why: str, **more: Any) -> None:
    """Check that the error says why, and that no file was made."""
    target = source.parent / "made"
    before = sorted(source.parent.iterdir())
    with pytest.raises((CheckpointError, UsageError), match=why):
        run(source, target, src, dst, **more)
    assert sorted(source.parent.iterdir()) == before


# ------------------------------------------------------------------------------------------------- what is not there


def test_one_replica_of_each_group_is_enough(s8: Path) -> None:
    for rank in (0, 1, 6, 7):
        shutil.rmtree(s8 / f"rank_{rank}")
    done = run(add_manifest(s8, WHOLE), s8.parent / "made", *TO_FOUR)
    assert any("each part is on disk once" in note for note in done.notes)
    assert_cut(s8.parent / "made", TENSORS, S4, range(4))
    refused_too = s8.parent / "lost"
    shutil.copytree(s8, refused_too)
    shutil.rmtree(refused_too / "rank_4")
    (refused_too / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"l1.w: there is no whole file of ranks 0,4"):
        run(refused_too, s8.parent / "none", *TO_FOUR)


def test_a_damaged_piece_is_replaced_by_its_replica_or_named(s8: Path) -> None:
    flip(file_of(add_manifest(s8, WHOLE), 5))
    done = run(s8, s8.parent / "first", *TO_FOUR)
    assert any("rank_5/net-3_12.ckpt is damaged" in note for note in done.notes)
    assert_cut(s8.parent / "first", TENSORS, S4, range(4))
    shutil.rmtree(s8.parent / "first")
    file_of(s8, 1).write_bytes(b"")
    refused(s8, *TO_FOUR, r"ranks 1,5.*rank_1/net-3_12.ckpt has 0 bytes")


def test_without_a_manifest_the_files_own_crc_counts(s8: Path) -> None:
    run(s8, s8.parent / "made", *TO_FOUR)
    (s8.parent / "made" / MANIFEST).unlink()
    flip(file_of(s8.parent / "made", 2))
    with pytest.raises(CheckpointError, match=r"there is no whole file of rank 2.*its CRC is"):
        run(s8.parent / "made", s8.parent / "again", STRATEGIES / "s4.ckpt", None)


def test_files_that_lack_what_another_rank_saved(s8: Path) -> None:
    """As MindSpore saves with remove_redundancy: each replica keeps some of the tensors."""
    for rank in range(8):
        file, keep = file_of(s8, rank), ("l1.w", "moments.l2.w") if rank < 4 else ("l2.w", "moments.l1.w")
        loaded = {
            name: value for name, value in ms.load_checkpoint(str(file)).items() if name in (*keep, "global_step")
        }
        if rank == 3:
            loaded |= {name: ms.Parameter(TENSORS[name]) for name in ("l3.w", "moments.l3.w")}
        file.unlink()
        ms.save_checkpoint([{"name": name, "data": value} for name, value in loaded.items()], str(file))
    run(s8, s8.parent / "made", *TO_FOUR)
    assert_cut(s8.parent / "made", TENSORS, S4, range(4))


# ------------------------------------------------------------------------------------------ what does not fit together


def with_all(cuts: dict[str, Cut], **changed: Any) -> dict[str, Cut]:
    """Return layouts with the same change in each."""
    fields = ("devices", "tensor_map", "opt_size", "opt_step")
    return {name: Cut(**{**{field: getattr(cut, field) for field in fields}, **changed}) for name, cut in cuts.items()}


WRONG: dict[str, tuple[Callable[[], dict[str, Cut]], str]] = {
    "step": (lambda: {**S8O, "l3.w": Cut((2, 4), [-1, -1], 2, 4)}, "l3.w: opt_weight_shard_step is 4, .* are 1 apart"),
    "no-opt": (lambda: S8, r"l1.w should be equal on ranks 0,4 but differs between rank 0 and rank 4"),
    "smaller-opt": (lambda: {**S8O, "l3.w": Cut((2, 4), [-1, -1])}, r"moments.l3.w would have the shape \(64, 16\)"),
    "larger-opt": (lambda: {**S8O, "l3.w": Cut((2, 4), [-1, -1], 8, 1)}, r"moments.l3.w would have the shape"),
    "larger-opt-everywhere": (
        lambda: {**S8O, "l3.w": Cut((2, 4), [-1, -1], 8, 1), "moments.l3.w": Cut((2, 4), [-1, -1], 8, 1)},
        r"l3.w should be different parts of a tensor on ranks 0,2 but is equal",
    ),
    "device-axis": (lambda: with_all(S8O, devices=(4, 2), opt_size=0), r"equal on ranks 0,2"),
    "opt-too-large": (lambda: with_all(S8O, opt_size=4), r"opt_weight_shard_size is 4, but 2 ranks hold equal slices"),
    "bad-map": (lambda: {**S8O, "l1.w": Cut((2, 4), [-1, 2])}, r"tensor map \[-1, 2\] does not fit the device matrix"),
    "axes": (lambda: {**S8O, "l1.w": Cut((2, 4), [-1, 0, -1], 2, 4)}, r"l1.w .* the strategy describes 3 axes"),
    "missing": (lambda: {**S8O, "l4.w": Cut((2, 4), [-1])}, "no file holds l4.w"),
    "ranks": (lambda: real_cuts((4,)), r"for 4 ranks, but there are files of ranks 4-7"),
    "more-devices": (
        lambda: {**S8O, "l1.w": Cut((4, 4), [-1, 0])},
        "has (16 devices, but 8|8 devices, but 16)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_strategy_of_other_files_is_refused(case: str, files: dict[str, Path], tmp_path: Path) -> None:
    cuts, why = WRONG[case]
    shutil.copytree(files["s8o"], tmp_path / "s8o")
    strategy = write_strategy(tmp_path / "strategy.ckpt", cuts())
    refused(tmp_path / "s8o", strategy, TO_FOUR[1], why)


def test_equal_parts_may_be_trusted(tmp_path: Path) -> None:
    tensors = {"w": np.tile(np.arange(32, dtype=np.float32), 2)}
    cuts = {"w": Cut((2,), [0])}
    source, strategy = save(tmp_path / "s", tensors, cuts, range(2)), write_strategy(tmp_path / "x.ckpt", cuts)
    refused(source, strategy, None, r"w should be different parts .* --trust-parts")
    done = run(source, tmp_path / "made", strategy, None, trust_parts=True)
    assert any("is equal" in note for note in done.notes)
    assert_cut(tmp_path / "made", tensors, None, [0])


def test_what_json_says_of_shapes_is_held_against_the_files(s8: Path) -> None:
    document = json.loads((STRATEGIES / "s8.json").read_text())
    document["parallel_layout_item"]["l2.w"]["tensor_map"] = [-1, 0]  # the other axis: nothing else could tell
    wrong = s8.parent / "wrong.json"
    wrong.write_text(json.dumps(document))
    refused(s8, wrong, None, r"l2.w: the parts in the files make a tensor of shape \(16, 256\), .* states \(64, 64\)")


def test_a_target_that_cannot_be_cut(s8: Path) -> None:
    cuts = {name: Cut((5,), [-1, 0]) for name in S4}
    strategy = write_strategy(s8.parent / "five.ckpt", cuts)
    refused(s8, STRATEGIES / "s8.ckpt", strategy, r"l1.w has the shape \(784, 64\), which cannot be cut into .*5")


def test_files_of_different_steps_are_refused(s8: Path) -> None:
    save(s8, TENSORS, S8, [3], step=13)
    file_of_old = s8 / "rank_3" / "net-3_12.ckpt"
    file_of_old.unlink()
    refused(s8, STRATEGIES / "s8.ckpt", None, r"there is no step of which every rank has a file")
    (s8 / "rank_3" / "net-3_13.ckpt").rename(file_of_old)  # a name can lie
    refused(s8, STRATEGIES / "s8.ckpt", None, r"different steps \(global_step 12: .*; global_step 13: rank 3\)")


def test_the_newest_step_that_all_ranks_have_is_taken(s8: Path) -> None:
    save(s8, NEWER, S8, [0, 1], step=20)
    done = run(s8, s8.parent / "made", STRATEGIES / "s8.ckpt", None)
    assert done.version == 12 and "passed over 3_20: not every rank has it" in done.notes
    assert_cut(s8.parent / "made", TENSORS, None, [0])


def test_an_older_step_is_taken_when_damage_leaves_a_hole_in_the_newest(s8: Path) -> None:
    save(s8, NEWER, S8, range(8), step=20)
    for rank in (1, 5):
        (s8 / f"rank_{rank}" / "net-3_20.ckpt").write_bytes(b"")
    done = run(s8, s8.parent / "made", *TO_FOUR)
    assert done.version == 12
    assert any(note.startswith("passed over 3_20: ") and "no whole file of ranks 1,5" in note for note in done.notes)
    assert_cut(s8.parent / "made", TENSORS, S4, range(4))


def test_after_five_damaged_steps_it_says_that_there_are_more(s8: Path) -> None:
    for step in range(13, 19):
        save(s8, TENSORS, S8, range(8), step=step)
    for rank in (1, 5):
        for file in (s8 / f"rank_{rank}").iterdir():
            file.write_bytes(b"")
    refused(s8, STRATEGIES / "s8.ckpt", None, r"net-3_18.*net-3_14.*; 2 older steps were not tried")


def test_a_strategy_that_does_not_fit_is_no_reason_to_go_back(s8: Path) -> None:
    save(s8, NEWER, S8, range(8), step=20)
    with pytest.raises(CheckpointError, match=r"^nothing was written: [^;]*is for 4 ranks") as refused:
        run(s8, s8.parent / "made", STRATEGIES / "s4.ckpt", None)
    assert str(refused.value).count("nothing was written") == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no protobuf at all", "is no strategy file of MindSpore"),
        (b"", "holds no layout of a parameter"),
        (b"{}", "is no strategy file of MindSpore|holds no layout"),
        ((STRATEGIES / "group_info.pb").read_bytes(), "is no strategy file|holds no layout"),
        ((STRATEGIES / "pp" / "strategy_4.ckpt").read_bytes(), "describes only stage 1 of a pipeline"),
    ],
)
def test_what_is_no_strategy_is_refused(s8: Path, content: bytes, why: str) -> None:
    for name in ("strategy.ckpt", "strategy.json"):  # the content tells the form, not the name
        (s8.parent / name).write_bytes(content)
        refused(s8, s8.parent / name, None, why)


def test_what_is_no_checkpoint_is_refused(s8: Path) -> None:
    strategy = STRATEGIES / "s8.ckpt"
    (s8.parent / "foreign").mkdir()
    refused(s8.parent / "foreign", strategy, None, "holds no rank_0")
    refused(s8.parent / "nothing", strategy, None, "is no directory")
    for rank in range(8):
        file_of(s8, rank).write_bytes(b"PK\x03\x04 something else")
    refused(s8, strategy, None, "no file in .* is whole: .* is damaged at byte")
    add_manifest(s8, {"model": range(4)})
    refused(s8, strategy, None, "no file in .* is whole")


def test_the_manifest_knows_the_number_of_ranks(s8: Path) -> None:
    add_manifest(s8, {"model": range(16)})
    refused(s8, STRATEGIES / "s8.ckpt", None, "the checkpoint has 16 ranks, but .* for 8")


# -------------------------------------------------------------------------------------------------- where it is written


def test_nothing_is_written_over(s8: Path) -> None:
    for made in ("full", "file", "link"):
        target = s8.parent / made
        if made == "full":
            (target / "mine").mkdir(parents=True)
        elif made == "file":
            target.write_text("mine")
        else:
            target.symlink_to("/nowhere")
        with pytest.raises(UsageError, match="exists, and existing files are never overwritten"):
            run(s8, target, STRATEGIES / "s8.ckpt", None)
    with pytest.raises(UsageError, match="is the name of step 13, but the source is of step 12"):
        run(s8, s8.parent / "tft_saved_checkpoints-step_13", STRATEGIES / "s8.ckpt", None)


def test_some_ranks_only_beside_those_that_others_make(s8: Path) -> None:
    target = s8.parent / "made"
    for rank in (2, 0):
        assert run(s8, target, *TO_FOUR, ranks=(rank,)).ranks == (rank,)
    assert sorted(path.name for path in target.iterdir()) == ["rank_0", "rank_2"]
    assert_cut(target, TENSORS, S4, [0, 2])
    with pytest.raises(UsageError, match="rank_2 exists"):
        run(s8, target, *TO_FOUR, ranks=(2,))
    with pytest.raises(UsageError, match="--rank 4: the target has 4 ranks, 0 to 3"):
        run(s8, target, *TO_FOUR, ranks=(4,))


def test_a_disk_that_is_too_small(s8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(s8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    refused(s8, *TO_FOUR, "has 100000 bytes free, but .* are needed")


def test_worker_processes_make_the_same(s8: Path) -> None:
    """And leave the source as it was."""
    one, two = s8.parent / "one", s8.parent / "two"
    before = {file: (file.stat().st_mtime_ns, digest_file(file)) for file in s8.rglob("*.ckpt")}
    run(s8, one, *TO_FOUR)
    run(s8, two, *TO_FOUR, jobs=2, memory=2 * JOB_BYTES)
    for rank in range(4):
        assert file_of(one, rank).read_bytes() == file_of(two, rank).read_bytes()
    assert {file: (file.stat().st_mtime_ns, digest_file(file)) for file in s8.rglob("*.ckpt")} == before


def test_too_little_memory_is_refused(s8: Path) -> None:
    refused(s8, *TO_FOUR, "a worker process needs", memory=1000)


# --------------------------------------------------------------------------------------------------- when it goes wrong


def test_a_wrong_conversion_is_not_published(s8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(entry: TargetTensor, rank: int) -> Iterator[bytes]:
        """Flip one bit of one tensor of one rank."""
        data = bytearray(b"".join(blocks(entry, rank)))
        if entry.name == "l2.w" and rank == 2:
            data[len(data) // 2] ^= 1
        yield bytes(data)

    monkeypatch.setattr(reshard_rank, "blocks", spoilt)
    refused(s8, *TO_FOUR, "l2.w of rank 2 differs from what was written")


def test_a_large_tensor_is_read_and_written_in_several_values(s8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttp.mindspore_files.ckpt_writer.CHUNK_BYTES", 1000)
    run(s8, s8.parent / "four", *TO_FOUR)
    assert_cut(s8.parent / "four", TENSORS, S4, range(4))
    run(s8.parent / "four", s8.parent / "full", TO_FOUR[1], None)
    assert_cut(s8.parent / "full", TENSORS, None, [0])
