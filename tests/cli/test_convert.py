"""``ttp convert`` as a command: its arguments, messages and JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

from tests.cli.conftest import Ttp
from tests.damage import flip


@pytest.fixture
def save_dir(ttp: Ttp, tmp_path: Path) -> Path:
    """Return a save_dir with two checkpoints of weights, made by the command itself."""
    for step in (3, 8):
        torch.save({"model": {"w": torch.full((2, 2), float(step)), "v": torch.ones(1)}}, tmp_path / "f.pt")
        assert ttp("convert", tmp_path / "f.pt", tmp_path / "saved", "--to", "dcp", "--step", step).code == 0
    return tmp_path / "saved"


def weights(path: Path) -> Any:
    return torch.load(path, weights_only=True)["model"]["w"]


def test_the_newest_whole_checkpoint_of_a_save_dir_is_taken(ttp: Ttp, save_dir: Path, tmp_path: Path) -> None:
    said = ttp("convert", save_dir, tmp_path / "new.pt", "--to", "torch")
    assert said.code == 0 and "weights of step 8, 2 tensors" in said.out and not said.err.strip()
    assert weights(tmp_path / "new.pt")[0, 0] == 8
    flip(save_dir / "tft_saved_checkpoints-step_8" / "__0_0.distcp")
    said = ttp("convert", save_dir, tmp_path / "older.pt", "--to", "torch")
    assert said.code == 0 and "skipped" in said.err and "step_8" in said.err
    assert weights(tmp_path / "older.pt")[0, 0] == 3
    said = ttp("convert", save_dir / "tft_saved_checkpoints-step_8", tmp_path / "no.pt", "--to", "torch")
    assert said.code == 1 and "is damaged" in said.err and not (tmp_path / "no.pt").exists()


def test_json_has_the_documented_keys(ttp: Ttp, save_dir: Path, tmp_path: Path) -> None:
    answer = ttp("convert", save_dir, tmp_path / "w.safetensors", "--to", "safetensors", "--json").json
    assert answer == {
        "source": str(save_dir / "tft_saved_checkpoints-step_8"),
        "target": str(tmp_path / "w.safetensors"),
        "to": "safetensors",
        "version": 8,
        "tensors": 2,
        "size": (tmp_path / "w.safetensors").stat().st_size,
        "optimizer": False,
        "tied": {},
        "left_out": [],
        "notes": [],
    }
    keys = ttp("convert", "--help").out
    assert all(key in keys for key in answer)


def test_an_old_checkpoint_keeps_its_name_unless_forced(ttp: Ttp, save_dir: Path, tmp_path: Path) -> None:
    arguments = ("convert", tmp_path / "f.pt", save_dir, "--to", "dcp", "--step", 8)
    said = ttp(*arguments)
    assert said.code == 64 and "--force" in said.err
    assert ttp(*arguments, "--force").code == 0
    assert ttp("verify", save_dir).code == 0
    kinds = [entry["kind"] for entry in ttp("list", save_dir, "--json").json]
    assert sorted(kinds) == ["checkpoint", "checkpoint", "superseded"]


REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    (("nowhere", "new.pt", "--to", "torch"), 64, "does not exist"),
    (("empty", "new.pt", "--to", "torch"), 1, "no whole checkpoint"),
    (("stock", "new.pt", "--to", "torch"), 1, "ttp did not write"),
    (("saved", "new", "--to", "dcp"), 64, "makes a checkpoint of a file"),
    (("saved", "new.pt", "--to", "torch", "--step", "3"), 64, "--to dcp only"),
    (("saved", "empty", "--to", "torch"), 64, "not a regular file"),
    (("saved", "pipe", "--to", "torch", "--force"), 64, "not a regular file"),
    (("f.pt", "new", "--to", "dcp", "--step", "-5"), 64, "not a number of finished updates"),
    (("f.pt", "new", "--to", "dcp", "--step", "9" * 20), 64, "not a number of finished updates"),
    (("saved", "new.pt", "--to", "zip"), 64, "--to"),
    (("saved", "new.pt", "--to", "megatron"), 64, "--to"),
    (("saved", "new.pt", "--to", "torch", "--optimizer"), 1, "no state of an optimizer"),
]


def test_what_cannot_be_done_is_said(ttp: Ttp, save_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "stock").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stock" / ".metadata").write_bytes(b"")
    for arguments, code, words in REFUSED:
        said = ttp("convert", *arguments)
        assert said.code == code and words in said.err and "Traceback" not in said.err, (arguments, said)
        assert not (tmp_path / "new.pt").exists() and not (tmp_path / "new").exists()
