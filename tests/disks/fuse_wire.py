"""The kernel's FUSE protocol (7.31), as far as a file system of regular files and directories needs it.

Requests come from ``/dev/fuse``, one per read; answers go back the same way. It needs no library and no helper program,
only a kernel with FUSE and the right to mount.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path

OPCODES = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 8: "MKNOD", 9: "MKDIR", 10: "UNLINK", 11: "RMDIR",
    12: "RENAME", 13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS", 18: "RELEASE", 20: "FSYNC",
    26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 30: "FSYNCDIR", 34: "ACCESS",
    35: "CREATE", 36: "INTERRUPT", 38: "DESTROY", 42: "BATCH_FORGET", 45: "RENAME2",
}  # fmt: skip
"""What is answered; the kernel is told ENOSYS for anything else and then does without.

FLUSH is not: a process that waits for its answer when it closes a file cannot be killed, even before it was read.
"""

WRITE_MAX = 1 << 20
"""Bytes of one WRITE at most."""

REQUEST_MAX = WRITE_MAX + 65536

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_INIT_OUT = struct.Struct("<4I2H2I2H8I")
_DIRENT = struct.Struct("<QQII")
_STATFS = struct.Struct("<5Q10I")
_MINOR = 31
_BIG_WRITES, _WRITEBACK_CACHE, _MAX_PAGES = 1 << 5, 1 << 16, 1 << 22


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the kernel.

    Args:
        op: its name in ``OPCODES``; the number as text for others.
        unique: its id in the answer.
        node: the node that it is about.
        body: arguments after the header.
    """

    op: str
    unique: int
    node: int
    body: memoryview

    def take(self, form: str) -> tuple[int, ...]:
        """Return the numbers at the beginning of the body."""
        return struct.unpack_from("<" + form, self.body)

    def names(self, form: str) -> list[str]:
        """Return the names that follow these numbers."""
        text = bytes(self.body[struct.calcsize("<" + form) :])
        return [os.fsdecode(name) for name in text.split(b"\0")[:-1]]


def parse(data: memoryview) -> Request:
    """Return the request that was read from ``/dev/fuse``."""
    _, opcode, unique, node, *_ = _IN.unpack_from(data)
    return Request(OPCODES.get(opcode, str(opcode)), unique, node, data[_IN.size :])


def answer(unique: int, error: int = 0, payload: bytes = b"") -> bytes:
    """Return the answer to a request; ``error`` is an errno, 0 for success."""
    return _OUT.pack(_OUT.size + len(payload), -error, unique) + payload


def init(request: Request, writeback: bool) -> bytes:
    """Return the agreed settings. Without ``writeback`` the kernel caches no written data: the server sees it all."""
    _, _, readahead, offered = request.take("4I")
    flags = offered & (_BIG_WRITES | _MAX_PAGES | _WRITEBACK_CACHE * writeback)
    return _INIT_OUT.pack(7, _MINOR, readahead, flags, 16, 12, WRITE_MAX, 1, WRITE_MAX // 4096, 0, *[0] * 8)


def attributes(status: os.stat_result) -> bytes:
    """Return ``fuse_attr``."""
    seconds = [max(0, ns) // 10**9 for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    rests = [max(0, ns) % 10**9 for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    owner = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid)
    return _ATTR.pack(status.st_ino, status.st_size, status.st_blocks, *seconds, *rests, *owner, 0, 4096, 0)


def entry(node: int, status: os.stat_result) -> bytes:
    """Return ``fuse_entry_out``. The kernel may keep nothing of it, so that it asks every time."""
    return _ENTRY.pack(node, 0, 0, 0, 0, 0) + attributes(status)


def attr_out(status: os.stat_result) -> bytes:
    """Return ``fuse_attr_out``."""
    return struct.pack("<QII", 0, 0, 0) + attributes(status)


def open_out(handle: int) -> bytes:
    """Return ``fuse_open_out``."""
    return struct.pack("<QII", handle, 0, 0)


def directory_entry(inode: int, offset: int, name: str, kind: int) -> bytes:
    """Return ``fuse_dirent``; ``offset`` is where the next one begins."""
    text = os.fsencode(name)
    return _DIRENT.pack(inode, offset, len(text), kind) + text + b"\0" * (-len(text) % 8)


def statfs(status: os.statvfs_result) -> bytes:
    """Return ``fuse_statfs_out``."""
    blocks = (status.f_blocks, status.f_bfree, status.f_bavail, status.f_files, status.f_ffree)
    return _STATFS.pack(*blocks, status.f_bsize, status.f_namemax, status.f_frsize, 0, *[0] * 6)


_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_NOSUID_NODEV = 2 | 4


def mount(mountpoint: Path) -> int:
    """Mount a FUSE file system and return the descriptor on which the kernel asks.

    Raises:
        OSError: there is no ``/dev/fuse``, or this process may not mount.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    names = (b"ttp-bad-disk", os.fsencode(mountpoint), b"fuse.ttp-bad-disk")
    if _libc.mount(*names, ctypes.c_ulong(_NOSUID_NODEV), options.encode()) != 0:
        problem = ctypes.get_errno()
        os.close(device)
        raise OSError(problem, os.strerror(problem), str(mountpoint))
    return device


def unmount(mountpoint: Path) -> None:
    """Unmount at once, even if processes use it (``umount -l``)."""
    _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH)
