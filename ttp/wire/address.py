"""Addresses of services as ``host:port``. Imports nothing heavy: launchers and the command line use it."""

from __future__ import annotations

PORT_MAX = 65535


def target(address: str, port: int) -> str:
    """Return ``host:port`` as gRPC wants it, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split(place: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, without the brackets of an IPv6 address.

    Raises:
        ValueError: ``place`` is not of that form, or the port is out of range.
    """
    host, _, port = place.rpartition(":")
    if not host or not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"{place!r:.200} is not host:port")
    return host.strip("[]"), int(port)
