"""The virtual clock of the simulator: a queue of calls ordered by time, and the trace of what they did."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

LINES_AT_ONCE = 256
"""Number of trace lines that are collected before they are hashed."""


class Clock:
    """Makes queued calls in the order of their virtual time, and records the trace.

    Memory grows with the number of pending calls only, unless the text of the trace is kept.

    Args:
        keep_trace: whether to keep the text of the trace; its digest is always computed.
    """

    def __init__(self, *, keep_trace: bool = False) -> None:
        self.now = 0.0
        self.events = 0
        self.lines: list[str] = []
        self._fresh: list[str] = []
        self._keep_trace = keep_trace
        self._hash = hashlib.sha256()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Queue ``what(*args)`` for the time ``when`` (seconds). Calls for the same time are made in queueing order."""
        heapq.heappush(self._queue, (when, next(self._order), what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Queue ``what(*args)`` for ``seconds`` from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), what, args))

    def step(self) -> bool:
        """Advance to the next call and make it. Return False if the queue is empty."""
        if not self._queue:
            return False
        self.now, _, what, args = heapq.heappop(self._queue)
        self.events += 1
        what(*args)
        return True

    def run_until(self, when: float) -> None:
        """Make all calls that are due by ``when``, then set the time to ``when``."""
        while self._queue and self._queue[0][0] <= when:
            self.step()
        self.now = max(self.now, when)

    def trace(self, who: str, what: str) -> None:
        """Add a line to the trace: the time, the actor ``who``, and the text ``what``."""
        self._fresh.append(f"{self.now:10.6f} {who:12} {what}\n")
        if len(self._fresh) >= LINES_AT_ONCE:
            self._absorb()

    def digest(self) -> str:
        """Return the SHA-256 of the trace so far, in hexadecimal. Runs with equal traces have equal digests."""
        self._absorb()
        return self._hash.hexdigest()

    def text(self) -> str:
        """Return the text of the trace so far; empty unless it is kept."""
        self._absorb()
        return "".join(self.lines)

    def _absorb(self) -> None:
        self._hash.update("".join(self._fresh).encode())
        if self._keep_trace:
            self.lines += self._fresh
        self._fresh.clear()
