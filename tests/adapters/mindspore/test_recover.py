"""``ttp recover`` and ``ttp redundancy`` on real files: lost files come from replicas, and damaged ones are not
used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.mindspore.jobs import S8_GROUPS, add_manifest, group_of, make_job, saved_by_ttp
from tests.adapters.mindspore.reshard_worlds import S8, S8O, STRATEGIES, write_strategy
from tests.damage import flip
from ttp.adapters.mindspore import get_ckpt_path_with_strategy, write_group_info
from ttp.cli.main import main
from ttp.errors import CheckpointError, ConfigError
from ttp.mindspore_files.redundancy_plan import by_template, newest_first

pytestmark = pytest.mark.xdist_group("mindspore-files")

Ttp = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ttp(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ttp:
    """Return ``ttp(words...)``, which gives exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "240")

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"), S8_GROUPS)


@pytest.fixture
def job(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a fresh copy of a job of 8 ranks. The test may damage it; ``ttp recover`` must not change it."""
    shutil.copytree(pristine, tmp_path / "job")
    yield tmp_path / "job"


@pytest.fixture
def strategy(tmp_path: Path) -> Path:
    return write_strategy(tmp_path / "strategy.ckpt", S8)


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(root)): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


def file(job: Path, rank: int) -> Path:
    return job / f"rank_{rank}" / "checkpoint-2_1875.ckpt"


def answer(said: tuple[int, str, str]) -> dict[str, Any]:
    return dict(json.loads(said[1]))


@pytest.mark.parametrize("way", ["link", "copy"])
def test_what_is_lost_or_damaged_is_had_from_replicas(
    way: str, ttp: Ttp, job: Path, strategy: Path, tmp_path: Path
) -> None:
    shutil.rmtree(job / "rank_0")
    file(job, 5).unlink()
    flip(file(job, 2), -40)
    file(job, 3).write_bytes(file(job, 3).read_bytes()[:-30])
    before = tree(job)
    out = tmp_path / "out"
    code, said, _ = ttp("recover", job, "--strategy", strategy, "--by", way, "--out", out)
    assert code == 0, said
    assert [group_of(file(out, rank)) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert tree(job) == before
    assert (file(out, 0).stat().st_ino == file(job, 4).stat().st_ino) == (way == "link")
    mapping = json.loads((out / "recovered.json").read_text())
    assert mapping["files"]["0"] == "rank_4/checkpoint-2_1875.ckpt" and mapping["lost"] == {}
    for words in ("it has no folder", "it has no checkpoint-2_1875.ckpt", "CRC", "is damaged"):
        assert words in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_mapping_alone(ttp: Ttp, job: Path, strategy: Path, tmp_path: Path) -> None:
    file(job, 1).unlink()
    found = answer(ttp("recover", job, "--strategy", strategy, "--out", tmp_path / "m.json", "--json"))
    assert (
        found["files"]["1"]
        == "rank_5/checkpoint-2_1875.ckpt"
        == json.loads((tmp_path / "m.json").read_text())["files"]["1"]
    )
    assert found["files"]["0"] == "rank_0/checkpoint-2_1875.ckpt"
    assert found["ranks"][1] == {"rank": 1, "state": "replica", "source": 5, "why": "it has no checkpoint-2_1875.ckpt"}
    assert set(found) == {"source", "checkpoint", "told_by", "files", "ranks", "disagreements", "skipped", "out"}


def test_what_cannot_be_rebuilt_is_said(ttp: Ttp, job: Path, strategy: Path, tmp_path: Path) -> None:
    shutil.rmtree(job / "rank_2")
    flip(file(job, 6), -40)
    out = tmp_path / "out"
    code, said, _ = ttp("recover", job, "--strategy", strategy, "--by", "copy", "--out", out)
    assert code == 1 and "2 of 8 ranks cannot be rebuilt" in said
    assert "it has no folder; rank 6, which should hold the same, cannot help either" in said
    assert not (out / "rank_2").exists() and group_of(file(out, 7)) == 3


def test_without_replicas_nothing_stands_for_a_rank(ttp: Ttp, job: Path, tmp_path: Path) -> None:
    sharded = write_strategy(tmp_path / "s.ckpt", S8O)
    shutil.rmtree(job / "rank_2")
    code, said, _ = ttp("recover", job, "--strategy", sharded)
    assert code == 1 and "no other rank holds the same" in said


def test_replicas_that_differ_are_named(ttp: Ttp, job: Path, strategy: Path, tmp_path: Path) -> None:
    """Of two that differ neither is trusted. Of three the two that agree are right."""
    shutil.copy(file(job, 7), file(job, 4))
    found = answer(ttp("recover", job, "--strategy", strategy, "--json"))
    assert found["disagreements"] == ["rank 4 differs from rank 0, which should hold the same, in l1.w"]
    assert [found["ranks"][r]["state"] for r in (0, 4, 1)] == ["lost", "lost", "own"]
    three = tmp_path / "g.pb"
    write_group_info(three, [0, 1, 2])
    triple = make_job(tmp_path / "triple", [(0, 1, 2)])
    shutil.copy(file(job, 7), file(triple, 0))
    code, said, _ = ttp("recover", triple, "--group-info", three)
    assert code == 1 and "rank 0 differs from rank 1" in said and "which agree" in said
    assert answer(ttp("recover", triple, "--data-parallel", "--json"))["files"]["0"] == "rank_1/checkpoint-2_1875.ckpt"


def test_another_step_under_the_same_name_is_not_used(ttp: Ttp, job: Path, strategy: Path, tmp_path: Path) -> None:
    other = make_job(tmp_path / "other", S8_GROUPS, step=1900)
    shutil.copy(file(other, 4), file(job, 4))
    found = answer(ttp("recover", job, "--strategy", strategy, "--json"))
    assert found["ranks"][4]["source"] == 0 and "step_num 1900, the others of epoch_num 2" in found["ranks"][4]["why"]


def test_a_file_that_ends_between_two_tensors_is_told_by_its_replica(ttp: Ttp, tmp_path: Path) -> None:
    """The file has no CRC, and every tensor in it is whole."""
    job = make_job(tmp_path / "job", [(0, 1, 2)], crc=False)
    data = file(job, 1).read_bytes()
    file(job, 1).write_bytes(data[: data.index(b"\x04l3.w") - 3])
    found = answer(ttp("recover", job, "--data-parallel", "--json"))
    assert "l3.w (missing in one)" in found["disagreements"][0]
    assert found["ranks"][1]["source"] == 0


def test_group_info_in_the_folders_of_the_ranks(ttp: Ttp, job: Path) -> None:
    for group in S8_GROUPS:
        for rank in group:
            write_group_info(job / f"rank_{rank}" / "group_info.pb", group)
    shutil.rmtree(job / "rank_0")
    found = answer(ttp("recover", job, "--json"))
    assert found["files"]["0"] == "rank_4/checkpoint-2_1875.ckpt" and "group_info.pb" in found["told_by"]
    write_group_info(job / "rank_7" / "group_info.pb", [2, 7])
    assert "they are not of one job" in ttp("recover", job)[2]


def test_a_power_off_checkpoint_has_one_file_for_each_group(ttp: Ttp, tmp_path: Path) -> None:
    save_dir = tmp_path / "saved"
    step = saved_by_ttp(save_dir, 12)
    code, said, _ = ttp("recover", save_dir, "--by", "copy", "--out", tmp_path / "out")
    assert code == 0, said
    names = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.ckpt"))
    assert names == [f"rank_{rank}/ttp_rank_{rank}-1_12.ckpt" for rank in range(4)]
    told = answer(ttp("redundancy", step, "--json"))
    assert (told["kind"], told["groups"], told["parameters"]["odd"]) == ("manifest", [[0, 2], [1, 3]], [[1, 3]])
    for same in (step / "manifest.json", save_dir):
        assert answer(ttp("redundancy", same, "--json"))["groups"] == told["groups"]
    whole = step / "rank_3" / "ttp_rank_3-1_12.ckpt"
    whole.write_bytes(make_and_read(tmp_path / "again"))
    assert "does not have the digest" in ttp("recover", save_dir)[1]


def make_and_read(root: Path) -> bytes:
    return next(make_job(root, [(9,)]).rglob("*.ckpt")).read_bytes()


def test_the_newest_step_that_all_groups_have(ttp: Ttp, job: Path, strategy: Path) -> None:
    for rank in (0, 1, 2):  # a save that was not finished
        shutil.copy(file(job, rank), job / f"rank_{rank}" / "checkpoint-3_10.ckpt")
    for rank in range(8):
        shutil.copy(file(job, rank), job / f"rank_{rank}" / "checkpoint-1_1875.ckpt")
    assert answer(ttp("recover", job, "--strategy", strategy, "--json"))["checkpoint"] == "checkpoint-2_1875.ckpt"
    older = answer(ttp("recover", job, "--strategy", strategy, "--step", "1_1875", "--json"))
    assert older["checkpoint"] == "checkpoint-1_1875.ckpt"


def test_an_older_checkpoint_when_the_newest_lacks_a_rank(ttp: Ttp, job: Path, strategy: Path) -> None:
    for rank in range(8):
        shutil.copy(file(job, rank), job / f"rank_{rank}" / "checkpoint-3_1.ckpt")
    for rank in (1, 5):  # all that hold the same
        flip(job / f"rank_{rank}" / "checkpoint-3_1.ckpt", -40)
    code, out, _ = said = ttp("recover", job, "--strategy", strategy, "--json")
    assert code == 0 and answer(said)["checkpoint"] == "checkpoint-2_1875.ckpt"
    assert len(answer(said)["skipped"]) == 1 and "rank 1 cannot be rebuilt: " in answer(said)["skipped"][0]
    out = ttp("recover", job, "--strategy", strategy)[1]
    assert "skipped" in out and "checkpoint-3_1.ckpt" in out
    said = ttp("recover", job, "--strategy", strategy, "--step", "3_1", "--json")
    assert said[0] == 1 and answer(said)["checkpoint"] == "checkpoint-3_1.ckpt" and answer(said)["skipped"] == []
    for rank in (2, 6):
        file(job, rank).write_bytes(b"")
    said = ttp("recover", job, "--strategy", strategy, "--json")
    lost = [one["rank"] for one in answer(said)["ranks"] if one["state"] == "lost"]
    assert (said[0], answer(said)["checkpoint"], lost) == (1, "checkpoint-3_1.ckpt", [1, 5]), (
        "none is whole: the newest"
    )


def test_a_save_dir_in_which_not_everything_is_of_ttp(ttp: Ttp, job: Path, tmp_path: Path) -> None:
    """Directories without usable files do not hide an older checkpoint, and a missing step is reported."""
    save_dir = tmp_path / "saved"
    (save_dir / "tft_saved_checkpoints-step_12" / "rank_0").mkdir(parents=True)
    (save_dir / "tft_saved_checkpoints-step_11").symlink_to(tmp_path / "nowhere")
    code, _, said = ttp("recover", save_dir)
    assert code == 64 and "it is not known which ranks of" in said and "step_12" in said
    step = save_dir / "tft_saved_checkpoints-step_10"
    step.mkdir()
    file(job, 0).parent.rename(step / "rank_0")
    add_manifest(step, {"m": (0,)}, 10)
    found = answer(ttp("recover", save_dir, "--json"))
    assert found["source"] == str(step) and "step_12" in found["skipped"][0] and "step_11" in found["skipped"][1]
    code, _, said = ttp("recover", save_dir, "--step", "7_7")
    assert code == 1 and f"{save_dir}: no checkpoint of epoch 7, step 7 can be used: " in said
    (tmp_path / "junk").touch()
    code, _, said = ttp("recover", save_dir, "--strategy", tmp_path / "junk")
    assert code == 1 and said.count("is no strategy file") == 1


def test_names_that_tell_the_rank() -> None:
    pangu = {rank: [f"pangu{rank}-1_20.ckpt", f"pangu{rank}-1_3.ckpt"] for rank in (1, 3, 11)}
    assert newest_first(by_template(pangu), ((1, 3), (11,)))[0] == "pangu*-1_20.ckpt"
    unfinished = {rank: ["a-2_1875.ckpt", "a-2_1875_breakpoint.ckpt", "a-3_1_breakpoint.ckpt"] for rank in (0, 1)}
    assert newest_first(by_template(unfinished), ((0, 1),))[0] == "a-2_1875.ckpt"
    resnet = {rank: ["resnet50-9_1.ckpt"] for rank in (0, 50)}
    assert by_template(resnet) == {"resnet50-9_1.ckpt": {0: "resnet50-9_1.ckpt", 50: "resnet50-9_1.ckpt"}}


REFUSED: dict[str, tuple[list[str], str, int]] = {
    "nobody tells": ([], "it is not known which ranks", 64),
    "two tell": (["--data-parallel", "--strategy", "S"], "give exactly one of", 64),
    "no place": (["--data-parallel", "--by", "copy"], "needs --out", 64),
    "taken": (["--data-parallel", "--by", "copy", "--out", "JOB"], "exists", 64),
    "inside": (["--data-parallel", "--by", "copy", "--out", "JOB/rank_0/new"], "is never changed", 64),
    "no such step": (["--data-parallel", "--step", "9_9"], "no rank_N has a checkpoint of epoch 9, step 9", 1),
    "no step": (["--data-parallel", "--step", "nine"], "epoch and step", 64),
    "too many ranks": (["--data-parallel", "--ranks", "2000000000"], "less than or equal to 1048576", 64),
    "a long name": (["--strategy", "x" * 300], "File name too long", 1),
    "a loop": (["--data-parallel", "--out", "LOOP/y"], "cannot create", 1),
    "fewer ranks": (["--strategy", "S4"], "job: no checkpoint can be used: the strategy", 1),
    "few ranks": (["--data-parallel", "--ranks", "2"], "does not mention rank 2", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, ttp: Ttp, job: Path, strategy: Path, tmp_path: Path) -> None:
    words, text, expected = REFUSED[name]
    named = {"S": str(strategy), "S4": str(STRATEGIES / "s4.ckpt"), "LOOP/y": str(tmp_path / "loop" / "y")}
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = tree(job)
    code, _, said = ttp("recover", job, *(named.get(word, word).replace("JOB", str(job)) for word in words))
    assert (code, text in said) == (expected, True), said
    assert tree(job) == before


def test_links_across_file_systems_say_what_to_do(
    ttp: Ttp, job: Path, strategy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr(os, "link", link)
    code, _, said = ttp("recover", job, "--strategy", strategy, "--by", "link", "--out", tmp_path / "out")
    assert code == 1 and "--by copy" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


# -------------------------------------------------------------------------------------------------------- redundancy


def test_redundancy_of_strategies_and_group_info(ttp: Ttp, strategy: Path, tmp_path: Path) -> None:
    told = answer(ttp("redundancy", strategy, "--json"))
    assert set(told) == {"source", "kind", "groups", "parameters"}
    assert (told["kind"], told["groups"]) == ("strategy", [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert told["parameters"]["l3.w"] == [list(range(8))]
    assert "0-7" in ttp("redundancy", strategy)[1]
    write_group_info(write_strategy(tmp_path / "both" / "s.ckpt", S8).with_name("group_info.pb"), [0, 4])
    assert answer(ttp("redundancy", tmp_path / "both", "--json"))["groups"] == told["groups"]
    write_group_info(tmp_path / "g.pb", [0, 4])
    assert answer(ttp("redundancy", tmp_path / "g.pb", "--json")) == {
        "source": str(tmp_path / "g.pb"), "kind": "group_info", "groups": [[0, 4]], "parameters": {},
    }  # fmt: skip


def test_redundancy_of_nothing(ttp: Ttp, tmp_path: Path) -> None:
    for name in ("no.pb", "x" * 300):
        assert ttp("redundancy", tmp_path / name)[0] == 64
    for name in ("x.pb", "x.ckpt", "x.json", "manifest.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe{")
        code, _, said = ttp("redundancy", tmp_path / name)
        assert code == 1 and "damaged" in said and "Traceback" not in said


# ------------------------------------------------------------------------------------- get_ckpt_path_with_strategy


def test_the_path_of_a_replica(job: Path, strategy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like MindSpore's function, which needs init()."""
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h"})
    own = str(file(job, 1))
    file(job, 1).unlink()
    assert get_ckpt_path_with_strategy(own, str(strategy)) == str(file(job, 5))
    with pytest.raises(CheckpointError, match="cannot be read"):
        get_ckpt_path_with_strategy(own, str(job / "no-strategy"))
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError):
        get_ckpt_path_with_strategy(own, str(strategy))


def test_a_number_that_begins_with_that_of_the_rank_is_another_one(
    tmp_path: Path, strategy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rank_10`` is not ``rank_1``; its file has other slices."""
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h"})
    for rank in (5, 10):
        path = tmp_path / "many" / f"rank_{rank}" / f"ttp_rank_{rank}-1_2.ckpt"
        path.parent.mkdir(parents=True)
        path.touch()
    found = get_ckpt_path_with_strategy(str(path), str(strategy))
    assert found == str(tmp_path / "many" / "rank_5" / "ttp_rank_5-1_2.ckpt")


@pytest.mark.parametrize("rank", [0, 3, 5, 9, 14])
def test_the_same_path_as_mindspore(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any rank and strategy, also in later stages of a pipeline."""
    from mindspore.train import _utils, serialization

    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": str(rank), "WORLD_SIZE": "16", "MASTER_ADDR": "h"})
    monkeypatch.setattr(serialization, "get_rank", lambda: rank)
    monkeypatch.setattr(_utils, "get_rank", lambda: rank)
    for layouts in (S8, S8O):
        strategy = str(write_strategy(tmp_path / "s.ckpt", layouts, rank // 8))
        for there in ([], [4, 12], [1, 7, 13], list(range(16))):
            folder = tmp_path / f"{len(there)}-{layouts is S8}"
            for other in there:
                path = folder / f"rank_{other}" / f"ttp_rank_{other}-1_2.ckpt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            wanted = str(folder / f"rank_{rank}" / f"ttp_rank_{rank}-1_2.ckpt")
            assert get_ckpt_path_with_strategy(wanted, strategy) == serialization.get_ckpt_path_with_strategy(
                wanted, strategy
            )
