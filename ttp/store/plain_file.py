"""Opens paths that should be regular files, but may be pipes or devices, as anything may lie in a shared directory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 20
"""Bytes that are read at once; they stay in the CPU's cache until they are hashed and written."""
FORGET = 64 << 20
"""Bytes that are dropped from the page cache at once: more than is read ahead, less than a restart would miss."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_plain(path: Path) -> io.FileIO:
    """Open a regular file, or a link to one, for reading. Does not block, unlike opening a pipe.

    Raises:
        OSError: the file does not exist, is not a regular file, or cannot be opened.
    """
    try:
        handle = os.open(path, _FLAGS)
    except ValueError as problem:  # no file can have this name
        raise OSError(errno.EINVAL, str(problem), ascii(str(path))) from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return io.FileIO(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def chunks(path: Path, *, fresh: bool = False) -> Iterator[memoryview]:
    """Yield the bytes of a regular file in chunks. All chunks use one buffer: use each before the next.

    Args:
        path: the file.
        fresh: read bytes from the storage although the page cache has them, where the system can do that.

    Raises:
        OSError: as ``open_plain``, or reading failed.
    """
    buffer, start = memoryview(bytearray(CHUNK)), 0
    with open_plain(path) as file:
        while True:
            if fresh and start % FORGET == 0:
                with contextlib.suppress(OSError, AttributeError):
                    os.posix_fadvise(file.fileno(), start, FORGET, os.POSIX_FADV_DONTNEED)
            if not (count := file.readinto(buffer)):
                return
            start += count
            yield buffer[:count]


def read_plain(path: Path, size_max: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file.
        size_max: most bytes that the file may have; None: no limit.

    Raises:
        OSError: as ``open_plain``; ``EFBIG`` if the file is longer than ``size_max``, which is found before reading.
    """
    with open_plain(path) as raw, io.BufferedReader(raw) as file:  # a single read(2) ends at 2 GiB
        size = os.fstat(file.fileno()).st_size
        if size_max is not None and size > size_max:
            raise OSError(errno.EFBIG, f"it is longer than {size_max} bytes", str(path))
        return file.read(size)
