"""A FUSE file system that passes all requests on to a directory, and can record the changes.

Nodes are inodes of the directory below, held by ``O_PATH`` descriptors, so names may change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.disks import fuse_wire as wire
from tests.disks.fuse_wire import Request
from ttp.store.disk import Disk

ROOT = 1
_SIZE, _MODE, _UID, _GID, _ATIME, _MTIME = 8, 1, 2, 4, 16, 32
_EXCHANGE = 2
_KEPT_FLAGS = os.O_ACCMODE
"""Of open(2). The kernel has done the rest: it asks for CREATE, truncates by SETATTR, and knows where the end is."""


@dataclass(slots=True)
class Node:
    """One inode.

    Args:
        fd: ``O_PATH`` descriptor.
        name: the last name under which it was found or to which it was renamed.
        known: number of references that the kernel holds.
    """

    fd: int
    name: str
    known: int = 0


@dataclass(slots=True)
class Tree:
    """Answers requests from ``root``.

    Args:
        root: the directory below.
        journal: gets one list per change, see ``tests.disks.crash``; None: changes are not recorded.
    """

    root: Path
    journal: list[list[Any]] | None = None
    nodes: dict[int, Node] = field(default_factory=dict)
    _ids: dict[tuple[int, int], int] = field(default_factory=dict)
    _listings: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    _next: int = ROOT

    def __post_init__(self) -> None:
        """Find the root."""
        self._node(os.open(self.root, os.O_PATH | os.O_DIRECTORY), "")

    def name_of(self, request: Request) -> str:
        """Return the name of the file of a request; for a rename the new name."""
        forms = {"CREATE": "4I", "MKDIR": "2I", "LINK": "Q", "RENAME": "Q", "RENAME2": "QII", "UNLINK": "", "RMDIR": ""}
        if request.op == "LOOKUP":
            return request.names("")[0]
        if request.op in forms:
            return request.names(forms[request.op])[-1]
        node = self.nodes.get(request.node)
        return node.name if node is not None else ""

    def handle(self, request: Request) -> bytes:
        """Return the answer to ``request``.

        Raises:
            OSError: as the directory below answers.
        """
        method: Callable[[Request], bytes] | None = getattr(self, f"_{request.op.lower()}", None)
        if method is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return method(request)

    def forget(self, node: int, times: int) -> None:
        """Drop references of the kernel to ``node``. With a journal inodes must not be used again."""
        known = self.nodes.get(node)
        if known is None or node == ROOT:
            return
        known.known -= times
        if known.known <= 0 and self.journal is None:
            status = os.fstat(known.fd)
            del self._ids[status.st_dev, status.st_ino], self.nodes[node]
            os.close(known.fd)

    # ------------------------------------------------------------------------------------------------------- names

    def _lookup(self, request: Request) -> bytes:
        return self._entry(request.node, request.names("")[0])

    def _create(self, request: Request) -> bytes:
        flags, mode, umask, _ = request.take("4I")
        (name,) = request.names("4I")
        wanted = flags & (_KEPT_FLAGS | os.O_EXCL) | os.O_CREAT | os.O_CLOEXEC
        handle = os.open(self._path(request.node, name), wanted, mode & ~umask)
        found = self._entry(request.node, name)
        self.note("create", request.node, name, self._id(request.node, name))
        return found + wire.open_out(handle)

    def _mkdir(self, request: Request) -> bytes:
        mode, umask = request.take("2I")
        (name,) = request.names("2I")
        Path(self._path(request.node, name)).mkdir(mode & ~umask)
        found = self._entry(request.node, name)
        self.note("mkdir", request.node, name, self._id(request.node, name))
        return found

    def _link(self, request: Request) -> bytes:
        (source,) = request.take("Q")
        (name,) = request.names("Q")
        below, parent = f"/proc/self/fd/{self.nodes[source].fd}", self.nodes[request.node].fd
        os.link(below, name, dst_dir_fd=parent, follow_symlinks=True)  # without a dir_fd it would not follow
        found = self._entry(request.node, name)
        self.note("link", request.node, name, source)
        return found

    def _unlink(self, request: Request) -> bytes:
        (name,) = request.names("")
        Path(self._path(request.node, name)).unlink()
        self.note("unlink", request.node, name)
        return b""

    def _rmdir(self, request: Request) -> bytes:
        (name,) = request.names("")
        Path(self._path(request.node, name)).rmdir()
        self.note("unlink", request.node, name)
        return b""

    def _rename(self, request: Request, form: str = "Q", exchange: bool = False) -> bytes:
        target = request.take("Q")[0]
        old, new = request.names(form)
        paths = Path(self._path(request.node, old)), Path(self._path(target, new))
        moved = self._id(request.node, old)
        (Disk().exchange if exchange else os.rename)(*paths)
        if moved in self.nodes:
            self.nodes[moved].name = new
        self.note("exchange" if exchange else "rename", request.node, old, target, new)
        return b""

    def _rename2(self, request: Request) -> bytes:
        flags = request.take("QII")[1]
        if flags & ~_EXCHANGE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._rename(request, "QII", bool(flags & _EXCHANGE))

    # -------------------------------------------------------------------------------------------------------- files

    def _open(self, request: Request) -> bytes:
        flags = request.take("2I")[0]
        fd = self.nodes[request.node].fd
        return wire.open_out(os.open(f"/proc/self/fd/{fd}", flags & _KEPT_FLAGS | os.O_CLOEXEC))

    def _read(self, request: Request) -> bytes:
        handle, offset, size = request.take("QQI")
        return os.pread(handle, size, offset)

    def _write(self, request: Request) -> bytes:
        handle, offset, size = request.take("QQI")
        data = request.body[40 : 40 + size]
        count = os.pwrite(handle, data, offset)
        self.note("write", request.node, offset, data[:count])
        return count.to_bytes(4, "little") + b"\0" * 4

    def _fsync(self, request: Request) -> bytes:
        """Record the fsync. Nothing is synced below."""
        self.note("fsync", request.node)
        return b""

    def _release(self, request: Request) -> bytes:
        os.close(request.take("Q")[0])
        return b""

    def _access(self, _: Request) -> bytes:
        return b""

    def _getattr(self, request: Request) -> bytes:
        return wire.attr_out(os.fstat(self.nodes[request.node].fd))

    def _setattr(self, request: Request) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid = request.take("2I6Q8I")[:15]
        fd = self.nodes[request.node].fd
        path = f"/proc/self/fd/{fd}"
        if valid & _SIZE:
            os.truncate(path, size)
            self.note("truncate", request.node, size)
        if valid & _MODE:
            Path(path).chmod(stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & (_ATIME | _MTIME):
            os.utime(path, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
        return wire.attr_out(os.fstat(fd))

    # -------------------------------------------------------------------------------------------------- directories

    def _opendir(self, request: Request) -> bytes:
        handle = os.open(f"/proc/self/fd/{self.nodes[request.node].fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with os.scandir(handle) as found:
            self._listings[handle] = [(e.name, e.inode(), 4 if e.is_dir(follow_symlinks=False) else 8) for e in found]
        return wire.open_out(handle)

    def _readdir(self, request: Request) -> bytes:
        handle, offset, size = request.take("QQI")
        filled = b""
        for position, (name, inode, kind) in enumerate(self._listings[handle][offset:], offset + 1):
            one = wire.directory_entry(inode, position, name, kind)
            if len(filled) + len(one) > size:
                break
            filled += one
        return filled

    def _releasedir(self, request: Request) -> bytes:
        handle = request.take("Q")[0]
        del self._listings[handle]
        os.close(handle)
        return b""

    def _fsyncdir(self, request: Request) -> bytes:
        self.note("fsyncdir", request.node)
        return b""

    def _statfs(self, _: Request) -> bytes:
        return wire.statfs(os.statvfs(self.root))

    # ------------------------------------------------------------------------------------------------------ details

    def _path(self, node: int, name: str) -> str:
        return f"/proc/self/fd/{self.nodes[node].fd}/{name}"

    def _entry(self, parent: int, name: str) -> bytes:
        node = self._id(parent, name)
        self.nodes[node].known += 1
        return wire.entry(node, os.fstat(self.nodes[node].fd))

    def _id(self, parent: int, name: str) -> int:
        return self._node(os.open(self._path(parent, name), os.O_PATH | os.O_NOFOLLOW), name)

    def _node(self, fd: int, name: str) -> int:
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        if key in self._ids:
            os.close(fd)
            self.nodes[self._ids[key]].name = name
        else:
            self._ids[key], self.nodes[self._next] = self._next, Node(fd, name)
            self._next += 1
        return self._ids[key]

    def note(self, what: str, *facts: Any) -> None:
        """Add a line to the journal."""
        if self.journal is not None:
            self.journal.append([what, *(bytes(f) if isinstance(f, memoryview) else f for f in facts)])
