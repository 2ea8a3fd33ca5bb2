"""A file without a name, to hand a text of any size to another process, or to take one from it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import IO


def memory_file() -> IO[bytes]:
    """Return a new file in memory, to write and read; or on a disk, where this Python or a sandbox lacks the call.

    A Python that was built for a glibc older than 2.27, as uv's builds, has no ``memfd_create``.

    Raises:
        OSError: there is no place for the file on a disk either.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("ttp"), "w+b")
    return tempfile.TemporaryFile()
