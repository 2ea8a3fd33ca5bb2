"""Real storage that fails: the error names its errno, and the previous checkpoint stays whole."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.store.storage import as_nobody, fill, loop_disk, remount, small_disk
from ttp.cli.main import main
from ttp.errors import CheckpointError
from ttp.store.catalog import scan
from ttp.store.choice import look_back
from ttp.store.disk import Disk
from ttp.store.durable import write_durably
from ttp.store.mounts import Mounts

if TYPE_CHECKING:
    from tests.store.conftest import World

pytestmark = pytest.mark.usefixtures("mounts")


@pytest.fixture
def disk(mounts: None) -> Iterator[Path]:
    with small_disk() as place:
        yield place


def old_is_whole(world: World, version: int = 8) -> None:
    """Check that a restart finds this version, and nothing that looks newer."""
    found = look_back(world.save_dir)
    assert found.candidates[0].version == version
    assert world.holds(found.where[found.candidates[0]], version, "first")
    assert [e.version for e in scan(world.save_dir) if e.kind == "checkpoint"] == [version]
    assert main(["verify", str(world.save_dir)]) == 0


def make(world: World, version: int = 8) -> World:
    world.save_dir.mkdir(exist_ok=True)
    world.save(version)
    world.finish(version)
    return world


# ------------------------------------------------------------------------------------------ what the system refuses


@pytest.fixture
def on_disk(world: World, disk: Path) -> World:
    """Return a world on a small disk of its own, with version 8; all files belong to the user nobody."""
    made = type(world)(disk / "checkpoints")
    with as_nobody():
        return make(made)


def full(world: World) -> Callable[[], None]:
    with as_nobody():
        return fill(world.save_dir.parent).unlink


def read_only(world: World) -> Callable[[], None]:
    remount(world.save_dir.parent, "ro")
    return lambda: remount(world.save_dir.parent, "rw")


def forbidden(world: World) -> Callable[[], None]:
    world.save_dir.chmod(0o555)
    return lambda: world.save_dir.chmod(0o755)


REFUSALS = {"full": (full, errno.ENOSPC), "read-only": (read_only, errno.EROFS), "forbidden": (forbidden, errno.EACCES)}


@pytest.mark.parametrize(("refuse", "code"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_save_that_is_refused(on_disk: World, refuse: Callable[[World], Callable[[], None]], code: int) -> None:
    repair = refuse(on_disk)
    with as_nobody(), pytest.raises(OSError, match=str(on_disk.save_dir)) as caught:
        on_disk.save(12)
    assert caught.value.errno == code
    old_is_whole(on_disk)
    repair()
    with as_nobody():
        make(on_disk, 12)
    assert on_disk.holds(on_disk.save_dir / "tft_saved_checkpoints-step_12", 12, "first")


@pytest.mark.parametrize(("refuse", "code"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_commit_that_is_refused(on_disk: World, refuse: Callable[[World], Callable[[], None]], code: int) -> None:
    with as_nobody():
        on_disk.save(12)
    repair = refuse(on_disk)
    with as_nobody(), pytest.raises(CheckpointError, match=rf"version 12 cannot be committed: \[Errno {code}\]"):
        on_disk.finish(12)
    old_is_whole(on_disk)
    repair()
    with as_nobody():
        path = on_disk.finish(12)  # the same order, or that of another rank, once the cause is gone
    assert on_disk.holds(path, 12, "first")
    assert [e.version for e in scan(on_disk.save_dir)] == [12, 8], "no draft is left"


def test_permission_for_a_new_name_only(on_disk: World) -> None:
    """The directory is writable, but the draft of another user is not."""
    with as_nobody():
        draft = on_disk.save(12)
    shutil.chown(draft, 0, 0)
    draft.chmod(0o700)
    with as_nobody(), pytest.raises(CheckpointError, match="cannot be committed"):
        on_disk.finish(12)
    old_is_whole(on_disk)


def test_a_disk_that_took_the_bytes_and_cannot_keep_them(world: World) -> None:
    """The file system is in a file that cannot grow: write(2) succeeds, and the disk fails later."""
    if not (shutil.which("mkfs.ext4") and Path("/dev/loop-control").exists()):
        pytest.skip("needs mkfs.ext4 and a loop device")
    with loop_disk(size="16m", really="5m") as place:
        on_disk = make(type(world)(place / "checkpoints"))
        with pytest.raises(OSError, match="distcp") as caught:
            write_durably(on_disk.save_dir / "piece.distcp", bytes(10 << 20))
        assert caught.value.errno in (errno.EIO, errno.ENOSPC)
        old_is_whole(on_disk)


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EREMOTEIO])
def test_a_server_that_refuses_what_the_kernel_has_taken(world: World, tmp_path: Path, code: int) -> None:
    """The kernel reports such an error once; a save that missed it would find that fsync succeeds."""
    with BadDisk(tmp_path / "mount", tmp_path / "directory", writeback=True) as disk:
        on_disk = make(type(world)(disk.mountpoint / "checkpoints"))
        disk.rules(Rule(("WRITE",), name=r"distcp$", error=code))
        with pytest.raises(OSError, match="distcp") as caught:
            on_disk.save(12)
        assert caught.value.errno == code
        disk.rules()
        old_is_whole(on_disk)


# -------------------------------------------------------------------------------------------------- a mount that goes


def test_a_mount_that_is_taken_away_while_a_piece_is_written(world: World, disk: Path, tmp_path: Path) -> None:
    below, place = disk / "below", tmp_path / "place"
    below.mkdir()
    place.mkdir()
    subprocess.run(["mount", "--bind", str(below), str(place)], check=True)
    taken_away = threading.Event()

    def take_away(_: int = 0) -> None:
        if not taken_away.is_set():
            taken_away.set()
            subprocess.run(["umount", "-l", str(place)], check=True)

    try:
        on_disk = make(type(world)(place / "checkpoints"))
        mounts = Mounts(on_disk.save_dir)
        mounts.check(on_disk.save_dir)
        with pytest.raises(FileNotFoundError) as caught:
            on_disk.save(12, progress=take_away)
        assert caught.value.errno == errno.ENOENT
        with pytest.raises(OSError, match="no longer mounted") as caught_at_check:
            mounts.check(on_disk.save_dir)
        assert (caught_at_check.value.errno, caught_at_check.value.filename) == (errno.ENODEV, str(place))
    finally:
        take_away()
    assert list(place.iterdir()) == [], "nothing was written below the mount point"
    old_is_whole(type(world)(below / "checkpoints"))


def test_what_is_no_mount_of_its_own_is_not_missed(tmp_path: Path) -> None:
    """A save_dir that was removed is made again, wherever it was; links are followed."""
    (tmp_path / "link").symlink_to("/proc")
    mounts = Mounts(tmp_path / "ck", tmp_path / "link")
    mounts.check(tmp_path / "ck")
    mounts.check(tmp_path / "link")
    mounts.check(tmp_path / "somewhere else")


def test_without_proc_nothing_is_taken_for_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_partitions", Mock(side_effect=FileNotFoundError(2, "none", "/proc/self/mounts")))
    Mounts(tmp_path / "ck").check(tmp_path / "ck")


def test_the_server_of_a_mount_dies(world: World, bad_disk: BadDisk) -> None:
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    mounts = Mounts(on_disk.save_dir)
    died = threading.Event()

    def die(_: int) -> None:
        if not died.is_set():
            died.set()
            bad_disk.die()

    with pytest.raises(OSError) as caught:
        on_disk.save(12, progress=die)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert caught.value.filename.endswith("__0_1.distcp")
    with pytest.raises(OSError) as caught:
        mounts.check(on_disk.save_dir)
    assert caught.value.errno == errno.ENOTCONN
    old_is_whole(type(world)(bad_disk.directory / "checkpoints"))


# -------------------------------------------------------------------------------------------- each request, each errno

CHANGES = ("CREATE", "MKDIR", "WRITE", "FSYNC", "FSYNCDIR", "LINK", "RENAME", "RENAME2", "UNLINK", "RMDIR")


def test_the_disk_refuses_any_one_request(world: World, bad_disk: BadDisk) -> None:
    """The result is an error that names it, or a whole checkpoint. Afterwards another rank can commit."""
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    refused = 0
    for skip in range(200):
        bad_disk.rules(Rule(CHANGES, skip=skip, times=1, error=errno.EIO))
        try:
            on_disk.save(12)
            on_disk.finish(12)
        except (OSError, CheckpointError) as problem:
            assert f"[Errno {errno.EIO}]" in str(problem), (skip, problem)
            refused += 1
            on_disk.check_reader((8, "first"), skip)
        hit = bad_disk.hits() == [1]
        bad_disk.rules()
        on_disk.save(12)
        assert on_disk.holds(on_disk.finish(12, rank=3), 12, "first"), skip
        shutil.rmtree(on_disk.save_dir / "tft_saved_checkpoints-step_12")
        if not hit:
            break
    assert refused > 30 and not hit


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (Rule(("WRITE",), r"distcp$", skip=1, error=errno.EDQUOT), errno.EDQUOT),
        (Rule(("FSYNC",), r"distcp$", error=errno.EDQUOT), errno.EDQUOT),  # as NFS tells of a quota
        (Rule(("FSYNC",), r"msgpack", error=errno.EIO), errno.EIO),
        (Rule(("FSYNCDIR",), r"^.draft", error=errno.EIO), errno.EIO),
    ],
    ids=lambda value: f"{value.ops[0]} {value.name}" if isinstance(value, Rule) else errno.errorcode[value],
)
def test_a_save_that_keeps_failing(world: World, bad_disk: BadDisk, rule: Rule, code: int) -> None:
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    bad_disk.rules(rule)
    with pytest.raises(OSError, match=str(on_disk.save_dir)) as caught:
        on_disk.save(12)
    assert caught.value.errno == code
    bad_disk.rules()
    old_is_whole(on_disk)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EBUSY, errno.ENOSPC])
def test_a_rename_that_keeps_failing(world: World, bad_disk: BadDisk, code: int) -> None:
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    on_disk.save(12)
    bad_disk.rules(Rule(("RENAME", "RENAME2"), r"^tft_saved", error=code))
    with pytest.raises(CheckpointError, match=rf"cannot be committed: \[Errno {code}\].*-> '.*tft_saved_checkpoints-"):
        on_disk.finish(12)
    bad_disk.rules()
    old_is_whole(on_disk)


# ------------------------------------------------------------------------------------------------------ slow, and never


def test_a_slow_disk_is_seen_to_go_on(world: World, bad_disk: BadDisk) -> None:
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    bad_disk.rules(Rule(("WRITE", "FSYNC"), delay_s=0.02))
    steps: list[int] = []
    on_disk.save(12, progress=steps.append)
    pieces = [len(data) for file, data in on_disk.contents(12, "first").items() if file.startswith("__")]
    assert steps == [size for piece in pieces for size in (piece, piece)], "when written, and when on the disk"
    calls: list[int] = []
    path = on_disk.finish(12, disk=Disk(calls.append))
    assert len(calls) > 10 and on_disk.holds(path, 12, "first")


def test_a_hanging_disk_shows_no_progress_and_goes_on_when_it_can(world: World, bad_disk: BadDisk) -> None:
    on_disk = make(type(world)(bad_disk.mountpoint / "checkpoints"))
    bad_disk.rules(Rule(("WRITE",), "__0_", hang="mount"))
    steps: list[int] = []
    saving = threading.Thread(target=on_disk.save, args=(12,), kwargs={"progress": steps.append}, daemon=True)
    saving.start()
    bad_disk.wait_hit()
    old_is_whole(type(world)(bad_disk.directory / "checkpoints"))
    assert len(steps) <= 2 and saving.is_alive()
    bad_disk.thaw()
    saving.join(60)
    assert len(steps) == 4
    assert on_disk.holds(on_disk.finish(12), 12, "first")


STUCK = """
import sys
from pathlib import Path
from ttp.processor.serial_worker import SerialWorker
from ttp.store.durable import write_durably

worker = SerialWorker("saver")
worker.submit(lambda: write_durably(Path(sys.argv[1]), b"x" * 100))
sys.stdin.readline()
assert worker.busy
worker.leave_behind()
done = []
worker.submit(lambda: done.append(1))
while not done:
    pass
worker.close()
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_nothing_waits_for_a_write_that_hangs(bad_disk: BadDisk, how: str) -> None:
    """The hanging thread is abandoned: another one works, and the process ends normally."""
    bad_disk.rules(Rule(("CREATE",), "piece", hang="mount"))
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(bad_disk.mountpoint / "piece")], stdin=subprocess.PIPE, text=True
    ) as child:
        bad_disk.wait_hit()
        if how == "is killed":
            child.kill()
        else:
            assert child.stdin is not None
            child.stdin.write("go on\n")
            child.stdin.flush()
        assert child.wait(60) == (0 if how == "ends" else -9)
