"""How long nothing has come on a connection, as this host's kernel sees it.

Data counts, whether or not this process has read it, and so does an acknowledgement: the kernel at the other end gives
it whatever its processes do. gRPC keeps its sockets to itself, so they are found among this process's descriptors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

Peer = tuple[str, int]

_INFO = struct.Struct("@8B13I")
"""The beginning of ``struct tcp_info``; the last two are the milliseconds since data and since an acknowledgement."""

GIVES_UP_MS = 10_000
"""Without any answer the kernel drops a connection that was looked at; gRPC waits as long, see ``ttp.wire.channel``."""


class Sockets:
    """Those of this process; where they were found is remembered."""

    def __init__(self) -> None:
        self._fds: dict[Peer, int] = {}

    def silent_s(self, peers: Iterable[str]) -> float | None:
        """Seconds since anything came from any of them, which are named as gRPC does; None: that cannot be known.

        The kernel is told to ask, too: who has nothing to say at least acknowledges that.
        """
        ages = []
        for peer in filter(None, map(parse, peers)):
            age_s = self._age_s(peer)
            if age_s is None:
                return None
            ages.append(age_s)
        return min(ages, default=None)

    def _age_s(self, peer: Peer) -> float | None:
        if sys.platform != "linux":
            return None
        with contextlib.suppress(OSError):
            for known in (True, False):
                if not known:
                    self._fds = dict(_connections())
                fd = self._fds.get(peer)
                if fd is None:
                    continue
                with socket.socket(fileno=os.dup(fd)) as view:
                    if _name(view.getpeername()) == peer:
                        return _age_s(view)
        return None


def parse(peer: str) -> Peer | None:
    """``ipv4:10.0.0.1:80`` or ``ipv6:%5B::1%5D:80``; None for anything else."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _name((host.strip("[]").partition("%")[0], int(port)))


def _name(address: object) -> Peer | None:
    """IPv4 addresses look alike, however the socket that has them was made."""
    if not isinstance(address, tuple):
        return None
    try:
        ip = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]


def _connections() -> Iterator[tuple[Peer, int]]:
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as view:
                    peer = _name(view.getpeername())
                if peer is not None:
                    yield peer, fd


def _age_s(view: socket.socket) -> float:
    view.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVES_UP_MS)
    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        view.setsockopt(socket.IPPROTO_TCP, name, 1)
    view.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    *_, data_ms, ack_ms = _INFO.unpack(view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return float(min(data_ms, ack_ms)) / 1e3
