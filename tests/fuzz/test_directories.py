"""Directories with unexpected contents: commands do not hang, remove only files of ttp, and report what they find."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.files import ttp
from tests.fuzz.places import place
from tests.fuzz.profile import fuzz
from tests.store.conftest import World
from tests.store.storage import as_nobody
from ttp.core.layout import Version
from ttp.errors import CheckpointError
from ttp.store.catalog import SKIPPED_MAX, find_whole, prune, scan, tidy
from ttp.store.choice import look_back
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.names import checkpoint_name
from ttp.store.verify import unlisted_files, verify_checkpoint

pytestmark = pytest.mark.timeout(60)  # what waits for a pipe waits for ever


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        handle = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{handle}/{path.name}")  # the path may be longer than a socket's can be
        os.close(handle)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "proc": lambda path: path.symlink_to("/proc/self/mem"),
    "socket": make_socket,
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


COMMANDS = (("list", "--all"), ("list", "--all", "--json"), ("verify", "--all"), ("verify", "--json"), ("incidents",))


@pytest.mark.parametrize("what", list(SPECIAL))
def test_something_else_in_the_place_of_a_file(world: World, what: str) -> None:
    world.make(2)
    newest = world.make(4)
    for name in ("__0_1.distcp", "rank_2", ".metadata", MANIFEST):
        remove(newest / name)
        SPECIAL[what](newest / name)
        problems = verify_checkpoint(newest)
        assert problems and name in " ".join(problems)
        whole, skipped = find_whole(world.save_dir)
        assert [c.version for c in whole] == [2] and len(skipped) == 1
        assert [c.version for c in look_back(world.save_dir).candidates] == [2]
        assert ttp("inspect", str(newest))[0] == (1 if name == MANIFEST else 0)
        assert prune(world.save_dir, 1) == []
        assert os.path.lexists(newest / name)


def test_something_else_in_the_place_of_a_checkpoint(world: World) -> None:
    whole = world.make(2)
    for version, make in enumerate(SPECIAL.values(), start=9):
        make(world.save_dir / checkpoint_name(Version(version)))
        for name in (".draft-step_{}-x", ".superseded-step_{}-0", "other{}"):
            make(world.save_dir / name.format(version))
    assert [c.version for c in look_back(world.save_dir).candidates] == [2]
    assert prune(world.save_dir, 1) == []
    assert world.holds(whole, 2, "first")
    for command, *flags in COMMANDS:
        assert ttp(command, str(world.save_dir), *flags)[0] in (0, 1)
    for entry in scan(world.save_dir):
        assert ttp("verify", str(entry.path))[0] in (0, 1, 64)


NAMES = [
    b"\xff\xfe", b"a\nb", b"\x1b[2Jx", b"x" * 255, b" ", "é\u202e".encode(), b"-rf", b"tft_saved_checkpoints-step_",
    b"tft_saved_checkpoints-step_12\n", b"tft_saved_checkpoints-step_99999999999999999999",
    b"tft_saved_checkpoints-step_007", b"tft_saved_checkpoints-step_\xd9\xa3", b".draft-step_3-%ff@%00",
    b".superseded-step_3-" + b"9" * 200, b".ttp-probe-x",
]  # fmt: skip


def test_odd_names(world: World) -> None:
    whole = world.make(2)
    for name in map(os.fsdecode, NAMES):
        (world.save_dir / name).mkdir()
        (world.save_dir / name / name).touch()
        (whole / name).touch()
    assert [c.version for c in look_back(world.save_dir).candidates] == [2]
    assert len(unlisted_files(whole, Manifest.load(whole))) == len(NAMES)
    for command, *flags in COMMANDS:
        assert ttp(command, str(world.save_dir), *flags)[0] in (0, 1)
    for name in map(os.fsdecode, NAMES):
        assert ttp("verify", "--", str(world.save_dir / name))[0] in (0, 1)
    prune(world.save_dir, 1)
    assert verify_checkpoint(whole) == []


@pytest.mark.parametrize(
    "path", ["", "a" * 5000, "/dev/null", "/proc/self/mem", "\udcff", "nowhere", "a\0b", "/" + "x/" * 2500]
)
@pytest.mark.parametrize("command", ["list", "verify", "inspect", "incidents"])
def test_odd_arguments(command: str, path: str) -> None:
    code, said, complained = ttp(command, "--", path)
    assert code == 64 or path == "", (said, complained)


def test_a_checkpoint_in_which_directories_go_very_deep(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for version in (2, 4):
        deep = os.open(world.make(version), os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=deep)
            inner = os.open("d", os.O_RDONLY, dir_fd=deep)
            os.close(deep)
            deep = inner
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=deep))
        os.close(deep)
    newest = world.save_dir / checkpoint_name(Version(4))
    assert verify_checkpoint(newest) == []
    assert unlisted_files(newest, Manifest.load(newest)) == ["d/" * 1500 + "f"]
    assert ttp("verify", str(newest))[0] == 0
    world.write_draft(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # shutil.rmtree, when it gives up
        path, _ = world.commit(replace(world.order(6), keep=1))
        tidy(world.save_dir, 1, path.name, verified=False)  # returns, whether the old ones can be removed or not
        caplog.clear()
        gc.collect()
    assert world.holds(path, 6, "first")
    assert look_back(world.save_dir).candidates[0].version == 6
    subprocess.run(["/bin/rm", "-rf", str(world.save_dir)], check=True)  # shutil.rmtree may not reach the bottom


def test_a_hundred_thousand_entries(world: World) -> None:
    whole = world.make(2)
    for number in range(2_000):
        (world.save_dir / checkpoint_name(Version(10 + number))).mkdir()
        (world.save_dir / f".draft-step_{10 + number}-x").mkdir()
        (whole / f"extra{number}").touch()
    found, skipped = find_whole(world.save_dir)
    assert [c.version for c in found] == [2]
    assert len(skipped) == SKIPPED_MAX + 1 and skipped[-1] == f"and {4000 - SKIPPED_MAX} more"
    code, said, _ = ttp("verify", str(whole))
    assert code == 0 and said.count("\n") < 50 and "and 1980 more" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_entries_in_full(world: World) -> None:
    whole = world.make(2)
    for number in range(100_000):
        (world.save_dir / checkpoint_name(Version(10 + number))).mkdir()
    assert [c.version for c in look_back(world.save_dir).candidates] == [2]
    assert prune(world.save_dir, 1) == []
    assert world.holds(whole, 2, "first")


def test_what_may_not_be_read(world: World) -> None:
    world.make(2)
    newest = world.make(4)
    world.save_dir.parent.chmod(0o755)
    for forbidden in (newest / MANIFEST, newest / "__0_1.distcp", newest):
        mode = forbidden.stat().st_mode
        forbidden.chmod(0)
        with as_nobody():
            assert verify_checkpoint(newest)
            assert [c.version for c in look_back(world.save_dir).candidates] == [2]
            assert ttp("verify", str(world.save_dir))[0] == 1
        forbidden.chmod(mode)
    assert verify_checkpoint(newest) == []
    world.save_dir.chmod(0)
    with as_nobody():
        with pytest.raises(CheckpointError, match="cannot list"):
            scan(world.save_dir)
        assert ttp("list", str(world.save_dir))[0] == 1
        assert ttp("verify", str(newest))[0] == 64
    world.save_dir.chmod(0o755)


# ----------------------------------------------------------------------------------------------------------- at random

VERSIONS = (2, 4, 6)
FILES = [
    MANIFEST,
    ".metadata",
    "__0_1.distcp",
    "__1_1.distcp",
    "rank_2/local_1.msgpack",
    "job_1.msgpack",
    "rank_2",
    "new",
]
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-2],  # more than the last line feed
    "flip": lambda data: data[:-1] + bytes([data[-1] ^ 1]) if data else b"x",
    "grow": lambda data: data + b"x",
}
HURT = st.tuples(st.sampled_from(VERSIONS), st.sampled_from(FILES), st.sampled_from(["gone", *CHANGES, *SPECIAL]))


def hurt(path: Path, how: str) -> None:
    if path.parent.is_symlink() or not path.parent.is_dir():
        return
    if how in SPECIAL:
        remove(path)
        SPECIAL[how](path)
    elif path.is_file() and not path.is_symlink():
        data = path.read_bytes()
        path.unlink()  # never into a file that another checkpoint may share
        if how != "gone":
            path.write_bytes(CHANGES[how](data))


def contents(checkpoint: Path) -> dict[str, bytes]:
    found = {}
    for file in (file for file in checkpoint.rglob("*") if file.is_file()):
        with contextlib.suppress(OSError):
            found[file.relative_to(checkpoint).as_posix()] = file.read_bytes()
    return found


def sizes(checkpoint: Path) -> set[tuple[str, int]]:
    """Return names and sizes of all files, also of those that cannot be read."""
    return {(f.relative_to(checkpoint).as_posix(), f.stat().st_size) for f in checkpoint.rglob("*") if f.is_file()}


@cache
def undamaged() -> Path:
    save_dir = place("undamaged") / "checkpoints"
    for version in VERSIONS:
        World(save_dir).make(version)
    return save_dir


@fuzz(st.lists(HURT, min_size=1, max_size=4), examples=60, campaign=20)
def test_damage_anywhere(damage: list[tuple[int, str, str]]) -> None:
    save_dir = place("damaged")
    shutil.rmtree(save_dir)
    shutil.copytree(undamaged(), save_dir)
    made = {version: save_dir / checkpoint_name(Version(version)) for version in VERSIONS}
    good = {version: contents(path) for version, path in made.items()}
    sized = {version: sizes(path) for version, path in made.items()}
    for version, name, how in damage:
        hurt(made[version] / name, how)
    left = {version: contents(path) for version, path in made.items()}
    whole = [version for version in reversed(VERSIONS) if good[version].items() <= left[version].items()]
    assert [c.version for c in find_whole(save_dir)[0]] == whole
    found = look_back(save_dir)
    assert [c.version for c in found.candidates][:1] == whole[:1]
    assert [v for v in VERSIONS if not verify_checkpoint(made[v])] == whole[::-1]
    older = [v for v in VERSIONS if whole and v < whole[0]]
    gone = {v for v in older if sized[v] <= sizes(made[v]) and good[v][MANIFEST] == left[v][MANIFEST]}
    prune(save_dir, 1)  # reads the one that stays; what goes is known by its sizes
    assert {version for version, path in made.items() if path.exists()} == {*VERSIONS} - gone
