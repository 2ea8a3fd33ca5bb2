"""The checkpoints that a rank offers to restore if there are two directories."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.damage import flip
from tests.store.test_catalog import edit
from ttp.config import RankEnv
from ttp.core.layout import Rank, Version
from ttp.core.restore_choice import agree, none_whole_note
from ttp.core.restore_messages import RestoreView
from ttp.errors import CheckpointError, RestoreError
from ttp.store import catalog, names
from ttp.store.choice import Found, check_chosen, look_back, warn_of_new_beginning
from ttp.store.history import FILE, line_of
from ttp.store.manifest import MANIFEST, Manifest, load_with_digest
from ttp.store.writable import absolute

if TYPE_CHECKING:
    from tests.store.conftest import World


@pytest.fixture
def other(world: World) -> Iterator[World]:
    """Return the fallback directory, filled like ``world``."""
    yield type(world)(world.save_dir.with_name("fallback"))


def versions(found: Found) -> list[int]:
    return [c.version for c in found.candidates]


def spoil(path: Path) -> Path:
    """Damage a checkpoint so that only reading finds it."""
    flip(path / "__0_1.distcp")
    return path


def places(found: Found) -> dict[int, str]:
    return {c.version: path.parent.name for c, path in found.where.items()}


def test_the_newest_wins_wherever_it_lies(world: World, other: World) -> None:
    world.make(8), world.make(4), other.make(12), other.make(6)
    found = look_back(world.save_dir, other.save_dir)
    assert versions(found) == [12, 8, 6, 4]
    assert places(found) == {12: "fallback", 8: "checkpoints", 6: "fallback", 4: "checkpoints"}
    assert [c.version for c in found.verified] == [12]
    assert found.skipped == (f"in the fallback directory {other.save_dir}: step 12, 6",)
    world.make(16)
    found = look_back(world.save_dir, other.save_dir)
    assert (versions(found), [c.version for c in found.verified]) == ([16, 12, 8, 6, 4], [16])


def test_without_a_fallback_nothing_is_said_of_one(world: World) -> None:
    world.make(8)
    found = look_back(world.save_dir)
    assert (versions(found), found.skipped) == ([8], ())
    assert look_back(world.save_dir.with_name("absent")) == Found()


def test_damage_in_one_is_made_good_by_the_other(world: World, other: World) -> None:
    world.make(4), world.make(8), other.make(6)
    bad = spoil(world.make(12))
    found = look_back(world.save_dir, other.save_dir)
    assert versions(found) == [8, 6, 4]
    assert found.skipped[0].startswith(f"{bad.name}: piece __0_1.distcp is damaged")
    spoil(world.save_dir / "tft_saved_checkpoints-step_8")
    found = look_back(world.save_dir, other.save_dir)
    assert (versions(found), found.where[found.candidates[0]].parent) == ([6, 4], other.save_dir)


def test_only_what_may_be_the_newest_is_read(world: World, other: World, digested: list[Path]) -> None:
    world.make(12), other.make(8)
    look_back(world.save_dir, other.save_dir)
    assert digested and all(path.is_relative_to(world.save_dir) for path in digested)


def test_two_of_one_version_are_both_offered(world: World, other: World) -> None:
    """A commit that hung in save_dir may have succeeded, and the ranks must find a common checkpoint."""
    world.make(12), other.make(12, "second")
    found = look_back(world.save_dir, other.save_dir)
    assert versions(found) == [12, 12]
    assert len(set(found.where.values())) == 2
    assert {found.where[c].parent for c in found.verified} == {world.save_dir}, "one of them is read in full"
    spoil(world.save_dir / "tft_saved_checkpoints-step_12")
    found = look_back(world.save_dir, other.save_dir)
    assert [path.parent for path in found.where.values()] == [other.save_dir]


def test_a_copy_is_one_candidate_and_save_dir_is_preferred(world: World, other: World) -> None:
    shutil.copytree(world.make(12), other.save_dir / "tft_saved_checkpoints-step_12")
    found = look_back(world.save_dir, other.save_dir)
    assert (versions(found), places(found), found.skipped) == ([12], {12: "checkpoints"}, ())


def test_a_directory_that_cannot_be_listed_is_no_start_from_nothing(world: World, other: World) -> None:
    world.save_dir.write_text("a file in its place")
    with pytest.raises(CheckpointError, match=f"cannot list {world.save_dir}"):
        look_back(world.save_dir, other.save_dir)
    other.make(8)
    found = look_back(world.save_dir, other.save_dir)
    assert versions(found) == [8]
    assert f"cannot list {world.save_dir}: Not a directory" in found.skipped
    with pytest.raises(CheckpointError, match="cannot list"):
        look_back(world.save_dir.with_name("absent"), world.save_dir)


@pytest.mark.parametrize("left", [None, "{}"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_checkpoint_without_its_manifest_counts_if_a_launch_has_committed_it(
    world: World, other: World, left: str | None, elsewhere: bool
) -> None:
    """Others use such names too, so only the log of the launches tells. The log and its directory may be copies."""
    lost = world.make(12)
    (lost / MANIFEST).write_text(left) if left else (lost / MANIFEST).unlink()
    foreign, log = f"{lost.name}: {lost}", world.save_dir / "incidents/launches.log"
    log.parent.mkdir()
    for committed in (names.checkpoint_name(Version(8)), ""):
        log.write_text(line_of("incarnation", 1, {}) + line_of("committed", 2, {"path": f"/was/{committed}"}))
        (skipped,) = look_back(world.save_dir, other.save_dir).skipped
        assert skipped.startswith(foreign)
    log.write_text(line_of("incarnation", 1, {}) + line_of("committed", 2, {"path": f"/was/{lost.name}"}))
    if elsewhere:
        other.save_dir.mkdir()
        log.parent.rename(other.save_dir / "incidents")
    skipped, note = look_back(world.save_dir, other.save_dir).skipped
    assert skipped.startswith(foreign) and note == none_whole_note(Version(12))
    world.make(4)
    assert versions(look_back(world.save_dir, other.save_dir)) == [4]


def test_a_newer_one_that_is_skipped_is_told_of_if_the_newest_whole_one_is_elsewhere(
    world: World, other: World
) -> None:
    """Its directory is not read then, because it offers nothing newer."""
    (world.make(8) / "__0_1.distcp").unlink()
    world.make(4), other.make(6)
    found = look_back(world.save_dir, other.save_dir)
    assert versions(found) == [6, 4]
    assert found.skipped[0] == "tft_saved_checkpoints-step_8: piece __0_1.distcp is missing"


@pytest.mark.parametrize("flipped", [False, True])
def test_only_a_newer_ttp_makes_a_checkpoint_too_new(world: World, other: World, *, flipped: bool) -> None:
    """A bit of a damaged manifest may say so, too, and a damaged checkpoint is passed over."""
    world.make(4), other.make(6)
    edit(manifest := world.make(8), format_version=3, ttp_version="9.1")
    if flipped:
        text = (manifest / MANIFEST).read_text()
        (manifest / MANIFEST).write_text(text.replace('"9.1"', '"9.3"'))
    found = look_back(world.save_dir, other.save_dir)
    agreed = agree([RestoreView(Rank(0), found.candidates, found.skipped)])
    if flipped:
        assert agreed == found.candidates[0] and found.candidates[0].version == 6
    else:
        assert isinstance(agreed, str) and "step 8" in agreed and "written by ttp 9.1; this is ttp" in agreed


def test_what_was_agreed_on_is_looked_at_where_it_lies(world: World, other: World) -> None:
    world.make(12), other.make(8)
    found = look_back(world.save_dir, other.save_dir)
    chosen = found.candidates[1]
    check_chosen(found.where[chosen], chosen, already_verified=chosen in found.verified)
    spoil(found.where[chosen])
    with pytest.raises(RestoreError, match=r"not whole here: piece __0_1.distcp is damaged"):
        check_chosen(found.where[chosen], chosen, already_verified=False)


@pytest.mark.parametrize(("rank", "launch", "warns"), [(0, 1, 1), (0, 0, 0), (1, 1, 0)])
def test_a_restart_that_finds_nothing_is_told_once(
    rank: int, launch: int, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    env = RankEnv(rank, 2, rank, "localhost", "run", launch)
    warn_of_new_beginning(Path("/runs/10-31-07"), env, "/elsewhere", 0.0)
    assert len(caplog.records) == warns
    assert all("start 2 of this job finds no checkpoint in /runs/10-31-07" in text for text in caplog.messages)


NOW = [("incarnation", {"run_id": "run", "incarnation": 2}), ("formed", {})]
FULL = ("released", {"exit_code": 70, "text": "rank 0: No space left; versions 1 to 186 are lost"})


@pytest.mark.parametrize(
    ("run_id", "lines", "told"),
    [
        ("run", [FULL, *NOW], "he launch before saved nothing here: rank 0: No space left; versions 1 to 186 are lost"),
        ("run", [FULL], "he launch before saved nothing here: rank 0: No space left; versions 1 to 186 are lost"),
        ("run", NOW, "he launch before saved nothing here, and has not recorded its end"),
        ("run", [("committed", {"version": 7, "path": "/x/step_7"}), *NOW], "he launch before saved version 7 here"),
        ("another", [FULL, *NOW], "save_dir had another name then"),
        ("run", [], "he launch before saved nothing here, and has not recorded its end"),
    ],
)
def test_a_restart_that_finds_no_checkpoint_says_how_the_launch_before_ended(
    run_id: str, lines: list[tuple[str, dict[str, Any]]], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk was full, and the directory had no other name."""
    (tmp_path / "incidents").mkdir()
    began = [("incarnation", {"run_id": run_id, "incarnation": 1}), *lines]
    text = "".join(line_of(kind, 1.0, facts) for kind, facts in began)
    (tmp_path / "incidents" / FILE).write_text(text)
    warn_of_new_beginning(tmp_path, RankEnv(0, 2, 0, "localhost", "run", 1), "", 0.0)
    (warned,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told in warned and warned.count("another name") == told.count("another name")


@pytest.mark.parametrize(
    ("rank", "began_in", "where", "warns"),
    [(0, "", "ck", 1), (0, "10-31-07", "ck", 0), (0, "", "../ck", 0), (1, "", "ck", 0), (0, None, "ck", 0)],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_save_dir_in_a_directory_of_this_launch_is_told_at_the_first_start(
    rank: int,
    began_in: str | None,
    where: str,
    warns: int,
    old: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Hydra changes to a directory with the time in its name. A program may also change to the one that it lies in."""
    (tmp_path / "10-31-07").mkdir()
    (tmp_path / "10-31-07/train.log").touch()
    if old:
        os.utime(tmp_path / "10-31-07/train.log", (0, 0))
        warns = 0
    monkeypatch.chdir(tmp_path / "10-31-07")
    began = "" if began_in is None else str(tmp_path / began_in)
    warn_of_new_beginning(absolute(where), RankEnv(rank, 2, rank, "localhost", "run", 0), began, time.time())
    assert [f"changed its working directory from {tmp_path} to" in text for text in caplog.messages] == [True] * warns


def test_a_working_directory_that_was_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    warn_of_new_beginning(gone / "ckpt", RankEnv(0, 2, 0, "localhost", "run", 0), str(tmp_path), time.time())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_manifest_is_parsed_twice(world: World, other: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a large job looks back at every start, and a manifest of ten thousand pieces takes seconds."""
    world.make(8), world.make(12), other.make(6), spoil(world.make(16))
    parsed: list[str] = []
    read = load_with_digest

    def counted(path: Path) -> tuple[Manifest, str]:
        parsed.append(path.name)
        return read(path)

    monkeypatch.setattr(catalog, "load_with_digest", counted)
    assert versions(look_back(world.save_dir, other.save_dir)) == [12, 8, 6]
    assert len(parsed) == len(set(parsed)) == 4
