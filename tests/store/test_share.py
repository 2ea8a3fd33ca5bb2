"""Ranks that share the reading of a checkpoint: together they read all of it, and find all damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damage import flip
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Piece
from ttp.core.restore_choice import agree, is_unread
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.store import share as module
from ttp.store.choice import Found, check_chosen, look_back
from ttp.store.manifest import Manifest
from ttp.store.share import WHOLE, Share, everything, share_of

if TYPE_CHECKING:
    from tests.store.conftest import World

LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def pieces(sizes: list[int]) -> list[Piece]:
    return [Piece(f"{n}", size, "", "shard", Shard("s"), Rank(0)) for n, size in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), count=st.integers(1, 9))
def test_every_piece_is_in_one_share_and_none_is_much_larger_than_another(sizes: list[int], count: int) -> None:
    everything = pieces(sizes)
    shares = [Share(index, count).of(everything) for index in range(count)]
    assert sorted((p for part in shares for p in part), key=everything.index) == everything
    loads = [sum(piece.size for piece in part) for part in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def bad(world: World, version: int, piece: str) -> None:
    """Damage a piece so that only reading finds it."""
    flip(world.save_dir / f"tft_saved_checkpoints-step_{version}" / piece)


def shares_of(index: int, count: int) -> Callable[[Path], Share]:
    return lambda directory: Share(index, count)


Where = tuple[Path, "Path | None", Share]


def agreed(world: World, count: int, fallback: Path | None = None) -> Candidate | str:
    """Return what ``count`` ranks agree on that share the reading as intended."""
    return restored([(world.save_dir, fallback, Share(n, count)) for n in range(count)], rounds=2)


def restored(ranks: list[Where], rounds: int = 3) -> Candidate | str:
    """Return what the ranks agree on, given save_dir, fallback and share of each, as ``ttp.restore`` does."""
    for older, alone in ((False, False), (True, False), (False, True))[:rounds]:
        found = [_found(one, older=older, alone=alone) for one in ranks]
        views = [RestoreView(Rank(n), f.candidates, f.skipped, f.readings) for n, f in enumerate(found)]
        verdict = agree(views)
        if isinstance(verdict, str) or not verdict.name:
            return verdict
        if not is_unread(verdict, views):
            for one in found:
                check_chosen(one.where[verdict], verdict, already_verified=verdict in one.verified)
            return verdict
    raise AssertionError(f"{rounds} rounds were not enough")


def _found(rank: Where, *, older: bool, alone: bool) -> Found:
    save_dir, fallback, share = rank
    return look_back(save_dir, fallback, everything if alone else shares_of(share.index, share.count), older=older)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_damage_in_anybodys_share_is_everybodys(world: World, count: int) -> None:
    """A rank whose share is whole must not offer a checkpoint that others found damaged."""
    files = [piece.file for piece in Manifest.load(world.make(4)).pieces if piece.size]
    for version, file in enumerate(files, 5):
        world.make(version)
        bad(world, version, file)
    verdict = agreed(world, count)
    assert isinstance(verdict, Candidate) and verdict.version == 4


def test_each_byte_is_read_once(world: World, digested: list[Path]) -> None:
    world.make(8), world.make(12)
    assert isinstance(agreed(world, 3), Candidate)
    assert len(digested) == len(set(digested)) == len(Manifest.load(world.make(16)).pieces)


def test_of_two_copies_each_rank_reads_all(world: World) -> None:
    """With shares one rank might find this copy whole, and another one offer the other copy."""
    checkpoint = world.make(12)
    fallback = world.save_dir.with_name("fallback")
    shutil.copytree(checkpoint, fallback / checkpoint.name)
    bad(world, 12, "__0_1.distcp")
    for index in range(3):
        found = look_back(world.save_dir, fallback, shares_of(index, 3))
        assert [path.parent for path in found.where.values()] == [fallback]


@pytest.mark.parametrize("places", [(0, 0), (0,), (1, 1, 1)])
def test_a_part_that_no_rank_was_told_to_read_is_read_all_the_same(world: World, places: tuple[int, ...]) -> None:
    """mpirun in a pod may give all ranks one LOCAL_RANK, and SLURM too large a number of tasks on a host."""
    for file in [piece.file for piece in Manifest.load(world.make(4)).pieces if piece.size]:
        world.make(12)
        bad(world, 12, file)
        verdict = restored([(world.save_dir, None, Share(place, 2)) for place in places])
        assert isinstance(verdict, Candidate) and verdict.version == 4
        shutil.rmtree(world.save_dir / "tft_saved_checkpoints-step_12")


@pytest.mark.parametrize("side", [0, 1])
def test_two_copies_are_not_one_that_is_read_by_shares(world: World, side: int) -> None:
    """Two hosts mount the same kind of file system from two filers under one path."""
    older, checkpoint = world.make(4), world.make(12)
    other = world.save_dir.with_name("other")
    for path in (older, checkpoint):
        shutil.copytree(path, other / path.name)
    for file in [piece.file for piece in Manifest.load(checkpoint).pieces if piece.size]:
        damaged = (world.save_dir, other)[side] / checkpoint.name / file
        good = damaged.read_bytes()
        flip(damaged)
        verdict = restored([(world.save_dir, None, Share(0, 2)), (other, None, Share(1, 2))])
        assert isinstance(verdict, Candidate) and verdict.version == 4
        damaged.write_bytes(good)


def test_a_rank_that_judges_the_copy_in_the_fallback_does_not_vouch_for_that_in_save_dir(world: World) -> None:
    """The other host does not see the fallback directory, and relies on the first one's share of ``save_dir``."""
    world.make(4)
    checkpoint = world.make(12)
    fallback = world.save_dir.with_name("fallback")
    shutil.copytree(checkpoint, fallback / checkpoint.name)
    bad(world, 12, Share(0, 2).of(Manifest.load(checkpoint).pieces)[0].file)
    verdict = restored([(world.save_dir, fallback, Share(0, 2)), (world.save_dir, None, Share(1, 2))])
    assert isinstance(verdict, Candidate) and verdict.version == 4


@pytest.mark.parametrize(
    ("kind", "environ", "share"),
    [
        ("lustre", LOCAL, Share(9, 16)),
        ("nfs4", {}, Share(9, 16)),
        ("fuse.juicefs", {}, Share(9, 16)),
        ("ext4", LOCAL, Share(1, 4)),
        ("fuse.ntfs", LOCAL, Share(1, 4)),
        ("", {}, WHOLE),
        ("ext4", {"LOCAL_RANK": "1"}, WHOLE),
        ("ext4", {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, WHOLE),
        ("ext4", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, WHOLE),
        ("ext4", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "17"}, WHOLE),
        ("ext4", {"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "four"}, WHOLE),
    ],
)
def test_who_shares_with_whom(
    kind: str, environ: dict[str, str], share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_file_system", lambda directory: kind)
    assert share_of(tmp_path / "not" / "there", 9, 16, environ) == share


def test_the_file_system_is_that_of_the_mount(tmp_path: Path) -> None:
    assert module._file_system(Path("/proc/self")) == "proc"
    known = {partition.fstype for partition in psutil.disk_partitions(all=True)}
    assert module._file_system(tmp_path / "not" / "there") in known
