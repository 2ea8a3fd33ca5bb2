"""The driver's end of the connections to the ranks: one thread per rank puts its messages into the driver's inbox."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.chaos import world
from ttp.chaos.notes import LifeKey
from ttp.inbox import Inbox

_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class RankProcess:
    """The connected process of a rank.

    Args:
        rank: number of the rank.
        life: the start of the job to which the process belongs.
        pid: process id, as the driver sees it.
        forked: whether it was forked from the launcher's template process; otherwise it is a new interpreter.
        reply: function that sends an answer to the process.
        waiting_at: step and phase at which the process waits for an answer; None if it does not wait.
    """

    rank: int
    life: LifeKey
    pid: int
    forked: bool
    reply: Callable[[dict[str, Any]], None]
    waiting_at: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank has connected, and waits for the list of steps and phases at which it has to stop."""

    rank_process: RankProcess


@dataclass(frozen=True, slots=True)
class RankWaits:
    """A rank has reached a phase of a step, and waits for an answer."""

    rank_process: RankProcess
    step: int
    phase: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The connection of a rank's process has ended."""

    rank_process: RankProcess


PREFIX = f"chaos-{os.getuid()}-"
NAME = "line"


def _place() -> Path | None:
    """Return the directory for sockets; None for the directory of temporary files."""
    return world.SOCKETS if world.inside() else None


def remove_abandoned() -> list[Path]:
    """Remove the socket directories of drivers that were killed, and return their paths."""
    found = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if not _listens(path / NAME)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probing:
        try:
            probing.connect(str(path))
        except OSError:
            return False
        return True


Call = RankStarted | RankWaits | RankEnded


@dataclass(slots=True)
class RankSwitchboard:
    """Accepts the connections of ranks on a Unix socket.

    The socket is in a temporary directory of its own, because socket paths have to be short.

    Args:
        inbox: gets a ``Call`` for each message of a rank.
    """

    inbox: Inbox[Any]
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place())))
    _server: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

    @property
    def path(self) -> Path:
        """Path of the socket."""
        return self._folder / NAME

    def open(self) -> None:
        """Start to listen, on a thread."""
        self._server.bind(str(self.path))
        self._server.listen(128)
        threading.Thread(target=self._accept, name="chaos-switchboard", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket. Ranks that are still connected notice at their next message."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        rank_process: RankProcess | None = None
        with connection, contextlib.suppress(OSError, ValueError):
            file = connection.makefile("r", encoding="utf-8")

            def reply(words: dict[str, Any]) -> None:
                with contextlib.suppress(OSError):
                    connection.sendall((json.dumps(words) + "\n").encode())

            for line in file:
                said = json.loads(line)
                if rank_process is None:
                    rank_process = RankProcess(
                        said["rank"], (said["life"][0], said["life"][1]), pid, said["forked"], reply
                    )
                    self.inbox.put(RankStarted(rank_process))
                else:
                    self.inbox.put(RankWaits(rank_process, said["step"], said["phase"]))
        if rank_process is not None:
            self.inbox.put(RankEnded(rank_process))
