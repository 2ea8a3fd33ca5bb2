"""``ttp list``, ``verify`` and ``inspect``: what they say of a save_dir."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import SaveDir, Ttp
from tests.damage import flip
from ttp.cli import verify
from ttp.store import catalog, manifest
from ttp.store.digest import digest_bytes


def keys_in_help(ttp: Ttp, command: str) -> set[str]:
    return set(re.findall(r"[a-z0-9_]+", ttp(command, "--help").out.partition("JSON")[2]))


# ----------------------------------------------------------------------------------------------------------------- list


def test_list_newest_first(ttp: Ttp, save_dir: SaveDir) -> None:
    for version in (9, 12, 100):
        save_dir.checkpoint(version)
    said = ttp("list", save_dir.path)
    assert said.code == 0
    assert re.findall(r"step_(\d+) ", said.out) == ["100", "12", "9"]
    assert "rank 1 [b] was lost" in said.out, "brackets in a text are not markup"


def test_list_json(ttp: Ttp, save_dir: SaveDir) -> None:
    checkpoint, draft = save_dir.checkpoint(12), save_dir.draft(13)
    (save_dir.path / "notes.txt").touch()
    rows = ttp("list", save_dir.path, "--json").json
    assert [(r["name"], r["kind"], r["version"], r["whole"]) for r in rows] == [
        (draft.name, "draft", 13, False),
        (checkpoint.name, "checkpoint", 12, True),
    ]
    assert set(rows[0]) == set(rows[1]) <= keys_in_help(ttp, "list")
    assert rows[1]["world_size"] == 4
    assert rows[1]["size"] == 338
    assert [r["name"] for r in ttp("list", save_dir.path, "--json", "--all").json][-1] == "notes.txt"


def test_list_of_one_checkpoint_shows_that(ttp: Ttp, save_dir: SaveDir) -> None:
    save_dir.checkpoint(9)
    one = save_dir.checkpoint(12)
    assert [row["name"] for row in ttp("list", one, "--json").json] == [one.name]


def test_list_tells_a_missing_piece(ttp: Ttp, save_dir: SaveDir) -> None:
    (save_dir.checkpoint(12) / "job_0.msgpack").unlink()
    assert "job_0.msgpack is missing" in ttp("list", save_dir.path).out
    assert ttp("list", save_dir.path, "--json").json[0]["whole"] is False


def test_list_says_when_the_fallback_holds_something_newer(
    ttp: Ttp, save_dir: SaveDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = SaveDir(tmp_path / "fallback")
    monkeypatch.setenv("TTP_FALLBACK_DIR", str(fallback.path))
    for version in (8, 12):
        save_dir.checkpoint(version)
    fallback.checkpoint(12)
    assert "newer" not in ttp("list", save_dir.path).out
    fallback.draft(30)
    damaged, newest = fallback.checkpoint(20), fallback.checkpoint(16)
    (damaged / "job_0.msgpack").unlink()
    expected = f"newer: step 16 is in TTP_FALLBACK_DIR, see `ttp list {fallback.path}`"
    assert expected in ttp("list", save_dir.path).out
    assert "newer" not in ttp("list", fallback.path).out
    assert len(ttp("list", save_dir.path, "--json").json) == 2
    assert ttp("verify", newest).code == ttp("inspect", newest).code == 0
    shutil.rmtree(save_dir.path)
    save_dir.path.mkdir()
    said = ttp("list", save_dir.path).out
    assert "there is no checkpoint" in said and expected in said
    monkeypatch.setenv("TTP_FALLBACK_DIR", str(newest / "manifest.json"))
    assert "TTP_FALLBACK_DIR: cannot list" in ttp("list", save_dir.path).out


@pytest.mark.parametrize(("name", "value"), [("TTP_TOKEN_FILE", "/nope"), ("TTP_PROT", "1")])
def test_list_minds_no_setting_of_the_job(
    ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    save_dir.checkpoint(8)
    monkeypatch.setenv(name, value)
    assert ttp("list", save_dir.path).code == 0


def test_list_of_nothing(ttp: Ttp, tmp_path: Path) -> None:
    assert ttp("list", tmp_path, "--json").json == []
    said = ttp("list", tmp_path)
    assert (said.code, "no checkpoint" in said.out) == (0, True)
    (tmp_path / "file").touch()
    said = ttp("list", tmp_path / "file")
    assert said.code == 64 and "not a directory" in said.err


def test_paths_are_not_cut_in_a_pipe(ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    path = save_dir.checkpoint(123456789)
    assert path.name in ttp("list", save_dir.path).out


def test_a_terminal_without_a_width_is_like_none(ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_dir.checkpoint(12)
    for arguments, text in [(("list", save_dir.path), path.name), (("list", "--help"), "Usage")]:
        monkeypatch.setenv("COLUMNS", "0")  # as containers set it that know no size
        assert text in ttp(*arguments).out


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_whole(ttp: Ttp, save_dir: SaveDir) -> None:
    path = save_dir.checkpoint(12)
    for target in (save_dir.path, path, f"{path}/"):
        said = ttp("verify", target)
        assert said.code == 0
        assert re.match(r"whole\s+tft_saved_checkpoints-step_12", said.out)


def damage_byte(path: Path) -> str:
    flip(path / "__0_0.distcp")
    return "__0_0.distcp is damaged"


def damage_missing(path: Path) -> str:
    (path / "job_0.msgpack").unlink()
    return "job_0.msgpack is missing"


def damage_size(path: Path) -> str:
    os.truncate(path / "__0_0.distcp", 5)
    return "__0_0.distcp has 5 bytes instead of"


def damage_manifest(path: Path) -> str:
    (path / "manifest.json").write_text("{")
    return "is damaged"


def damage_all(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return "has no manifest.json"


DAMAGES = [damage_byte, damage_missing, damage_size, damage_manifest, damage_all]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("whole_save_dir", [True, False])
def test_verify_says_what_is_wrong(ttp: Ttp, save_dir: SaveDir, damage: object, whole_save_dir: bool) -> None:
    path = save_dir.checkpoint(12)
    problem = damage(path)  # type: ignore[operator]
    said = ttp("verify", save_dir.path if whole_save_dir else path)
    assert said.code == 1
    assert said.out.startswith("damaged")
    assert problem in said.out
    json = ttp("verify", path, "--json")
    assert json.code == 1
    assert json.json["whole"] is False
    assert problem in json.json["checkpoints"][0]["problems"][0]


def test_verify_walks_back(ttp: Ttp, save_dir: SaveDir) -> None:
    save_dir.checkpoint(3)
    older, newest = save_dir.checkpoint(9), save_dir.checkpoint(12)
    flip(newest / "__0_0.distcp")
    said = ttp("verify", save_dir.path)
    assert said.code == 1
    assert f"resume from {older.name}" in said.out
    json = ttp("verify", save_dir.path, "--json").json
    assert (json["whole"], json["restores"]) == (False, older.name)
    assert [(c["version"], c["whole"]) for c in json["checkpoints"]] == [(12, False), (9, True)]
    assert {*json, *json["checkpoints"][0]} <= keys_in_help(ttp, "verify")


REFUSED = "A restart is refused: no checkpoint is whole. Repair one, or move the damaged ones away."
FIVE = "A restart is refused: of the 5 newest ones, which it tries, no checkpoint is whole."
NOTHING = "A restart would start from nothing."


@pytest.mark.parametrize(
    ("directories", "whole", "damaged", "elsewhere", "told"),
    [
        (6, [9], [], [], "resume from tft_saved_checkpoints-step_9."),
        (0, [], [9, 12], [], REFUSED),
        (0, [9], [20, 21, 22, 23, 24], [], FIVE),
        (6, [], [], [], NOTHING),
        (0, [], [12], [9], "resume from {}/tft_saved_checkpoints-step_9."),
        (0, [12], [], [14], "resume from {}/tft_saved_checkpoints-step_14."),
        (0, [9], [12], [9], "resume from tft_saved_checkpoints-step_9."),
    ],
)
def test_verify_tells_what_a_restart_does(
    directories: int, whole: list[int], damaged: list[int], elsewhere: list[int], told: str, ttp: Ttp,
    save_dir: SaveDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As ``restore()`` does: a directory without a manifest is no attempt, and the fallback directory counts."""
    fallback = SaveDir(tmp_path / "fallback")
    monkeypatch.setenv("TTP_FALLBACK_DIR", str(fallback.path))
    for version in whole:
        save_dir.checkpoint(version)
    for version in damaged:
        flip(save_dir.checkpoint(version) / "__0_0.distcp")
    for version in elsewhere:
        fallback.checkpoint(version)
    for number in range(directories):
        (save_dir.path / f"tft_saved_checkpoints-step_3{number}").mkdir(parents=True)
    told = told.format(fallback.path)
    assert told in ttp("verify", save_dir.path, "--all").out, "a restart does not depend on how much is read here"
    said = ttp("verify", save_dir.path)
    assert told in said.out and said.code == int(directories + len(damaged) > 0)  # of what bears the newest name here
    restores = ttp("verify", save_dir.path, "--json").json["restores"]
    assert restores == (told.rstrip(".").rpartition("/")[2].split()[-1] if "resume" in told else None)


def test_verify_the_newest_only(ttp: Ttp, save_dir: SaveDir) -> None:
    flip(save_dir.checkpoint(9) / "__0_0.distcp")
    save_dir.checkpoint(12)
    assert ttp("verify", save_dir.path).code == 0
    everything = ttp("verify", save_dir.path, "--all", "--json")
    assert everything.code == 1
    assert [c["whole"] for c in everything.json["checkpoints"]] == [True, False]
    assert everything.json["restores"] == "tft_saved_checkpoints-step_12"


def test_verify_knows_a_draft(ttp: Ttp, save_dir: SaveDir) -> None:
    save_dir.checkpoint(9)
    draft = save_dir.draft(12)
    assert ttp("verify", save_dir.path).code == 0, "a draft is no checkpoint, and does not make the newest one damaged"
    said = ttp("verify", draft)
    assert said.code == 1
    assert "never committed" in said.out


def test_verify_notes_what_nobody_vouches_for(ttp: Ttp, save_dir: SaveDir) -> None:
    path = save_dir.checkpoint(12)
    (path / "stranger").touch()
    said = ttp("verify", path)
    assert said.code == 0
    assert "stranger is not in the manifest" in said.out
    assert ttp("verify", path, "--json").json["checkpoints"][0]["notes"] == ["stranger is not in the manifest"]


def test_verify_parses_each_manifest_once(ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten thousand pieces takes seconds."""
    parsed: list[str] = []
    parse = manifest._parse

    def counted(data: bytes, path: Path) -> manifest.Manifest:
        parsed.append(path.parent.name)
        return parse(data, path)

    monkeypatch.setattr(manifest, "_parse", counted)
    names = [save_dir.checkpoint(version).name for version in (9, 12)]
    parsed.clear()
    assert ttp("verify", save_dir.path, "--all").code == 0
    assert sorted(parsed) == sorted(names)


def test_verify_reads_what_has_replaced_a_checkpoint(
    ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may save a version again while its checkpoints are being read."""
    path = save_dir.checkpoint(12)

    def scanned(directory: Path) -> list[catalog.CatalogEntry]:
        found = catalog.scan(directory)
        before = manifest.Manifest.load(path)
        first, *others = before.pieces
        (path / first.file).write_bytes(data := b"saved again")
        first = replace(first, size=len(data), digest=digest_bytes(data))
        (path / manifest.MANIFEST).write_text(replace(before, pieces=(first, *others)).to_json())
        return found

    monkeypatch.setattr(verify, "scan", scanned)
    said = ttp("verify", save_dir.path)
    assert said.code == 0, said.out


def test_verify_nothing(ttp: Ttp, tmp_path: Path) -> None:
    said = ttp("verify", tmp_path)
    assert (said.code, said.out) == (1, "")
    assert "no checkpoint" in said.err
    json = ttp("verify", tmp_path, "--json")
    assert json.code == 1
    assert json.json == {"path": str(tmp_path), "whole": False, "restores": None, "checkpoints": []}


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_json(ttp: Ttp, save_dir: SaveDir) -> None:
    save_dir.checkpoint(9)
    path = save_dir.checkpoint(12)
    json = ttp("inspect", path, "--json").json
    assert json == ttp("inspect", save_dir.path, "--json").json, "the newest"
    assert (json["version"], json["incarnation"], json["cause"]) == (12, 3, "rank 1 [b] was lost")
    assert json["groups"] == {"model": [0, 1, 2, 3]}
    assert {p["file"] for p in json["pieces"]} == {"__0_0.distcp", "rank_local_2_0.msgpack", "job_0.msgpack"}
    assert [(t["name"], t["dtype"], t["shape"], t["size"]) for t in json["tensors"]] == [
        ("model.weight", "float32", [10, 2], 100),
        ("optim.weight.exp_avg", "bfloat16", [], 100),
    ]
    assert json["values"] == ["optim.groups.0.lr"]
    assert json["rank_local"] == {
        "present": [0, 2],
        "provisional": [2],
        "rederived": {"1": "there is no page of rank 1", "3": "no rank of its host was left"},
    }
    nested = {*json, *json["pieces"][0], *json["tensors"][0], *json["rank_local"]}
    assert nested <= keys_in_help(ttp, "inspect")


def test_inspect_tells_people(ttp: Ttp, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_dir.checkpoint(12)
    said = ttp("inspect", path)
    assert said.code == 0
    for text in (
        "rank 1 [b] was lost",
        "10x2",
        "scalar",
        "held by ranks 0-3",
        "goes on with step 13",
        "present for ranks 0,2; for rank 2 from before the update in which they died",
        "derived anew for rank 1: there is no page of rank 1",
    ):
        assert text in said.out, text
    monkeypatch.setattr("ttp.cli.inspection.TENSORS_SHOWN_MAX", 1)
    some = ttp("inspect", path).out
    assert "exp_avg" not in some
    assert "and 1 more tensors" in some
    assert "exp_avg" in ttp("inspect", path, "--all").out


def test_inspect_of_what_is_damaged_and_of_nothing(ttp: Ttp, save_dir: SaveDir, tmp_path: Path) -> None:
    path = save_dir.checkpoint(12)
    damage_manifest(path)
    said = ttp("inspect", path)
    assert (said.code, said.out) == (1, "")
    assert "is damaged" in said.err
    assert ttp("inspect", tmp_path).code == 1
