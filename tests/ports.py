"""Free ports for tests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from ttp.launch.ports import hold_port

_held: dict[int, socket.socket] = {}


def free_port() -> int:
    """A port that nobody else on this machine is given before this test process ends; see ``hold_port``."""
    holding = hold_port()
    port = int(holding.getsockname()[1])
    _held[port] = holding
    return port


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """For a while no server can listen at one of ours, and nobody can be reached there: as one that just starts."""
    _held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    try:
        yield
    finally:
        _held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
