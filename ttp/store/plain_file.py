"""Opens paths that should be regular files: in a shared directory they may be pipes or devices."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_plain(path: Path) -> io.FileIO:
    """Open a regular file, or a link to one, for reading. Does not block, as opening a pipe would.

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


def read_plain(path: Path, size_max: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file.
        size_max: bytes of the longest file that is read; None reads any.

    Raises:
        OSError: as ``open_plain``; ``EFBIG`` if the file is longer than ``size_max``, and nothing of it was read.
    """
    with open_plain(path) as raw, io.BufferedReader(raw) as file:  # a single read(2) ends at 2 GiB
        size = os.fstat(file.fileno()).st_size
        if size_max is not None and size > size_max:
            raise OSError(errno.EFBIG, f"it is longer than {size_max} bytes", str(path))
        return file.read(size)
