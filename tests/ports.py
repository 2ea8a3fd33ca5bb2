"""Free ports for tests."""

from __future__ import annotations

import atexit
import contextlib
import socket
from collections.abc import Iterator

from ttp.launch.ports import hold_port

_held: dict[int, socket.socket] = {}


@atexit.register
def _let_go() -> None:
    """Close what is held before Python ends, which would warn of each socket."""
    for holding in _held.values():
        holding.close()


def free_port() -> int:
    """Return a port that no other program on this machine gets while this test process lives; see ``hold_port``."""
    holding = hold_port()
    port = int(holding.getsockname()[1])
    _held[port] = holding
    return port


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Block one of our ports for a while: no server can listen there and no client connect, as during a start."""
    _held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    try:
        yield
    finally:
        _held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
