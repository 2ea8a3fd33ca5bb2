"""Addresses of services as texts, ``host:port``. Imports nothing heavy: launchers and the command line use it."""

from __future__ import annotations

PORT_MAX = 65535


def target(address: str, port: int) -> str:
    """``host:port`` as gRPC wants it: IPv6 addresses in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split(place: str) -> tuple[str, int]:
    """Host and port of ``host:port``; brackets around an IPv6 address are removed.

    Raises:
        ValueError: ``place`` is not ``host:port``.
    """
    host, _, port = place.rpartition(":")
    if not host or not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"{place!r:.200} is not host:port")
    return host.strip("[]"), int(port)
