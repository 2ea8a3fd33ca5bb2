"""Checks that a directory is still on the same mount as at the start of the job.

After ``umount`` the same path is an empty directory of the file system below. A checkpoint written there would count as
saved, and be hidden as soon as the storage is mounted again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import psutil


class Mounts:
    """Remembers the mounts of directories.

    Args:
        *directories: the directories to remember.
    """

    def __init__(self, *directories: Path) -> None:
        self._mounts = {directory: mount_of(directory) for directory in directories}

    def check(self, directory: Path) -> None:
        """Check that ``directory`` is still on its mount. Blocks as long as the storage does.

        Raises:
            OSError: the mount is gone (ENODEV) or does not answer.
        """
        mount = self._mounts.get(directory)
        if mount is None:
            return
        with contextlib.suppress(FileNotFoundError):  # it was removed, or its mount is gone
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # makes an automounter mount it
        if mount not in _mountpoints():
            raise OSError(
                errno.ENODEV,
                "the file system that was mounted there when the job started is no longer mounted",
                str(mount),
            )


def mount_of(directory: Path) -> Path:
    """Return the mount point of the file system that ``directory`` is on, or would be on if it existed."""
    known, real = _mountpoints(), Path(os.path.realpath(directory))  # a link may lead to another mount
    return next((place for place in (real, *real.parents) if place in known), Path(real.anchor))


def _mountpoints() -> set[Path]:
    """Return all mount points from the kernel's list: asking directories would miss bind mounts and might block.

    Where /proc is not mounted there is no list: then every directory counts as one of the root file system.
    """
    with contextlib.suppress(FileNotFoundError):
        return {Path("/"), *(Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True))}
    return {Path("/")}
