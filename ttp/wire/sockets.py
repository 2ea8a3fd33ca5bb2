"""Measures how long a peer's host has been silent, from this host's kernel (``TCP_INFO``).

The silence ends with received data, read by this process or not, and with an acknowledgement, which the peer's kernel
sends even while its processes are stopped. gRPC does not expose its sockets, so this module finds them among the
descriptors of this process.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from ttp.wire.address import resolve, target

Peer = tuple[str, int]

_INFO = struct.Struct("@8B13I")
"""The start of ``struct tcp_info``; the last two fields are milliseconds since data and since an acknowledgement."""


class Sockets:
    """The TCP sockets of this process, by peer. Descriptors are cached.

    Args:
        gives_up_ms: milliseconds without an answer after which the kernel drops a probed connection; None keeps the
            system's setting.
    """

    def __init__(self, gives_up_ms: int | None = None) -> None:
        self._gives_up_ms = gives_up_ms
        self._found: dict[Peer, tuple[int, object]] = {}  # descriptor, and the peer's address as the kernel gives it
        self._asked: set[tuple[int, object]] = set()

    def heard_of(self, names: Iterable[str]) -> float | None:
        """Return ``silent_s`` of the first connected peer among ``names`` (gRPC's names); None if none is connected."""
        ages = (self.silent_s([name]) for name in names)
        return next((age_s for age_s in ages if age_s is not None), None)

    def silent_s(self, peers: Iterable[str]) -> float | None:
        """Return the seconds since anything arrived from any of ``peers``; None if the age of one is unknown.

        Also turns on TCP keepalive for their connections, so that the kernel of an idle peer sends acknowledgements.

        Args:
            peers: addresses as gRPC writes them, such as ``ipv4:10.0.0.1:80``.
        """
        ages = []
        for peer in {known for known in map(parse, set(peers)) if known is not None}:
            age_s = self._age_s(peer)
            if age_s is None:
                return None
            ages.append(age_s)
        return min(ages, default=None)

    def _age_s(self, peer: Peer) -> float | None:
        if sys.platform != "linux":
            return None
        for known in (True, False):
            with contextlib.suppress(OSError):  # the descriptor is closed, or that of another file by now
                if not known:
                    self._look_through()
                if peer not in self._found:
                    continue
                fd, address = self._found[peer]
                with second(fd) as view:
                    if view.getpeername() == address:
                        return self._age_of(view, (fd, address))
        return None

    def _look_through(self) -> None:
        self._found = dict(_connections())
        self._asked &= set(self._found.values())

    def _age_of(self, view: socket.socket, found: tuple[int, object]) -> float:
        if found not in self._asked:
            self._asked.add(found)
            _ask(view, self._gives_up_ms)
        return _age_s(view)


def peers(host: str, port: int) -> tuple[str, ...]:
    """Return every name that gRPC may use for ``host:port``; empty if the host has no address. May block (DNS)."""
    with contextlib.suppress(OSError):
        found = resolve(host, port)
        return tuple(f"{'ipv6' if ':' in str(to[0]) else 'ipv4'}:{target(str(to[0]), port)}" for *_, to in found)
    return ()


@functools.lru_cache(1 << 16)
def parse(peer: str) -> Peer | None:
    """Return host and port of ``ipv4:10.0.0.1:80`` or ``ipv6:%5B::1%5D:80``; None for any other text."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _name((host.strip("[]").partition("%")[0], int(port)))


def _name(address: object) -> Peer | None:
    """Return host and port in one form: an IPv4 address mapped into IPv6 becomes the IPv4 address."""
    if not isinstance(address, tuple):
        return None
    try:
        ip = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]


@contextlib.contextmanager
def second(fd: int) -> Iterator[socket.socket]:
    """Yield a socket for a duplicate of the descriptor ``fd``, and close the duplicate afterwards.

    ``fd`` belongs to a library that may close it at any moment; afterwards the number may be that of another file.

    Raises:
        OSError: ``fd`` is closed, or not a socket. No descriptor stays open.
    """
    copy = os.dup(fd)
    try:
        view = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with view:
        yield view


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each socket of this process, and a ``second`` socket for it; none without /proc."""
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd := int(entry.name)).st_mode):
                    with second(fd) as view:
                        yield fd, view


def _connections() -> Iterator[tuple[Peer, tuple[int, object]]]:
    for fd, view in own_sockets():
        with contextlib.suppress(OSError):  # it is not connected
            address = view.getpeername()
            if (peer := _name(address)) is not None:
                yield peer, (fd, address)


def _ask(view: socket.socket, gives_up_ms: int | None) -> None:
    """Turn on TCP keepalive with one probe a second, and the limit after which the kernel drops the connection."""
    if gives_up_ms is not None:
        view.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, gives_up_ms)
    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        view.setsockopt(socket.IPPROTO_TCP, name, 1)
    view.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _age_s(view: socket.socket) -> float:
    *_, data_ms, ack_ms = _INFO.unpack(view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return float(min(data_ms, ack_ms)) / 1e3
