"""Where the ranks of a job call in: one thread per rank turns lines into entries of the driver's inbox."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.chaos import world
from ttp.chaos.notes import LifeKey

_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class Seat:
    """One process of one rank, connected. ``pid`` is this world's; ``standing`` is where it waits for an answer."""

    rank: int
    life: LifeKey
    pid: int
    reply: Callable[[dict[str, Any]], None]
    standing: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class SatDown:
    """A rank has started and waits to be told its points."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Stands:
    """A rank has come to a point and waits."""

    seat: Seat
    step: int
    phase: str
    at_s: float


@dataclass(frozen=True, slots=True)
class GotUp:
    """The process is gone."""

    seat: Seat


PREFIX = f"chaos-{os.getuid()}-"
NAME = "line"


def _place() -> Path | None:
    """None: where temporary files go."""
    return world.SOCKETS if world.inside() else None


def remove_abandoned() -> list[Path]:
    """Remove what desks that were killed have left; returns it. Nobody listens there any more."""
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


Call = SatDown | Stands | GotUp


@dataclass(slots=True)
class RankSwitchboard:
    """Listens on a socket in a directory of its own, as paths of sockets have to be short.

    Args:
        inbox: takes the calls.
    """

    inbox: queue.SimpleQueue[Any]
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place())))
    _server: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._folder / NAME

    def open(self) -> None:
        """Begin to listen."""
        self._server.bind(str(self.path))
        self._server.listen(128)
        threading.Thread(target=self._accept, name="chaos-desk", daemon=True).start()

    def close(self) -> None:
        """Hang up on nobody: ranks that are still there find out when they call."""
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
        seat: Seat | None = None
        with connection, contextlib.suppress(OSError, ValueError):
            file = connection.makefile("r", encoding="utf-8")

            def reply(words: dict[str, Any]) -> None:
                with contextlib.suppress(OSError):
                    connection.sendall((json.dumps(words) + "\n").encode())

            for line in file:
                said, now = json.loads(line), time.monotonic()
                if seat is None:
                    seat = Seat(said["rank"], (said["life"][0], said["life"][1]), pid, reply)
                    self.inbox.put(SatDown(seat))
                else:
                    self.inbox.put(Stands(seat, said["step"], said["phase"], now))
        if seat is not None:
            self.inbox.put(GotUp(seat))
