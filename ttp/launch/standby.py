"""Starts standby controllers, and finds the address of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp.config import Config
from ttp.errors import TtpError
from ttp.launch.controller_process import end_controller, start_controller, stop_controller, wait_until_serving
from ttp.launch.leases import exists
from ttp.launch.presence import ask_status, may_be_bound
from ttp.launch.run_dir import make_private
from ttp.wire.access import is_loopback, listening_address
from ttp.wire.address import connect, resolve, split, target

PROBE_S = 1.0
START_S = 20.0
"""Seconds that a controller may take to start. It usually needs one; more on a host that is busy starting a job."""
ORPHAN_S = 15.0
"""Seconds for which a standby controller outlives the rank that started it: other ranks may be about to connect."""

NOTE = "serves"
"""File with the pid of the rank that started this host's standby controller, and the controller's address."""

ANY = ("", "0.0.0.0", "::")
"""Values of ``TTP_BIND`` that stand for every address."""

_HOST_ANSWERS = (errno.ECONNREFUSED, errno.ECONNRESET)


def own_address(config: Config, master_addr: str) -> str:
    """Return the address of this host: ``TTP_ADDRESS``, else ``TTP_BIND``, else that of the route to the first node.

    On a first node that takes its own name for an address of loopback, it is this name, as other hosts resolve it.

    Args:
        config: settings.
        master_addr: address of the first node.

    Returns:
        The address; empty: it cannot be found out.
    """
    if config.address:
        return config.address
    if config.bind not in ANY:
        return config.bind
    try:
        family, where = _towards(master_addr, config.port or 1)
        with socket.socket(family, socket.SOCK_DGRAM) as probing:
            probing.connect(where)  # sends no packet, only selects the route
            found = str(probing.getsockname()[0])
    except OSError:
        return ""
    named = master_addr not in (where[0], "localhost") and (config.token or config.insecure)
    return master_addr if named and is_loopback(found) else found  # its name is 127.0.1.1 on Debian: others know better


def _towards(master_addr: str, port: int) -> tuple[int, Any]:
    """Return family and address of the first node. If it has both families, one may lead nowhere: one that answers."""
    found = [(family, where) for family, _, _, _, where in resolve(master_addr, port, socket.SOCK_DGRAM)]
    both = len({family for family, _ in found}) > 1
    return next((way for way in found if both and reachable(way[1][0], port)[0]), found[0])


def reachable(address: str, port: int, timeout_s: float = PROBE_S) -> tuple[bool, str]:
    """Return whether a host answers, and a text with the reason.

    An open port and a refused connection both show that the host's kernel runs.
    """
    try:
        connect(address, port, timeout_s).close()
    except OSError as problem:
        if problem.errno in _HOST_ANSWERS:
            return True, f"{address} refuses port {port}: the host lives"
        return False, f"{address} does not answer: {problem}"
    return True, f"{address} answers on port {port}"


def start_standby(config: Config, run_dir: Path, address: str, save_dir: str) -> str:
    """Make sure that a standby controller runs on this host, and return its ``host:port``.

    One that an earlier order has started is used again while the rank that started it lives: each controller that takes
    over, and each launch in which a rank keeps its process, gives that order again. One whose rank has ended makes way,
    unless it leads: it would end soon, and hold the job's port until then.

    Raises:
        TtpError: it does not start; the text says why.
    """
    if not address:
        raise TtpError("this host does not know its own address: set TTP_ADDRESS")
    bind = listening_address(config)
    if not may_be_bound(bind, 0):
        raise TtpError(f"TTP_BIND={bind} is not an address of this host")
    folder = run_dir / "standby"
    with _one_at_a_time(folder):
        owner, port = _noted(folder, address)
        status = ask_status(address, port, config.token) if port else None
        if status is None or not exists(owner):
            if status is not None and not status.attached:
                end_controller(address, port, config.token)
            port = _start(config, folder, bind, address, save_dir)
            (folder / NOTE).write_text(f"{os.getpid()} {target(address, port)}")
    return target(address, port)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other rank of this host starts a standby controller."""
    make_private(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile holds it too


def _noted(folder: Path, address: str) -> tuple[int, int]:
    """Return who started the last standby controller of this host (a pid), and its port; 0: there was none."""
    try:
        owner, place = (folder / NOTE).read_text().split()
        host, port = split(place)
        return int(owner), port if host == address else 0
    except (OSError, ValueError):
        return 0, 0


def _start(config: Config, folder: Path, bind: str, address: str, save_dir: str) -> int:
    port = _free_port(bind, config.port)
    config = replace(config, port=port, bind=bind)
    child = start_controller(config, folder, owned=True, orphan_s=ORPHAN_S, save_dir=save_dir)
    try:
        if not wait_until_serving(address, port, config.token, START_S):
            raise TtpError(f"the controller does not answer at {target(address, port)} within {START_S:g} s")
    except BaseException:
        stop_controller(child)
        raise
    return port


def _free_port(bind: str, wanted: int | None) -> int:
    """Return the job's own port if it is free, because firewalls may allow only that one, else any free port."""
    family, _, _, _, where = resolve(bind, 0, flags=socket.AI_PASSIVE)[0]
    for port in (wanted or 0, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probing:
            probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
            try:
                probing.bind((where[0], port, *where[2:]))
                return int(probing.getsockname()[1])
            except OSError:
                continue
    raise TtpError("no port is free on this host")
