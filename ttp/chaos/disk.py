"""The disk of a job under test: a file system for this job only, so that it can be filled and made read-only."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

from ttp.chaos.world import run

BALLAST = ".ballast"
QUOTA_BYTES = 1 << 20
"""Largest file in bytes under ``disk-quota``: enough for notes and logs, too small for a piece of a wide model."""
RETRY_S = 2.0


class Disk:
    """A file system in memory, mounted at ``path``. Create it before the hosts, which inherit the mount.

    Args:
        path: the mount point, which is created.
        size: size in bytes.

    Raises:
        OSError: the file system cannot be mounted.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(path))

    def fill(self) -> None:
        """Fill the file system to the last byte."""
        ballast = os.open(self.path / BALLAST, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            chunk = 1 << 24
            while chunk >= 1:
                try:
                    os.posix_fallocate(ballast, os.fstat(ballast).st_size, chunk)
                except OSError:
                    chunk //= 2
        finally:
            os.close(ballast)

    def protect(self) -> None:
        """Make the file system read-only, as soon as no process has a file open for writing.

        Raises:
            OSError: processes had files open for writing for ``RETRY_S`` seconds.
        """
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                run("mount", "-o", "remount,ro", str(self.path))
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.002)

    def heal(self) -> None:
        """Undo ``fill`` and ``protect``."""
        run("mount", "-o", "remount,rw", str(self.path))
        (self.path / BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the file system. Its content is lost."""
        with contextlib.suppress(OSError):
            run("umount", "--lazy", str(self.path))


def limit(pid: int) -> None:
    """Limit the files that a process can write to ``QUOTA_BYTES``, from now on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (QUOTA_BYTES, hard))
