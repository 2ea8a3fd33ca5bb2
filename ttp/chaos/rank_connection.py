"""A rank's connection to the driver of its job: a Unix socket with one JSON text per line.

The driver names steps and phases; the rank reports when it reaches one, and waits for an answer. The driver injects
faults while the rank waits. Without ``CHAOS_SOCKET`` in the environment there is no connection and no report.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

SOCKET = "CHAOS_SOCKET"
LAUNCH = "CHAOS_LAUNCH"
"""Environment variable: the number of launches by the scheduler before this one."""

HOLD, END = "hold", "end"
"""Phases outside a step: ``hold`` before a run begins, ``end`` after the last step of the job."""


class RankConnection:
    """The rank's end of the connection.

    Args:
        rank: number of this rank.
        life: the start of the job to which this process belongs.
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
            told = self._ask({"rank": rank, "life": life, "forked": "ttp.launch.warm.template" in sys.modules})
            self._points = {(step, phase) for step, phase in told["points"]}
            self._phases = set(told["phases"])

    def at(self, step: int, phase: str) -> str:
        """Report that this rank has reached ``phase`` of ``step``, if the driver wants to know.

        Returns:
            The fault that the rank has to carry out on itself, or ``go``.
        """
        if (step, phase) not in self._points and phase not in self._phases:
            return "go"
        return str(self._ask({"step": step, "phase": phase})["do"])

    def close(self) -> None:
        """Close the connection."""
        if self._file is not None:
            self._file.close()

    def _ask(self, said: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return the answer. If the driver is gone, end this process."""
        try:
            self._file.write(json.dumps(said) + "\n")
            self._file.flush()
            answer = self._file.readline()
        except OSError:
            answer = ""
        if not answer:
            os._exit(1)
        return dict(json.loads(answer))
