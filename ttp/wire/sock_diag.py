"""Asks the kernel which user owns a connection (netlink, ``sock_diag``), which is faster than ``/proc/net/tcp``."""

from __future__ import annotations

import ipaddress
import socket
import struct

Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, sender
_WANTED = struct.Struct("=BBxxI")  # of inet_diag_req_v2: family, protocol, states
_FOUND = struct.Struct("=BBxx48xIIIII")  # inet_diag_msg: family, state; timer, queues, owner, inode
_ESTABLISHED, _ANY = 1, 0xFFFFFFFF
_ANSWER_S = 0.2
"""Seconds to wait for the answer. A kernel answers at once; a sandbox that replaces it may never answer."""


def owner_of_connection(opened: Place, accepted: Place) -> int | None:
    """Return the user id of the process of this host that opened a connection.

    Args:
        opened: the end of the connection that the process holds.
        accepted: the other end.

    Returns:
        The user id; None if there is no such connection, or the kernel does not answer.
    """
    (source, source_port), (there, there_port) = opened, accepted
    if source.version != there.version:
        return None
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    wanted = _WANTED.pack(family, socket.IPPROTO_TCP, _ANY) + struct.pack(">HH", source_port, there_port)
    wanted += source.packed.ljust(16, b"\0") + there.packed.ljust(16, b"\0") + struct.pack("=III", 0, _ANY, _ANY)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asking:
            asking.settimeout(_ANSWER_S)
            asking.sendto(_HEADER.pack(_HEADER.size + len(wanted), _BY_FAMILY, _REQUEST, 1, 0) + wanted, (0, 0))
            answer = asking.recv(1 << 13)
        _, kind, *_ = _HEADER.unpack_from(answer)
        if kind == _ERROR:
            return None
        _, state, *_, owner, inode = _FOUND.unpack_from(answer, _HEADER.size)
    except (OSError, AttributeError, struct.error):  # not Linux, not allowed, or not a valid answer
        return None
    return int(owner) if state == _ESTABLISHED and inode else None
