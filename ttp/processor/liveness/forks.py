"""Makes forked children (data-loader workers) close the stream of their rank, so that it ends with the rank.

The controller learns of a SIGKILL from the end of the stream; the kernel ends the stream when the last process that
holds the socket is gone. A forked worker holds it too, and outlives its parent by seconds.

A descriptor is identified by its number and the file behind it: when a stream is down, its number is used again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ttp.wire.sockets import second

_Identity = tuple[int, int]  # device and inode

_sockets: dict[int, _Identity] = {}
_others: dict[int, _Identity] = {}
_registered = False


def close_in_children(port: int) -> None:
    """Make children that are forked later close their sockets to ``port``, besides those to other ports."""
    for fd, before in list(_sockets.items()):
        if _identity(fd) != before:
            _sockets.pop(fd, None)
    _sockets.update((fd, known) for fd in _sockets_to(port) if (known := _identity(fd)) is not None)
    _register()


def close_fd_in_children(fd: int) -> None:
    """Make children that are forked later close ``fd``, so that a lock held by it ends with this process."""
    identity = _identity(fd)
    if identity is not None:
        _others[fd] = identity
    _register()


def close_sockets_of_in_children(port: int) -> None:
    """Make children that are forked later close all sockets from or to ``port``, whichever end is here.

    Unlike ``close_in_children`` it leaves the registered stream as it is.
    """
    for fd in _sockets_to(port, or_from=True):
        close_fd_in_children(fd)


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close)


def _close() -> None:
    for fd, identity in (_sockets | _others).items():
        if _identity(fd) == identity:
            os.close(fd)
    _sockets.clear()
    _others.clear()


def _identity(fd: int) -> _Identity | None:
    """Return what a descriptor refers to; None: it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sockets_to(port: int, *, or_from: bool = False) -> set[int]:
    """Return the file descriptors of this process that are TCP connections to ``port``; none without /proc.

    Args:
        port: port of the other end.
        or_from: include connections from ``port``, and sockets that listen there.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            fd = int(entry.name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and (port in _ports(fd) if or_from else _peer_port(fd) == port):
                    found.add(fd)
    return found


def _ports(fd: int) -> set[int]:
    """Return the ports of both ends of a connection."""
    found: set[int] = set()
    with second(fd) as view:
        for name in (view.getsockname, view.getpeername):
            with contextlib.suppress(OSError):
                where = name()
                if isinstance(where, tuple):
                    found.add(where[1])
    return found


def _peer_port(fd: int) -> int | None:
    with second(fd) as view:
        peer = view.getpeername()
    return peer[1] if isinstance(peer, tuple) else None
