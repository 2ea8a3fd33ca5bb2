"""Makes forked children (data-loader workers) close the stream of their rank, so that it ends with the rank.

The controller learns of a SIGKILL from the end of the stream; the kernel ends the stream when the last process that
holds the socket is gone. A forked worker holds it too, and outlives its parent by seconds.

A descriptor is identified by its number and the file behind it: when a stream is down, its number is used again.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ttp.wire.sockets import own_sockets

_known: dict[int, tuple[int, int]] = {}  # device and inode behind each descriptor
_registered = False


def close_fd_in_children(fd: int) -> None:
    """Make children that are forked later close ``fd``, so that what it holds ends with this process."""
    global _registered
    with contextlib.suppress(OSError):  # it is closed
        _known[fd] = _identity(fd)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close)


def close_in_children(port: int) -> None:
    """Make children that are forked later close all sockets from or to ``port``, whichever end is here."""
    for fd in [fd for fd, view in own_sockets() if port in _ports(view)]:
        close_fd_in_children(fd)


def _close() -> None:
    for fd, identity in _known.items():
        with contextlib.suppress(OSError):
            if _identity(fd) == identity:
                os.close(fd)
    _known.clear()


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _ports(view: socket.socket) -> set[int]:
    """Return the ports of both ends of a connection; none of a socket that is not of TCP."""
    found: set[int] = set()
    for name in (view.getsockname, view.getpeername):
        with contextlib.suppress(OSError):
            where = name()
            if isinstance(where, tuple):
                found.add(where[1])
    return found
