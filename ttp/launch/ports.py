"""Reserves a free port for a job until the job is over."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Bind a socket to a free TCP port of all addresses; its ``getsockname()[1]`` is the port.

    Without this socket the kernel could give the port to another program that asks for any free port, or to an outgoing
    connection, before the job's server listens there or while the server is replaced. Servers that set
    ``SO_REUSEADDR``, as those of gRPC, torch and MindSpore do, can listen on the port meanwhile, one at a time.

    Raises:
        OSError: no port is free.
    """
    holding = socket.socket()
    try:
        holding.bind(("", 0))
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: bind would accept a port in use
    except OSError:
        holding.close()
        raise
    return holding
