"""A commit makes a checkpoint of a draft, keeps others aside, and removes old ones only afterwards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.damage import flip
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Commit, Piece
from ttp.errors import CheckpointError
from ttp.processor.local_state.local_piece import (
    Pages,
    is_provisional,
    lent,
    ranks_kept,
    read_local_image,
    write_local_piece,
)
from ttp.store import verify
from ttp.store.catalog import find_whole, scan, tidy
from ttp.store.digest import digest_file
from ttp.store.disk import Disk
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint

if TYPE_CHECKING:
    from tests.store.conftest import World


def test_a_checkpoint_has_the_listed_files_and_says_what_it_is(world: World) -> None:
    world.write_draft(12)
    path, size = world.commit(world.order(12))
    assert path == world.save_dir / "tft_saved_checkpoints-step_12"
    assert world.holds(path, 12, "first")
    assert size == sum(map(len, world.contents(12, "first").values())) + len(b"all tensors")
    manifest = Manifest.load(path)
    assert (manifest.version, manifest.incarnation, manifest.incident) == (12, 4, "first")
    assert (manifest.cause, manifest.reason) == ("rank 0 died", "all healthy ranks are at it")
    assert (manifest.run_id, manifest.world_size, manifest.framework) == ("job", 4, "torch")
    assert manifest.groups == {"a": (0, 1), "b": (2, 3)}
    assert manifest.missing_pages == (0,)
    assert {p.file for p in manifest.pieces} == {*world.contents(12, "first"), ".metadata"}
    assert all(p in manifest.pieces for p in world.pieces(12, "first"))
    assert [p.name for p in world.save_dir.iterdir()] == [path.name], "no draft is left"


def test_the_order_may_be_repeated_by_anybody(world: World) -> None:
    path = world.make(12)
    before = (path / "manifest.json").read_bytes()
    for rank in (1, 3):
        assert world.commit(world.order(12, rank=rank))[0] == path
    assert (path / "manifest.json").read_bytes() == before
    assert [p.name for p in world.save_dir.iterdir()] == [path.name]


def test_another_incidents_checkpoint_of_the_version_is_kept_aside(world: World) -> None:
    for count, incident in enumerate(["first", "second", "third"]):
        path = world.make(12, incident)
        assert world.holds(path, 12, incident)
        assert len(scan(world.save_dir)) == count + 1
    assert world.holds(world.save_dir / ".superseded-step_12-0", 12, "first")
    assert world.holds(world.save_dir / ".superseded-step_12-1", 12, "second")


@pytest.mark.parametrize("incidents", [("one rank", "the rest"), ("both", "both")])
def test_of_two_sides_of_a_job_that_the_network_has_parted_the_one_with_more_pages_wins(
    world: World, incidents: tuple[str, str]
) -> None:
    """Each side of the job saves the version that it holds. Whoever has no page in the checkpoint loses its streams.

    A controller that takes over during an incident goes on with it, under its name and with another draft.
    """

    def saved(side: str, incident: str, missing: tuple[int, ...]) -> Path:
        draft = world.write_draft(12, side).name
        order = replace(world.order(12, side), incident=incident, missing_pages=tuple(map(Rank, missing)))
        assert order.draft == draft
        return world.commit(order)[0]

    assert world.holds(saved("one rank", incidents[0], (1, 2, 3)), 12, "one rank")
    path = saved("the rest", incidents[1], (0,))
    assert world.holds(path, 12, "the rest")
    assert saved("one rank", incidents[0], (1, 2, 3)) == path
    assert world.holds(path, 12, "the rest")
    assert sorted(e.name for e in world.save_dir.iterdir()) == [".superseded-step_12-0", path.name]


@pytest.mark.parametrize("incidents", [("one half", "the other half"), ("both", "both")])
def test_two_sides_of_a_parted_job_put_their_pages_together(world: World, incidents: tuple[str, str]) -> None:
    """The side that commits last takes over the pages that only the other side's checkpoint has."""

    world.make_side("one half", incidents[0], (0, 1))
    path = world.make_side("the other half", incidents[1], (1, 2))
    manifest = Manifest.load(path)
    assert (manifest.missing_pages, ranks_kept(manifest.pieces)) == ((3,), [0, 1, 2])
    images = [read_local_image(path, manifest.pieces, rank) for rank in range(4)]
    assert images == [b"of rank 0", b"of rank 1", b"of rank 2", None]
    early = [is_provisional(manifest.pieces, rank) for rank in range(4)]
    assert early == [True, True, False, False], "rank 1 as the later side has it"
    assert not verify_checkpoint(path)
    assert world.make_side("one half", incidents[0], (0, 1)) == path and Manifest.load(path) == manifest


def test_pages_are_taken_over_from_the_published_checkpoint_first(world: World) -> None:
    """It has all that those set aside have, and of two states of a rank the one that a committer has chosen."""

    class Listing(Disk):
        def names(self, directory: Path) -> list[str]:
            return sorted(super().names(directory))  # those set aside come first

    world.make_side("one half", "first", (0, 1))
    world.make_side("the other half", "second", (1, 0))
    pieces = Manifest.load(world.make_side("a third", "third", (2,), Listing())).pieces
    assert [is_provisional(pieces, rank) for rank in range(3)] == [False, True, True]


@pytest.mark.parametrize("damaged", [(0,), (0, 1)])
def test_pages_that_cannot_be_read_are_not_taken_over_and_are_missing(world: World, damaged: tuple[int, ...]) -> None:
    order, draft = world.order(12), world.write_draft(12)
    pieces = [
        write_local_piece(draft, f"rank_local_{rank}_1.msgpack", Pages({Rank(rank): b"page"}, (), {}), Rank(rank))
        for rank in (0, 1)
    ]
    path, _ = world.commit(replace(order, pieces=(*order.pieces, *pieces), missing_pages=()), lend=lent)
    for rank in damaged:
        flip(path / pieces[rank].file)
    world.write_draft(12, "second")
    world.commit(replace(world.order(12, "second"), missing_pages=(Rank(0), Rank(1))), lend=lent)
    manifest = Manifest.load(path)
    assert manifest.incident == "second" and not verify_checkpoint(path)
    assert manifest.missing_pages == damaged
    assert ranks_kept(manifest.pieces) == [rank for rank in (0, 1) if rank not in damaged]


@pytest.mark.parametrize("why", ["another launch", "disputed", "damaged", "other bytes"])
def test_more_pages_do_not_make_up_for_what_else_is_wrong(world: World, why: str) -> None:
    """A job that is started again with its id counts anew, and makes a version again that it could not restore."""
    order = replace(world.order(12), missing_pages=(), incarnation=3 if why == "another launch" else 4)
    world.write_draft(12)
    path, _ = world.commit(replace(order, disputed=(Shard("a"),) if why == "disputed" else ()))
    if why == "damaged":
        (path / "__0_1.distcp").unlink()
    if why == "other bytes":
        flip(path / "__0_1.distcp", 10)
    world.write_draft(12, "second")
    world.commit(world.order(12, "second"))
    assert world.holds(path, 12, "second")


def test_whatever_has_the_name_is_kept_aside(world: World) -> None:
    world.save_dir.mkdir()
    (world.save_dir / "tft_saved_checkpoints-step_12").write_text("a file of the user")
    assert world.holds(world.make(12), 12, "first")
    assert (world.save_dir / ".superseded-step_12-0").read_text() == "a file of the user"


def test_a_checkpoint_of_this_incident_that_has_lost_a_piece_is_made_again(world: World) -> None:
    path = world.make(12)
    (path / "__0_1.distcp").unlink()
    world.write_draft(12)
    world.commit(world.order(12))
    assert world.holds(path, 12, "first")


def test_a_newer_incarnation_is_not_overruled(world: World) -> None:
    path = world.make(12, "second", incarnation=5)
    world.write_draft(12)
    with pytest.raises(CheckpointError, match="incarnation 5 of this job; this is incarnation 4"):
        world.commit(world.order(12))
    assert world.holds(path, 12, "second")
    assert world.commit(world.order(12), run_id="another job")[0] == path


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_damaged_one_of_a_newer_incarnation_is_replaced(world: World, how: str) -> None:
    """A job that starts again under the same run id counts from 1, and makes again what it could not restore."""
    path = world.make(12, "second", incarnation=5)
    damaged = next(path.glob("*.distcp"))
    flip(damaged) if how == "changed" else damaged.unlink()
    world.write_draft(12)
    assert world.commit(world.order(12))[0] == path and world.holds(path, 12, "first")


def test_old_checkpoints_go_only_after_the_new_one_is_there(world: World) -> None:
    for version in (2, 4, 6, 8):
        world.make(version)
    path = world.make(10)
    assert [e.version for e in scan(world.save_dir)] == [10, 8, 6, 4, 2], "nobody waits for that"
    assert len(tidy(world.save_dir, 2, path.name, verified=False)) == 3
    assert [e.version for e in scan(world.save_dir)] == [10, 8]


def test_the_log_names_old_checkpoints_and_counts_the_rest(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for version in (2, 4, 6):
        path = world.make(version)
    (world.save_dir / ".draft-step_1-removed@0").mkdir()
    caplog.set_level("INFO", logger="ttp.store")
    assert len(tidy(world.save_dir, 2, path.name, verified=False)) == 2
    assert "removed old checkpoints: tft_saved_checkpoints-step_2" in caplog.text
    assert ".draft" not in caplog.text and caplog.text.rstrip().endswith("had left: 1")


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_good_checkpoint_stays_when_a_new_one_is_damaged(world: World, keep: int) -> None:
    for version in (2, 4, 6):
        world.make(version)
    path = world.make(8)
    flip(next(path.glob("*.distcp")))
    tidy(world.save_dir, keep, path.name, verified=False)
    versions = [e.version for e in scan(world.save_dir)]
    assert versions == [8, 6, 4][: keep + 1], "the damaged one does not count"
    whole, _ = find_whole(world.save_dir)
    assert [c.version for c in whole] == versions[1:]


@pytest.mark.parametrize("refused", [False, True])
def test_only_what_the_storage_has_permits_a_removal(
    world: World, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """The page cache of the host that wrote a checkpoint would show the bytes that were meant to be written."""
    forgotten: list[str] = []

    def forget(fd: int, start: int, size: int, advice: int) -> None:
        assert (start, advice) == (0, os.POSIX_FADV_DONTNEED)
        forgotten.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        if refused:
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(os, "posix_fadvise", forget)
    paths = [world.make(version) for version in (2, 4)]
    assert find_whole(world.save_dir)[0] and not forgotten, "a restore may read the cache"
    assert tidy(world.save_dir, 1, paths[1].name, verified=False) == [paths[0].name]
    assert sorted(forgotten) == sorted(Path(piece.file).name for piece in Manifest.load(paths[1]).pieces)


def test_when_all_are_damaged_none_goes(world: World) -> None:
    for version in (2, 4, 6):
        flip(next(world.make(version).glob("*.distcp")))
    assert tidy(world.save_dir, 1, "tft_saved_checkpoints-step_6", verified=False) == []


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_disk_without_room_for_another_checkpoint_is_told_when_the_old_ones_have_gone(
    lacking: int, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The test that it can be written to writes five bytes."""
    paths = [world.make(version) for version in (2, 4)]
    size = sum(piece.size for piece in Manifest.load(paths[1]).pieces)

    def disk(_: Path) -> Any:
        free = size * (2 - sum(path.exists() for path in paths)) - lacking
        return SimpleNamespace(f_blocks=2 * size, f_bavail=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", disk)
    tidy(world.save_dir, 1, paths[1].name, verified=True)
    assert sum("free some, or none can be saved there" in text for text in caplog.messages) == lacking


def test_what_the_restore_has_just_read_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (2, 4):
        world.make(version)
    monkeypatch.setattr("ttp.store.verify.digest_file", None)
    assert tidy(world.save_dir, 1, "tft_saved_checkpoints-step_4", verified=True) == ["tft_saved_checkpoints-step_2"]


def test_a_checkpoint_is_read_once_for_all_removals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each `ttp save` of a job that is never restarted would read as many checkpoints as are kept."""
    read: list[Path] = []

    def counted(path: Path, *rest: Any, **how: Any) -> tuple[int, str]:
        read.append(path)
        return digest_file(path, *rest, **how)

    monkeypatch.setattr(verify, "digest_file", counted)
    for version in (2, 4, 6, 8, 10):
        tidy(world.save_dir, 2, world.make(version).name, verified=False)
    assert len(scan(world.save_dir)) == 2 and len(set(read)) == len(read)


def with_file(file: str) -> Callable[[Commit], Commit]:
    return lambda order: replace(order, pieces=(*order.pieces, replace(order.pieces[0], file=file)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda order: replace(order, draft="../elsewhere"), "not the name of a draft"),
        (lambda order: replace(order, draft=".draft-step_12-first@g1-r1"), "not the name of a draft"),
        (lambda order: replace(order, draft="tft_saved_checkpoints-step_8"), "not the name of a draft"),
        (lambda order: replace(order, draft=".draft-step_12-other"), "__0_1.distcp is missing; piece __1_1.distcp is"),
        *((with_file(file), "bad list of pieces") for file in ("../../x", "/x", "a//b", "./a", "", "manifest.json")),
        (lambda order: replace(order, pieces=order.pieces * 2), "bad list of pieces"),
        (lambda order: replace(order, pieces=(order.pieces[0],)), r"no piece of shards \['b'\]"),
    ],
)
def test_bad_orders_change_nothing(world: World, change: Callable[[Commit], Commit], text: str) -> None:
    world.make(8)
    world.write_draft(12)
    before = sorted(world.save_dir.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        world.commit(change(world.order(12)))
    assert sorted(world.save_dir.rglob("*")) == before


def test_a_missing_and_a_short_piece_are_named(world: World) -> None:
    draft = world.write_draft(12)
    (draft / "__0_1.distcp").unlink()
    (draft / "__1_1.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__0_1.distcp is missing; piece __1_1.distcp has 5 bytes instead of"):
        world.commit(world.order(12))
    assert find_whole(world.save_dir)[0] == []


def test_an_adapter_that_raises_or_lies_commits_nothing(world: World) -> None:
    def fails(_: Path) -> Sequence[Piece]:
        raise RuntimeError("no metadata")

    def lies(directory: Path) -> Sequence[Piece]:
        return [replace(world.finalise(directory)[0], size=10)]

    def overwrites(directory: Path) -> Sequence[Piece]:
        return [replace(world.finalise(directory)[0], file="__0_1.distcp")]

    world.write_draft(12)
    for bad, error in ((fails, "no metadata"), (lies, "11 bytes instead of 10"), (overwrites, "not a new file")):
        with pytest.raises((RuntimeError, CheckpointError), match=error):
            world.commit(world.order(12), finalise=bad)
        assert find_whole(world.save_dir)[0] == []
    world.commit(world.order(12))


def test_writing_into_the_draft_again_does_not_touch_what_is_committed(world: World) -> None:
    """A saver's order may arrive twice, the second time after the commit."""

    class Slow(Disk):
        def remove_tree(self, directory: Path) -> None:
            pass

    from ttp.store.digest import HashingFile

    draft = world.write_draft(12)
    path, _ = world.commit(world.order(12), Slow())
    file = HashingFile(draft / "__0_1.distcp")
    file.write(b"again")
    file.sync_and_close()
    assert world.holds(path, 12, "first")
