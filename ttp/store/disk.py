"""The disk calls that ``commit`` and ``catalog`` make, in one class, so that tests can simulate a power cut at each."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from ttp.store import durable
from ttp.store.digest import HashingFile, Progress, ignore

UNSUPPORTED = frozenset(
    {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EMLINK, errno.EXDEV}
)
"""Errors with which file systems answer a call that they do not support."""

OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""Errors with which file systems refuse to rename a directory to a name that is taken."""


class Disk:
    """The real disk. Every method raises OSError if the disk refuses.

    Args:
        progress: called with the number of bytes written, or with 1 for a file name, after each step: its calls show
            that a slow disk does not hang.
    """

    progress: Progress = staticmethod(ignore)

    def __init__(self, progress: Progress | None = None) -> None:
        if progress is not None:
            self.progress = progress

    def names(self, directory: Path) -> list[str]:
        """Return the names inside ``directory``, sorted."""
        return sorted(entry.name for entry in directory.iterdir())

    def tree(self, directory: Path) -> tuple[list[Path], list[Path]]:
        """Return all directories at and below ``directory``, the deepest first, and everything else in them."""
        directories, files = [], []
        for folder, _, names in os.walk(directory, topdown=False):
            directories.append(Path(folder))
            files += [Path(folder, name) for name in names]
        return directories, files

    def size(self, file: Path) -> int | None:
        """Return the bytes of a regular file; None if there is none."""
        try:
            return file.stat().st_size if file.is_file() else None
        except FileNotFoundError:
            return None

    def make_directory(self, directory: Path) -> None:
        """Make a directory and its parents. It may exist already."""
        directory.mkdir(parents=True, exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name (hard link)."""
        os.link(source, target)
        self.progress(1)

    def write(self, file: Path, data: bytes) -> str:
        """Write a new file and return its digest. On return its bytes are durable, but not its name."""
        hashing = HashingFile(file, self.progress)
        try:
            hashing.write(data)
        finally:
            _, digest = hashing.sync_and_close()
        return digest

    def rename(self, source: Path, target: Path) -> None:
        """Atomically give ``source`` another name. Fails if a directory is in the way, unless it is empty."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> None:
        """Atomically swap two names. Raises one of ``UNSUPPORTED`` where the file system cannot do that."""
        _exchange(one, other)

    def sync_directory(self, directory: Path) -> None:
        """Make the names inside ``directory`` durable."""
        durable.sync_directory(directory)
        self.progress(1)

    def remove(self, file: Path) -> None:
        """Remove a file. It may be gone already."""
        file.unlink(missing_ok=True)
        self.progress(1)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory and everything in it. It may be gone already."""
        for file in Disk.tree(self, directory)[1]:  # one by one, because large files take time
            Disk.remove(self, file)
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            if directory.exists():  # another process removes it at the same time
                shutil.rmtree(directory, ignore_errors=True)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


_renameat2 = durable.libc_function(
    "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)


def _exchange(one: Path, other: Path) -> None:
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
    if _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem), str(one), None, str(other))
