"""Addresses of services as ``host:port``. Imports nothing heavy: launchers and the command line use it."""

from __future__ import annotations

import socket
from typing import Any

PORT_MAX = 65535


def target(address: str, port: int) -> str:
    """Return ``host:port`` as gRPC wants it, with an IPv6 address in brackets and the ``%`` of its zone as ``%25``."""
    return f"[{address.replace('%', '%25')}]:{port}" if ":" in address else f"{address}:{port}"


def split(place: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, without the brackets of an IPv6 address: the inverse of ``target``.

    Raises:
        ValueError: ``place`` is not of that form, or the port is out of range.
    """
    host, _, port = place.rpartition(":")
    if not host or not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"{place!r:.200} is not host:port")
    return host.strip("[]").replace("%25", "%"), int(port)


def resolve(host: str, port: int | None, kind: socket.SocketKind = socket.SOCK_STREAM, flags: int = 0) -> list[Any]:
    """Return the addresses of a host, as ``socket.getaddrinfo`` does. May block (DNS).

    Raises:
        OSError: the host has no address, or its name cannot be one (``getaddrinfo`` raises UnicodeError for that).
    """
    try:
        return socket.getaddrinfo(host, port, type=kind, flags=flags)
    except UnicodeError as problem:
        raise _no_name(host, problem) from None


def why_unknown(host: str) -> str:
    """Return why the name of a host leads to no address, as a clause to append; empty: it does. May block (DNS)."""
    try:
        resolve(host, None)
    except OSError as problem:
        return f"; the name {host} has no address on this host ({problem.strerror or problem})"
    return ""


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a TCP connection to ``host:port``. Raises OSError like ``resolve``, or if nothing accepts it in time."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except UnicodeError as problem:
        raise _no_name(host, problem) from None


def _no_name(host: str, problem: UnicodeError) -> OSError:
    return socket.gaierror(socket.EAI_NONAME, f"{host!r:.100} is not a name of a host: {problem}")
