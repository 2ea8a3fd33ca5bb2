"""The checkpoints of a directory: which are whole, what is wrong with the others, and which are removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.damage import flip
from tests.disks.plug import Loss, Moment, PluggedDisk, PowerCut
from tests.store.test_manifest import sealed
from ttp.core.restore_choice import NOT_TRIED
from ttp.core.restore_messages import Candidate
from ttp.store import digest, names
from ttp.store.catalog import find_whole, prune, scan, tidy
from ttp.store.disk import Disk
from ttp.store.history import FILE, line_of
from ttp.store.manifest import MANIFEST, Manifest, manifest_digest
from ttp.store.verify import unlisted_files, verify_checkpoint

if TYPE_CHECKING:
    from tests.store.conftest import World


def edit(path: Path, **changes: object) -> None:
    """Change keys of a manifest, and its digest with them."""
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(sealed({**document, **changes})))


def versions(found: list[Candidate]) -> list[int]:
    return [candidate.version for candidate in found]


@pytest.fixture
def four(world: World) -> dict[int, Path]:
    return {version: world.make(version) for version in (2, 4, 6, 8)}


# ---------------------------------------------------------------------------------------------------- verify


def test_a_whole_checkpoint_has_no_problem_and_is_read_once(world: World) -> None:
    path = world.make(12)
    steps: list[int] = []
    assert verify_checkpoint(path, steps.append) == []
    assert sum(steps) == Manifest.load(path).size


def test_every_flipped_byte_is_found(world: World) -> None:
    path = world.make(12)
    for file in (p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST and p.stat().st_size):
        name = file.relative_to(path).as_posix()
        flip(file)
        (problem,) = verify_checkpoint(path)
        assert f"piece {name} is damaged" in problem
        flip(file)
    assert verify_checkpoint(path) == []


def test_every_problem_is_named(world: World) -> None:
    path = world.make(12)
    (path / "__0_1.distcp").unlink()
    (path / "__0_1.distcp").mkdir()
    (path / "job_1.msgpack").unlink()
    (path / ".metadata").write_bytes(b"longer than it was")
    flip(path / "__1_1.distcp")
    problems = sorted(verify_checkpoint(path))
    assert [p.split(":")[0] for p in problems] == [
        "piece .metadata has 18 bytes instead of 11",
        "piece __0_1.distcp is missing",
        "piece __1_1.distcp is damaged",
        "piece job_1.msgpack is missing",
    ]


def test_a_renamed_checkpoint_is_a_problem(world: World) -> None:
    path = world.make(12)
    path = path.rename(path.with_name("tft_saved_checkpoints-step_99"))
    assert verify_checkpoint(path) == ["the directory is named for version 99, but its manifest is of version 12"]
    assert verify_checkpoint(path.rename(path.with_name("my favourite"))) == []


def test_an_unlisted_file_is_only_a_note(world: World) -> None:
    path = world.make(12)
    (path / "notes.txt").write_text("of the user")
    (path / "up").symlink_to(path.parent)
    assert verify_checkpoint(path) == []
    assert unlisted_files(path, Manifest.load(path)) == ["notes.txt", "up"], "links are not followed"


def test_without_a_manifest_the_problem_is_that(tmp_path: Path) -> None:
    (problem,) = verify_checkpoint(tmp_path)
    assert "has no manifest.json" in problem


def test_a_piece_that_cannot_be_read_is_a_problem(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, progress: object, **_: object) -> tuple[int, str]:
        raise OSError(5, "Input/output error")

    path = world.make(12)
    monkeypatch.setattr("ttp.store.verify.digest_file", broken)
    assert "piece .metadata cannot be read: Input/output error" in verify_checkpoint(path)


# ---------------------------------------------------------------------------------------------------- scan


def test_everything_is_listed_newest_first(world: World, four: dict[int, Path]) -> None:
    world.make(8, "second")
    world.write_draft(12)
    for name in ("incidents", ".ttp-probe-x", "tensorboard", "tft_saved_checkpoints-step_5"):
        (world.save_dir / name).mkdir()
    (four[6] / "__0_1.distcp").unlink()
    (four[4] / MANIFEST).write_text("{")
    found = [(e.version, e.kind, e.manifest is not None, e.problem) for e in scan(world.save_dir)]
    assert [entry[:3] for entry in found] == [
        (12, "draft", False),
        (8, "checkpoint", True),
        (8, "superseded", True),
        (6, "checkpoint", True),
        (5, "foreign", False),
        (4, "checkpoint", False),
        (2, "checkpoint", True),
        (None, "foreign", False),
    ]
    problems = [entry[3] for entry in found]
    assert [p is None for p in problems] == [True, True, True, False, False, False, True, False]
    assert problems[3] == "piece __0_1.distcp is missing"
    assert "has no manifest.json" in str(problems[4])
    assert "is damaged" in str(problems[5])


def test_a_save_dir_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert scan(tmp_path / "absent") == []
    assert find_whole(tmp_path / "absent") == ([], [])
    assert prune(tmp_path / "absent", 1) == []


# ---------------------------------------------------------------------------------------------------- find_whole


def test_the_whole_ones_are_found_newest_first(world: World, four: dict[int, Path]) -> None:
    found, skipped = find_whole(world.save_dir)
    assert found == [Candidate(v, manifest_digest(four[v]), four[v].name) for v in sorted(four, reverse=True)]  # type: ignore[arg-type]
    assert skipped == []


def test_walking_back_says_what_was_skipped_and_deletes_nothing(world: World, four: dict[int, Path]) -> None:
    flip(four[8] / "__0_1.distcp")
    (four[6] / "__1_1.distcp").unlink()
    world.write_draft(12)
    (world.save_dir / "tft_saved_checkpoints-step_7").mkdir()
    edit(four[4], format_version=2, ttp_version="9")
    before = sorted(world.save_dir.rglob("*"))
    found, skipped = find_whole(world.save_dir)
    assert versions(found) == [2]
    for text in (
        "step_8: piece __0_1.distcp is damaged",
        "step_6: piece __1_1.distcp is missing",
        "step_7: .*has no manifest.json",
        "step_4: .*upgrade ttp",
        "draft-step_12-first: a draft, never committed",
    ):
        (line,) = [line for line in skipped if text.split(":", maxsplit=1)[0] in line]
        assert text.rsplit(".*", maxsplit=1)[-1].split(": ")[-1] in line
    assert sorted(world.save_dir.rglob("*")) == before


def test_sizes_only_when_that_is_enough(world: World, four: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    flip(four[8] / "__0_1.distcp")
    (four[6] / "__1_1.distcp").unlink()
    monkeypatch.setattr(digest, "digest_file", None)
    monkeypatch.setattr("ttp.store.verify.digest_file", None)
    assert versions(find_whole(world.save_dir, deep=False)[0]) == [8, 4, 2]


def test_no_more_than_so_many_attempts(world: World, four: dict[int, Path]) -> None:
    for version in (8, 6):
        flip(four[version] / "__0_1.distcp")
    assert versions(find_whole(world.save_dir, attempts=3)[0]) == [4]
    found, skipped = find_whole(world.save_dir, attempts=2)
    assert found == []
    assert len(skipped) == 3 and skipped[-1] == NOT_TRIED


def test_enough_is_enough(world: World, four: dict[int, Path]) -> None:
    flip(four[8] / "__0_1.distcp")
    assert versions(find_whole(world.save_dir, enough=1)[0]) == [6]
    assert versions(find_whole(world.save_dir, enough=2)[0]) == [6, 4]


def test_nothing_is_read_twice(world: World, four: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (four[8] / "__1_1.distcp").write_bytes(b"short")
    flip(four[6] / "__0_1.distcp")
    opened: list[str] = []
    real = os.open

    def spy(path: Path, *args: int, **kwargs: int) -> int:
        opened.append(path.relative_to(world.save_dir).as_posix())
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    steps: list[int] = []
    assert versions(find_whole(world.save_dir, progress=steps.append)[0]) == [4, 2]
    assert len(opened) == len(set(opened))
    assert not [name for name in opened if name.startswith(four[8].name) and MANIFEST not in name], "sizes come first"
    of_six = [name for name in opened if name.startswith(four[6].name)]
    assert f"{four[6].name}/__0_1.distcp" in of_six
    assert f"{four[6].name}/__1_1.distcp" not in of_six, "one bad piece is enough"
    sizes = {v: Manifest.load(four[v]).size for v in (4, 2)}
    assert sum(steps) == sum(sizes.values()) + sum(
        p.size for p in Manifest.load(four[6]).pieces if p.file in (".metadata", "__0_1.distcp")
    )


def test_a_superseded_one_counts_only_while_nothing_has_its_name(world: World) -> None:
    old = world.make(12, "first")
    world.make(12, "second")
    assert versions(find_whole(world.save_dir)[0]) == [12]
    shutil.rmtree(old)
    (found,) = find_whole(world.save_dir)[0]
    assert found.name == ".superseded-step_12-0"
    assert world.holds(world.save_dir / found.name, 12, "first")


# ---------------------------------------------------------------------------------------------------- prune


def left(world: World) -> list[int | None]:
    return [entry.version for entry in scan(world.save_dir)]


@pytest.mark.parametrize(("keep", "expected"), [(5, [8, 6, 4, 2]), (4, [8, 6, 4, 2]), (2, [8, 6]), (1, [8]), (0, [8])])
def test_the_newest_are_kept(world: World, four: dict[int, Path], keep: int, expected: list[int]) -> None:
    removed = prune(world.save_dir, keep)
    assert left(world) == expected
    assert removed == [four[v].name for v in (8, 6, 4, 2) if v not in expected]


def test_what_is_not_whole_does_not_count_and_is_not_touched(world: World, four: dict[int, Path]) -> None:
    """The newest is damaged, the next unreadable: neither may displace the last whole one."""
    (four[8] / "__0_1.distcp").unlink()
    (four[6] / MANIFEST).write_text("{")
    edit(four[4], format_version=2)
    assert prune(world.save_dir, 1) == []
    assert left(world) == [8, 6, 4, 2]
    assert versions(find_whole(world.save_dir)[0]) == [2]


def test_what_cannot_be_read_stays_however_old(world: World, four: dict[int, Path]) -> None:
    (four[2] / MANIFEST).unlink()
    (four[4] / MANIFEST).write_text("{")
    (world.save_dir / "tensorboard").mkdir()
    assert prune(world.save_dir, 1) == [four[6].name]
    assert left(world) == [8, 4, 2, None]


@pytest.mark.parametrize(
    ("restored", "expected"),
    [
        ((), [8, 6, 4]),
        ((6,), [8, 6]),  # it was whole when all ranks read it, and is not read again for each removal
        ((6, 8, 4), [8, 6, 4]),  # the last launch had to go back behind it
        ((-1,), [8, 6, 4]),  # a line that ttp has not written
    ],
)
def test_a_damaged_one_is_not_among_those_to_keep(
    world: World, four: dict[int, Path], restored: tuple[int, ...], expected: list[int]
) -> None:
    flip(four[6] / "__0_1.distcp")
    log = world.save_dir / names.INCIDENTS / FILE
    log.parent.mkdir()
    lines = ((line_of("incarnation", 1.0, {}), line_of("restored", 1.0, {"version": v})) for v in restored)
    log.write_text("".join(line for pair in lines for line in pair))
    tidy(world.save_dir, 2, four[8].name, verified=True)
    assert [version for version in left(world) if version] == expected


def test_the_protected_stay(world: World, four: dict[int, Path]) -> None:
    assert prune(world.save_dir, 1, {four[2].name}) == [four[6].name, four[4].name]
    assert left(world) == [8, 2]


def test_old_drafts_go_and_work_in_progress_stays(world: World, four: dict[int, Path]) -> None:
    old, same, newer, safe = (
        world.write_draft(version, name) for version, name in ((7, "a"), (8, "b"), (9, "c"), (5, "d"))
    )
    assert prune(world.save_dir, 9, {safe.name}) == [old.name]
    assert not old.exists()
    assert same.exists() and newer.exists() and safe.exists()


@pytest.mark.parametrize("damaged", [True, False])
def test_drafts_of_a_job_that_went_back_stay(world: World, four: dict[int, Path], damaged: bool) -> None:
    """The ranks could not restore version 8, and are at the save after version 5."""
    if damaged:
        flip(four[8] / "__0_1.distcp")
    base = world.make(5)
    kept, old = world.write_draft(7, "running"), world.write_draft(3, "of a kill")
    assert prune(world.save_dir, 9, {base.name}) == [old.name]
    assert kept.exists()


def test_a_draft_that_cannot_be_deleted_does_not_keep_the_others(world: World, four: dict[int, Path]) -> None:
    stubborn = world.write_draft(7, "a")

    class Refusing(Disk):
        def remove_tree(self, directory: Path) -> None:
            if directory == stubborn:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
            super().remove_tree(directory)

    with pytest.raises(PermissionError):
        prune(world.save_dir, 2, disk=Refusing())
    assert set(world.save_dir.iterdir()) == {stubborn, four[6], four[8]}


def test_drafts_stay_when_there_is_nothing_else(world: World) -> None:
    world.write_draft(7, "a")
    world.write_draft(3, "b")
    assert prune(world.save_dir, 1) == []


def test_the_superseded_age_like_the_others(world: World) -> None:
    world.make(2, "first")
    world.make(2, "second")
    world.make(4)
    world.make(6)
    assert prune(world.save_dir, 3) == []
    world.make(8)
    assert prune(world.save_dir, 3) == ["tft_saved_checkpoints-step_2", ".superseded-step_2-0"]


def test_a_superseded_one_older_than_all_others_goes_though_more_are_to_be_kept(world: World) -> None:
    world.make(2, "first")
    world.make(2, "second")
    (world.save_dir / "tft_saved_checkpoints-step_2").rename(world.save_dir.with_name("elsewhere"))
    world.make(4)
    assert prune(world.save_dir, 9) == [".superseded-step_2-0"]


def test_links_of_the_user_are_not_followed(world: World, four: dict[int, Path]) -> None:
    elsewhere = four[2].rename(world.save_dir.with_name("elsewhere"))
    four[2].symlink_to(elsewhere)
    assert prune(world.save_dir, 1) == [four[6].name, four[4].name]
    assert (elsewhere / MANIFEST).exists()
    assert four[2].is_symlink()


@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name)
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name)
def test_a_half_deleted_checkpoint_never_looks_whole(world: World, moment: Moment, loss: Loss) -> None:
    for at in range(100):
        shutil.rmtree(world.save_dir, ignore_errors=True)
        for version in (2, 4, 6, 8):
            world.make(version)
        disk = PluggedDisk(at, moment)
        try:
            prune(world.save_dir, 2, disk=disk)
        except PowerCut:
            disk.lose(loss)
            found, _ = find_whole(world.save_dir, deep=False)
            assert versions(found)[:2] == [8, 6]
            assert all(world.holds(world.save_dir / c.name, c.version, "first") for c in found), at
            prune(world.save_dir, 2)
        assert left(world) == [8, 6], at
        if len(disk.calls) <= at:
            assert at >= 6
            return
    raise AssertionError("prune does not end")


def test_a_name_taken_by_an_earlier_unfinished_removal_is_no_obstacle(world: World, four: dict[int, Path]) -> None:
    aside = world.save_dir / ".draft-step_2-removed@0"
    aside.mkdir()
    (aside / "rest").touch()
    os.utime(aside)
    assert sorted(prune(world.save_dir, 3)) == sorted([four[2].name, aside.name])
    assert left(world) == [8, 6, 4]
