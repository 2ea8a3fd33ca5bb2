"""Finds out which program listens at a port: this job's controller, another job's, something else, or none."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any, Literal

from ttp.wire.address import connect, resolve

Presence = Literal["controller", "nobody", "other", "refused"]
"""What answers at a port: the job's controller; nothing; something else; a controller that refuses the job's token."""

PROBE_S = 2.0
"""Seconds that a controller may take to answer a probe."""
CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
"""Options of gRPC for short connections to a controller."""
LIVES = frozenset({"live", "frozen"})
"""States of a rank, as ``ttp status`` names them, that is connected and trains or saves."""


def listeners(port: int) -> set[int | None]:
    """Return the processes that listen on a TCP port of this machine.

    None stands for a process of another user, or for one that has begun to listen just now.
    """
    import psutil

    try:
        found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return set()
    return {c.pid for c in found if c.laddr and c.laddr.port == port}


def port_owner(port: int) -> str | None:
    """Return the process that listens on a TCP port of this machine, as ``pid 123 (redis-server)``; None: none seen."""
    pids = listeners(port)
    known = ", ".join(_describe(pid) for pid in sorted(pid for pid in pids if pid is not None))
    return (known or "a process of another user") if pids else None


def _describe(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.name()}{', stopped' if process.status() == psutil.STATUS_STOPPED else ''})"
    except (psutil.Error, OSError):
        return f"pid {pid}"


def is_local(address: str) -> bool:
    """Return whether ``address`` (name or number) belongs to this machine, i.e. whether a socket can be bound to it."""
    try:
        found = resolve(address, 0)
    except OSError:
        return False
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probing:
            probing.bind(where)
    except OSError:
        return False
    return True


def may_be_bound(bind: str, port: int) -> bool:
    """Return whether a port can be bound, now or when its present user has left.

    It can never be bound if this machine lacks the address, or if this user may not bind the port.

    Args:
        bind: an address of this machine; empty: every address.
        port: the TCP port.
    """
    try:
        where = resolve(bind or "0.0.0.0", port, flags=socket.AI_PASSIVE)
        family, _, _, _, address = where[0]
        with socket.socket(family, socket.SOCK_STREAM) as probing:
            probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probing.bind(address)
    except OSError as problem:
        return problem.errno == errno.EADDRINUSE
    return True


def listens(address: str, port: int, timeout_s: float) -> bool:
    """Return whether any program accepts TCP connections at ``address:port`` within ``timeout_s`` seconds."""
    try:
        connect(address, port, timeout_s).close()
    except OSError:
        return False
    return True


def probe(address: str, port: int, token: str, timeout_s: float = PROBE_S) -> Presence:
    """Find out what serves at a port. Does not raise if nothing answers.

    Takes up to ``2 * timeout_s`` seconds, and as long as the name service does. gRPC would ask that again, within
    ``timeout_s``: so it connects to the address that was found.
    """
    try:
        with connect(address, port, timeout_s) as found, contextlib.suppress(OSError):  # it may be closed already
            address = found.getpeername()[0]
    except OSError:
        return "nobody"
    import grpc

    from ttp.wire.v1.controller_pb2 import GetStatusRequest

    try:
        ask(address, port, token, "GetStatus", GetStatusRequest(brief=True), timeout_s)
    except grpc.RpcError as problem:
        code = problem.code()
        refused = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        return "refused" if refused else "other"
    return "controller"


def controller_pid(address: str, port: int, token: str) -> int | None:
    """Return the pid that the controller at ``address:port`` reports for itself; None: none answers."""
    status = ask_status(address, port, token)
    return None if status is None else int(status.pid)


def ask_status(address: str, port: int, token: str, timeout_s: float = PROBE_S, *, brief: bool = True) -> Any:
    """Return the status (``GetStatusResponse``) of a controller; None: it does not answer, or refuses the token.

    ``brief``: without ranks. The launchers of a thousand hosts ask at once, and 10,000 ranks take the controller 30 ms.
    """
    import grpc

    from ttp.wire.v1.controller_pb2 import GetStatusRequest

    try:
        return ask(address, port, token, "GetStatus", GetStatusRequest(brief=brief), timeout_s)
    except grpc.RpcError:
        return None


def ask(address: str, port: int, token: str, method: str, request: Any, timeout_s: float) -> Any:
    """Send one request to a controller, over a connection of its own, and return the answer.

    Args:
        address: the controller's host.
        port: the controller's port.
        token: the job's token.
        method: name of the method of the controller's service.
        request: its message.
        timeout_s: seconds that the controller may take to answer.

    Raises:
        grpc.RpcError: it does not answer, or refuses.
        ConfigError: TLS is configured and cannot be used.
    """
    from ttp.wire.channel import metadata, open_channel, stub

    with open_channel(address, port, CHANNEL_OPTIONS) as channel:
        return getattr(stub(channel), method)(request, timeout=timeout_s, metadata=metadata(token))
