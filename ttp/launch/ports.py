"""Free ports that are held for a job until it is over."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Bind a socket to a free TCP port of all addresses; its ``getsockname()[1]`` is the port.

    A port that is only looked up may be given away before a server listens there, or while the server is replaced: to a
    program that asks for any port, or to an outgoing connection. Until the socket is closed this port is given to
    neither. Servers that set ``SO_REUSEADDR``, as gRPC's, torch's and MindSpore's do, can listen there all the time,
    one at once.

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
