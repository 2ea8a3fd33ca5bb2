"""Forked children (data-loader workers) must not keep the stream of a dead rank open.

The controller learns of a SIGKILL from the end of the stream; the kernel ends it when the last process that holds the
socket is gone. A forked worker holds it too, and outlives its parent by seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_fds: set[int] = set()
_others: set[int] = set()
_registered = False


def close_in_children(port: int) -> None:
    """From now on children forked from this process close its sockets to ``port``."""
    _fds.clear()
    _fds.update(_sockets_to(port))
    _register()


def close_fd_in_children(fd: int) -> None:
    """From now on children forked from this process close ``fd``: a lock held through it ends with its process."""
    _others.add(fd)
    _register()


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close)


def _close() -> None:
    for fd in _fds | _others:
        with contextlib.suppress(OSError):
            os.close(fd)
    _fds.clear()
    _others.clear()


def _sockets_to(port: int) -> set[int]:
    """File descriptors of this process that are TCP connections to ``port``. Empty where /proc is not to be had."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            fd = int(entry.name)
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _peer_port(fd) == port:
                    found.add(fd)
    return found


def _peer_port(fd: int) -> int | None:
    with socket.socket(fileno=os.dup(fd)) as view:
        peer = view.getpeername()
    return peer[1] if isinstance(peer, tuple) else None
