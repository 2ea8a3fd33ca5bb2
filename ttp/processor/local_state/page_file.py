"""The layout of a page file, and the checks that a file or directory belongs to this user; see ``pages``.

The parts of the file, by their offset in bytes::

    0      magic, number of slots, rank, pid, incarnation, start of the process
    512    slot records, 64 bytes apart: sequence word (odd: being written), offset, length and digest of a body
    4096   bodies and kept parts, anywhere
    body   prefix (version, incarnation, count of writes, rank, flags, small bytes), references to kept parts, bytes

All words are little-endian. The digest of a body covers its prefix and its references; a reference holds the digest of
the part that it points to. So a digest covers everything that a reader acts on, except the mark that a state is final,
which is only for people.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

MAGIC = b"TTPPAGE\x01"
SLOTS = 9
HEADER_BYTES = 4096

HEADER = struct.Struct("<8sIIQQQ")  # magic, slots, rank, pid, incarnation, start of the process (see ``start_of``)
SEQUENCE = struct.Struct("<Q")
FINISHED = 1 << 63  # bit of a sequence word: the provisional state is also the final one
RECORD = struct.Struct("<QQQ")  # offset, length, digest of the body
PREFIX = struct.Struct("<QQQIIQ")  # version, incarnation, count of writes, rank, final | kept parts << 1, small bytes
REFERENCE = struct.Struct("<QQQ")  # offset, length, digest of a kept part

SAFE_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of every ``open``: a link that another user left in shared memory is not followed."""


class UnsafeError(Exception):
    """Another user may have written this file or directory."""


def page_name(rank: int) -> str:
    """Return the file name of a rank's page."""
    return f"rank_{rank}.page"


def record_at(slot: int) -> int:
    """Return the offset of the record of a slot."""
    return 512 + slot * 64


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """Yield a descriptor of a directory that no other user can write to; names are then looked up in it, not by path.

    Raises:
        OSError: the directory is missing, a link, or no directory.
        UnsafeError: another user owns it or may write to it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | SAFE_OPEN)
    try:
        check_ours(os.fstat(fd), stat.S_ISDIR, "a directory")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_file(directory: Path, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yield a descriptor of a plain file in such a directory, if no other user can write to the file either.

    Raises:
        OSError: the file or the directory is missing, or a link.
        UnsafeError: another user owns one of them or may write to it; or it is no plain file.
    """
    with open_directory(directory) as opened:
        fd = os.open(name, flags | os.O_NONBLOCK | SAFE_OPEN, dir_fd=opened)
        try:
            check_ours(os.fstat(fd), stat.S_ISREG, "a plain file")
            yield fd
        finally:
            os.close(fd)


def check_ours(facts: os.stat_result, is_kind: Callable[[int], bool], kind: str) -> None:
    """Refuse a file or directory that another user may have written: shared memory is open to all users of the host.

    Raises:
        UnsafeError: it is of another kind, belongs to another user, or others may write to it.
    """
    if not is_kind(facts.st_mode):
        raise UnsafeError(f"it is not {kind}")
    if facts.st_uid != os.geteuid():
        raise UnsafeError(f"{kind} of user {facts.st_uid}, not of {os.geteuid()}")
    if facts.st_mode & 0o022:
        raise UnsafeError(f"{kind} that others may write to (mode {stat.S_IMODE(facts.st_mode):04o})")
