"""Real file systems for tests, mounted by a separate shell that unmounts them however the test ends."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def small_disk(size: str = "1m") -> Iterator[Path]:
    """Mount a tmpfs of this size that any user may write to. It goes when the context ends, or this process.

    The test is skipped if nothing can be mounted here.
    """
    with tempfile.TemporaryDirectory(prefix="ttp-test-") as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "mount")
        place.mkdir()
        script = f'mount -t tmpfs -o size={size},mode=1777 none "$1" && echo up && read _; umount -l "$1"'
        with subprocess.Popen(
            ["sh", "-c", script, "sh", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as keeper:
            assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
            if keeper.stdout.readline() != b"up\n":
                pytest.skip(f"no file system can be mounted here: {keeper.stderr.readline().decode().strip()}")
            try:
                yield place
            finally:
                keeper.stdin.close()
                keeper.wait()


def remount(place: Path, options: str) -> None:
    """Change the options of a mount, such as ``ro``."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take all the space that is left, and return the file that has it."""
    file = place / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            return file


@contextmanager
def as_nobody() -> Iterator[None]:
    """Step down from root, who may do everything, to a user who may not."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@contextmanager
def loop_disk(size: str, really: str) -> Iterator[Path]:
    """Mount an ext4 that claims ``size`` bytes, in a file that can hold only ``really``."""
    with small_disk(really) as below:
        image, place = below / "image", below / "mount"
        place.mkdir()
        subprocess.run(["truncate", "-s", size, str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
