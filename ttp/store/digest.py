"""Digests of files, computed while a file is written and again when it is read.

xxh3_128 runs at memory speed, so the disk limits the speed. It detects accidental changes, not forgeries.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ttp.store.durable import libc_function, naming
from ttp.store.plain_file import CHUNK, chunks

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHM = "xxh3_128"


_DIRECT = 1 << 16
"""Writes of at least this many bytes are not copied into the buffer."""

_WRITEBACK = 8 << 20
"""Bytes after which the kernel is told to write to the disk, which else idles until fsync. Writes 1.6 times faster."""

Progress = Callable[[int], None]
"""Called with the number of bytes newly read, or newly written."""
Watch = Callable[[str, "int | None"], Progress]
"""Begins a phase, given its name and its bytes (None if unknown), and returns the callback for its progress."""


class HashingFile(io.BufferedIOBase):
    """A new file that is written from start to end and digested on the way. For one thread.

    Large buffers go to the kernel as they are, without a copy. An existing file is unlinked first and never written
    into, because a committed checkpoint may hold the same bytes under another name.

    Args:
        path: the file; its directory exists.
        progress: called when the kernel has taken bytes, and again when the disk has written them. While calls come
            the storage may be slow, but does not hang.

    Raises:
        OSError: the file cannot be made; so do all methods that write.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress or ignore
        self._fd = -1  # close() runs even if the open below fails
        self.path.unlink(missing_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = xxhash.xxh3_128()
        self._buffer = bytearray()
        self._written = 0  # bytes that the kernel has
        self._started = 0  # bytes that the kernel was told to write back
        self._problem: OSError | None = None

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._written + len(self._buffer)

    def tell(self) -> int:
        """Return the number of bytes written so far; the file cannot seek."""
        return self.size

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor. Bytes that are still in the buffer are not in the file: call ``flush`` first."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def write(self, data: Buffer, /) -> int:
        """Append all of ``data``, any contiguous buffer, and return its size in bytes."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        view = memoryview(data)
        size = view.nbytes
        if size >= _DIRECT:
            self._drain()
            self._write_through(view.cast("B"))
        elif size:
            self._buffer += view.cast("B")
            if len(self._buffer) >= CHUNK:
                self._drain()
        return size

    def flush(self) -> None:
        """Give all buffered bytes to the kernel. They are not yet on the disk."""
        if not self.closed:
            self._drain()

    def digest(self) -> str:
        """Return the digest of all bytes so far, as ``xxh3_128:<hex>``."""
        self.flush()
        return _text(self._hash)

    def sync_and_close(self) -> tuple[int, str]:
        """Return size and digest once the bytes are on the disk. The name is durable after ``sync_directory``.

        Raises:
            OSError: the disk refused now or at an earlier write, or it has kept less than it has accepted; the file is
                closed and must not be used.
        """
        try:
            self.flush()
            if self._problem is not None:  # an earlier error that a caller swallowed
                raise self._problem
            with naming(self.path):
                self._sync()
        except OSError as problem:
            self._problem = problem
            raise
        finally:
            self.close()
        if (kept := self.path.stat().st_size) != self._written:  # else only the commit would find it
            text = f"the storage has kept {kept} of the {self._written} bytes that it has accepted"
            raise OSError(errno.EIO, text, str(self.path))
        return self.size, _text(self._hash)

    def close(self) -> None:
        """Close without waiting for the disk."""
        if self.closed or self._fd < 0:
            return
        try:
            if self._problem is None:
                self._drain()
        finally:
            super().close()
            os.close(self._fd)

    def _drain(self) -> None:
        if self._buffer:
            pending, self._buffer = self._buffer, bytearray()
            self._write_through(memoryview(pending))

    def _write_through(self, view: memoryview) -> None:
        if self._problem is not None:
            raise self._problem
        try:
            with naming(self.path):
                self._write_chunks(view)
        except OSError as problem:
            self._problem = problem
            raise

    def _write_chunks(self, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self._hash.update(chunk)
            while chunk:
                count = os.write(self._fd, chunk)
                self._written += count
                self._progress(count)
                chunk = chunk[count:]
            if self._written - self._started >= _WRITEBACK:
                _start_writeback(self._fd, self._started, self._written - self._started)
                self._started = self._written

    def _sync(self) -> None:
        """Sync range by range before fsync: fsync alone may take minutes without progress, like a disk that hangs."""
        for start in range(0, self._written, _WRITEBACK):
            _finish_writeback(self.fileno(), start, _WRITEBACK)
            self._progress(min(_WRITEBACK, self._written - start))
        os.fsync(self.fileno())


def digest_file(path: Path, progress: Progress | None = None, *, fresh: bool = False) -> tuple[int, str]:
    """Return the size and the digest of a file, from its bytes; ``fresh``: see ``chunks``.

    Raises:
        OSError: the file cannot be read.
    """
    hashed, size = xxhash.xxh3_128(), 0
    for chunk in chunks(path, fresh=fresh):
        hashed.update(chunk)
        size += len(chunk)
        if progress is not None:
            progress(len(chunk))
    return size, _text(hashed)


def digest_bytes(data: Buffer) -> str:
    """Return the digest of bytes in memory, as ``xxh3_128:<hex>``."""
    return _text(xxhash.xxh3_128(data))


def _text(hashed: xxhash.xxh3_128) -> str:
    return f"{ALGORITHM}:{hashed.hexdigest()}"


def ignore(_: int) -> None:
    """Do nothing; stands for a missing progress callback."""


_sync_file_range = libc_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})


def _start_writeback(fd: int, start: int, size: int) -> None:
    if _sync_file_range is not None:  # only a hint: fsync makes the bytes durable, so the result is ignored
        _sync_file_range(fd, start, size, _WRITE)


def _finish_writeback(fd: int, start: int, size: int) -> None:
    """Wait until this range is written. The kernel reports a failed write only once, here or at fsync."""
    if _sync_file_range is None or _sync_file_range(fd, start, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER) == 0:
        return
    problem = ctypes.get_errno()
    _sync_file_range(-1, 0, 0, 0)
    forbidden = ctypes.get_errno() != errno.EBADF  # a sandbox refuses the call itself, with any error
    if problem not in _UNSUPPORTED and not forbidden:  # else fsync does it all
        raise OSError(problem, os.strerror(problem))
