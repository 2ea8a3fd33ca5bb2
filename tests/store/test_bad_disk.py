"""The disk that fails on command is otherwise a normal disk, and its journal tells what a power cut leaves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.disks.crash import Disk, Loss, Tree, build, fingerprint
from ttp.store.disk import Disk as RealDisk
from ttp.store.durable import sync_directory, write_durably


def contents(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def work(place: Path) -> None:
    """Do some of every kind of operation."""
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "one").write_bytes(b"1" * 3_000_000)
    os.link(place / "a" / "one", place / "two")
    (place / "two").rename(place / "a" / "b" / "three")
    RealDisk().exchange(place / "a" / "b", place / "a" / "one")
    (place / "a" / "b").write_bytes(b"a file now")
    with (place / "a" / "b").open("ab") as file:
        file.write(b", longer")
    os.truncate(place / "a" / "b", 12)
    (place / "gone").touch()
    (place / "gone").unlink()
    (place / "dir").mkdir()
    (place / "dir").rmdir()
    write_durably(place / "a" / "b", b"replaced")


def test_it_is_a_disk_like_any_other(bad_disk: BadDisk, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    work(plain)
    work(bad_disk.mountpoint)
    assert contents(bad_disk.mountpoint) == contents(bad_disk.directory) == contents(plain)
    assert (bad_disk.mountpoint / "a" / "one" / "three").stat().st_nlink == 1
    build(Disk(bad_disk.journal()).after(Loss.NOTHING), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(plain)
    shutil.rmtree(bad_disk.mountpoint / "a")
    assert list(bad_disk.directory.iterdir()) == []


def test_a_rule_strikes_where_and_as_often_as_it_says(bad_disk: BadDisk) -> None:
    bad_disk.rules(
        Rule(("WRITE",), r"\.bin$", skip=1, times=2, error=errno.EDQUOT), Rule(("UNLINK",), error=errno.EPERM)
    )
    found = []
    for name in ("a.txt", "a.bin", "b.bin", "c.bin", "d.bin"):
        try:
            (bad_disk.mountpoint / name).write_bytes(b"x")
        except OSError as problem:
            found.append((name, problem.errno))
    assert found == [("b.bin", errno.EDQUOT), ("c.bin", errno.EDQUOT)]
    with pytest.raises(PermissionError):
        (bad_disk.mountpoint / "a.txt").unlink()
    assert bad_disk.hits() == [2, 1]
    bad_disk.rules()
    (bad_disk.mountpoint / "a.txt").unlink()


def test_it_is_gone_when_it_is_closed(mounts: None, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mount"
    with BadDisk(mountpoint, tmp_path / "below") as disk:
        (mountpoint / "file").touch()
        assert mountpoint.is_mount()
        disk.die()
        with pytest.raises(OSError, match="not connected"):
            list(mountpoint.iterdir())
    assert not mountpoint.is_mount() and list(mountpoint.iterdir()) == []
    with pytest.raises(OSError, match="No such"):
        BadDisk(Path("/proc/none"), tmp_path / "below")


# -------------------------------------------------------------------------------------------------- what a cut leaves


def plain(place: Path) -> None:
    (place / "file").write_bytes(b"12345678")


def synced(place: Path) -> None:
    with (place / "file").open("wb", buffering=0) as file:
        file.write(b"1234")
        os.fsync(file.fileno())
        file.write(b"5678")


def named(place: Path) -> None:
    synced(place)
    sync_directory(place)


def renamed(place: Path) -> None:
    named(place)
    (place / "file").rename(place / "other")


@pytest.mark.parametrize(
    ("do", "loss", "left"),
    [
        (plain, Loss.NOTHING, {"file": b"12345678"}),
        (plain, Loss.ALL, {}),
        (plain, Loss.EMPTY, {"file": b""}),
        (plain, Loss.SHORT, {"file": b"1234"}),
        (plain, Loss.GARBAGE, {"file": b"\xa5" * 8}),
        (synced, Loss.ALL, {}),
        (synced, Loss.EMPTY, {"file": b"1234"}),
        (synced, Loss.SHORT, {"file": b"123456"}),
        (synced, Loss.GARBAGE, {"file": b"1234\xa5\xa5\xa5\xa5"}),
        (named, Loss.ALL, {"file": b"1234"}),
        (renamed, Loss.ALL, {"file": b"1234"}),
        (renamed, Loss.RENAMES, {"file": b"12345678"}),
        (renamed, Loss.ALL_BUT_RENAMES, {"other": b"1234"}),
    ],
    ids=lambda value: value.name if isinstance(value, Loss) else getattr(value, "__name__", ""),
)
def test_what_was_not_synced_is_lost(bad_disk: BadDisk, do: Callable[[Path], None], loss: Loss, left: Tree) -> None:
    do(bad_disk.mountpoint)
    tree = Disk(bad_disk.journal()).after(loss)
    assert tree == left
    assert (fingerprint(tree) == fingerprint({**left})) and fingerprint(tree) != fingerprint({**left, "more": b""})


def test_a_directory_that_is_not_synced_is_lost_with_all_in_it(bad_disk: BadDisk) -> None:
    (bad_disk.mountpoint / "new").mkdir()
    write_durably(bad_disk.mountpoint / "new" / "file", b"x")
    assert Disk(bad_disk.journal()).after(Loss.ALL) == {}
    sync_directory(bad_disk.mountpoint)
    assert Disk(bad_disk.journal()).after(Loss.ALL) == {"new": {"file": b"x"}}


def test_by_lot_anything_may_be_left_and_the_same_lot_leaves_the_same(bad_disk: BadDisk) -> None:
    for name in "abcdef":
        (bad_disk.mountpoint / name).write_bytes(b"12345678")
    disk = Disk(bad_disk.journal())
    drawn = [disk.after(Loss.SOME, seed) for seed in range(20)]
    assert drawn == [disk.after(Loss.SOME, seed) for seed in range(20)]
    assert len({fingerprint(tree) for tree in drawn}) > 10
    assert {data for tree in drawn for data in tree.values()} == {b"12345678", b"", b"1234", b"\xa5" * 8}
