"""The line between a rank of the hurt job and whoever hurts it: a socket, one JSON text per line.

A rank says where it stands at the points that it was told to report, and goes on when it is answered. Whatever is done
to it from outside is done while it stands there. Without ``CHAOS_SOCKET`` there is no line, and nothing is said.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

SOCKET = "CHAOS_SOCKET"
LAUNCH = "CHAOS_LAUNCH"
"""How often the scheduler has started the job."""

HOLD, END = "hold", "end"
"""Points of every run and of every job, beside the phases: before a run begins, after the last step."""


class RankConnection:
    """A rank's end.

    Args:
        rank: who speaks.
        life: which start of the job this process belongs to.
    """

    def __init__(self, rank: int, life: tuple[int, int]) -> None:
        self._points: set[tuple[int, str]] = set()
        self._phases: set[str] = set()
        self._file: Any = None
        path = os.environ.get(SOCKET)
        if path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(path)
                self._file = connection.makefile("rw", encoding="utf-8")  # it keeps the connection open
            told = self._ask({"rank": rank, "life": life})
            self._points = {(step, phase) for step, phase in told["points"]}
            self._phases = set(told["phases"])

    def at(self, step: int, phase: str) -> str:
        """This rank has come to ``phase`` of ``step``; returns what it has to do to itself, ``go`` for nothing."""
        if (step, phase) not in self._points and phase not in self._phases:
            return "go"
        return str(self._ask({"step": step, "phase": phase})["do"])

    def close(self) -> None:
        """Hang up."""
        if self._file is not None:
            self._file.close()

    def _ask(self, said: dict[str, Any]) -> dict[str, Any]:
        """Say and wait. Whoever was listening is gone: then this job is nobody's, and ends."""
        try:
            self._file.write(json.dumps(said) + "\n")
            self._file.flush()
            answer = self._file.readline()
        except OSError:
            answer = ""
        if not answer:
            os._exit(1)
        return dict(json.loads(answer))
