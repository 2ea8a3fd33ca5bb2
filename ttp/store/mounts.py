"""Is a directory still on the mount that it was on at the start?

After ``umount`` the same path names an empty directory of the disk below. A checkpoint written there would be a success
that nobody ever finds: as soon as the storage is mounted again it is hidden.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


class Mounts:
    """Remembers where directories are mounted.

    Args:
        directories: absolute paths; they need not exist.
    """

    def __init__(self, *directories: Path) -> None:
        self._mounts = {directory: _mount_of(directory) for directory in directories}

    def check(self, directory: Path) -> None:
        """Make sure that ``directory`` is where it was. May hang as the storage does.

        Raises:
            OSError: its mount is gone (ENODEV), or does not answer.
        """
        mount = self._mounts.get(directory)
        if mount is None:
            return
        with contextlib.suppress(FileNotFoundError):  # somebody removed it, or what it was on
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # an automounter mounts it now
        if not mount.is_mount():
            raise OSError(errno.ENODEV, "not mounted any more, as it was when the job started", str(mount))


def _mount_of(directory: Path) -> Path:
    real = Path(os.path.realpath(directory))  # a link is no mount, what it points to may be one
    return next((place for place in (real, *real.parents) if place.is_mount()), Path(real.anchor))
