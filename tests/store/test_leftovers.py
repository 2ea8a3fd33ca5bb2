"""What failed saves have left in a directory of checkpoints, and when it may be removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ttp.errors import CheckpointError
from ttp.store.catalog import drafts_left, find_whole, remove_unchanged

if TYPE_CHECKING:
    from tests.store.conftest import World


@pytest.fixture
def whole(world: World) -> Path:
    return world.make(8)


def test_what_failed_saves_left_goes_if_nothing_changes_in_it(world: World, whole: Path) -> None:
    """Each is newer than the checkpoint that the job was restored from, so no other rule removes it."""
    left = [world.write_draft(version, incident) for version, incident in ((9, "a"), (12, "b"))]
    other = world.write_draft(12, "still written")
    before = drafts_left(world.save_dir)
    (other / "__0_2.distcp").write_bytes(b"")
    left.append(world.write_draft(13, "begun since"))
    remove_unchanged(world.save_dir, before)
    assert {path for path in world.save_dir.iterdir() if path != whole} == {other, left[2]}


@pytest.mark.parametrize("change", ["grows", "is written again", "goes", "has a claim that changes"])
def test_what_changes_stays(world: World, change: str) -> None:
    draft = world.write_draft(12)
    piece = draft / "rank_2" / "local_1.msgpack"
    claim = draft.with_name(f"{draft.name}@g1-r1")
    shutil.copytree(draft, claim)
    before = drafts_left(world.save_dir)
    if change == "grows":
        piece.write_bytes(piece.read_bytes() + b"more")
        os.utime(piece, (0, 0))
    elif change == "is written again":
        os.utime(piece)
    elif change == "goes":
        piece.unlink()
    else:
        (claim / ".metadata").write_bytes(b"")
    remove_unchanged(world.save_dir, before)
    assert draft.exists() and claim.exists()


def test_a_draft_that_lacks_only_its_name_stays(world: World, whole: Path) -> None:
    """Its committer died before the rename: it may be the last copy of its version."""
    claim = whole.rename(world.save_dir / ".draft-step_8-first@g1-r1")
    draft = world.write_draft(8)
    assert drafts_left(world.save_dir) == {}
    remove_unchanged(world.save_dir, drafts_left(world.save_dir))
    assert claim.exists() and draft.exists()


def test_links_of_the_user_and_files_are_no_drafts(world: World, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    world.save_dir.mkdir()
    (world.save_dir / ".draft-step_9-link").symlink_to(elsewhere)
    (world.save_dir / ".draft-step_9-file").write_bytes(b"")
    assert drafts_left(world.save_dir) == {}


def test_a_commit_that_comes_after_its_draft_was_removed_fails_as_a_whole(world: World, whole: Path) -> None:
    world.write_draft(12)
    remove_unchanged(world.save_dir, drafts_left(world.save_dir))
    with pytest.raises(CheckpointError, match="version 12 cannot be committed"):
        world.commit(world.order(12))
    assert [c.version for c in find_whole(world.save_dir)[0]] == [8]


def test_drafts_that_cannot_be_removed_end_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write_draft(12)
    before = drafts_left(world.save_dir)
    shutil.rmtree(world.save_dir)
    remove_unchanged(world.save_dir, before)
    assert [record.levelname for record in caplog.records if "could not be removed" in record.message] == ["WARNING"]
