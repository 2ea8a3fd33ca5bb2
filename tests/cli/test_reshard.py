"""``ttp reshard`` as a command: its arguments, messages and JSON."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest

from tests.adapters.mindspore.reshard_worlds import STRATEGIES, assert_cut, real_cuts, real_tensors, save
from tests.cli.conftest import Ttp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing MindSpore warns of is not ours
    importlib.import_module("mindspore")

pytestmark = pytest.mark.xdist_group("mindspore-files")

TENSORS, S8, S4 = real_tensors(), real_cuts((2, 4)), real_cuts((4,))
FROM, TO = ("--src-strategy", STRATEGIES / "s8.ckpt"), ("--dst-strategy", STRATEGIES / "s4.ckpt")


@pytest.fixture(scope="module")
def s8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("s8"), TENSORS, S8, range(8))


def test_it_is_said_what_was_written(ttp: Ttp, s8: Path, tmp_path: Path) -> None:
    said = ttp("reshard", s8, tmp_path / "made", *FROM, *TO)
    assert said.code == 0 and said.err == ""
    assert "4 ranks, 52 tensors of step 12" in said.out and "every element checked" in said.out
    assert_cut(tmp_path / "made", TENSORS, S4, range(4))
    assert ttp("verify", tmp_path / "made").code == 0


def test_json_has_the_documented_keys(ttp: Ttp, s8: Path, tmp_path: Path) -> None:
    answer = ttp("reshard", s8, tmp_path / "made", *FROM, *TO, "--rank", 1, "--rank", 3, "--json").json
    files = [tmp_path / "made" / f"rank_{rank}" / f"ttp_rank_{rank}-3_12.ckpt" for rank in (1, 3)]
    assert answer == {
        "source": str(s8),
        "target": str(tmp_path / "made"),
        "version": 12,
        "ranks": [1, 3],
        "world_size": 4,
        "tensors": 26,
        "size": sum(file.stat().st_size for file in files),
        "notes": [],
    }
    said = ttp("reshard", "--help").out
    assert all(key in said for key in answer)


def test_what_is_wrong_is_said_in_one_line(ttp: Ttp, s8: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for arguments, code, why in (
        ((s8, s8, *FROM), 64, "exists, and existing files are never overwritten"),
        ((tmp_path / "no", tmp_path / "made", *FROM), 64, "is no directory"),
        ((s8, tmp_path / "made", *FROM, "--rank", 1), 64, "the target has 1 ranks, 0 to 0"),
        ((s8, tmp_path / "made", *FROM, "--memory", "much"), 64, "--memory much: give bytes"),
        ((s8, tmp_path / "made", *FROM, "--memory", "1.5M"), 64, "a worker process needs"),
        ((s8, tmp_path / "made", *FROM, "--memory", "9" * 400), 64, "give bytes"),
        (("x" * 300, tmp_path / "made", *FROM), 1, "File name too long"),
        ((s8, tmp_path / ("x" * 300) / "made", *FROM), 1, "File name too long"),
        ((s8, tmp_path / ("x" * 300), *FROM), 1, "File name too long"),
        ((s8, tmp_path / "made", "--src-strategy", "x" * 300), 64, "File name too long"),
        ((s8, tmp_path / "loop" / "made", *FROM), 1, "loop/made cannot be written"),
        ((s8, tmp_path / "made", *FROM, "--jobs", 0), 64, "--jobs 0: it has to be at least 1"),
        ((s8, tmp_path / "made", "--src-strategy", tmp_path / "none"), 64, "does not exist: give a strategy file"),
        ((s8, tmp_path / "made"), 1, "differs between"),
        ((s8, tmp_path / "made", "--src-strategy", STRATEGIES / "s4.ckpt"), 1, "files of ranks 4-7"),
    ):
        said = ttp("reshard", *arguments)
        assert (said.code, said.out) == (code, "") and why in said.err and said.err.count("\n") == 1, said
    assert not (tmp_path / "made").exists()
