"""The virtual clock of the simulator: a queue of calls ordered by time, and the trace of what they did.

Also what depends on the time: processes that may be stopped, and the timers of state machines.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from ttp.testing.toy import InvariantBroken

NEVER = float("inf")
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


class Killed(Exception):  # noqa: N818 - not an error
    """Ends the running call of a process that was killed."""


class Process:
    """A process of a simulated job. It does nothing while it is stopped, nor after it has ended.

    Args:
        clock: the virtual clock.
        name: its name in the trace.
    """

    __slots__ = ("_clock", "_missed", "alive", "name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self.name = clock, name
        self.alive = True
        self._missed: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None

    def run(self, what: Callable[..., None], *args: Any) -> None:
        """Run a call of this process: now, later if it is stopped, or never if it has ended."""
        if self._missed is not None:
            self._missed.append((what, args))
        elif self.alive:
            try:  # noqa: SIM105 - half of all calls go through here
                what(*args)
            except Killed:
                pass

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped."""
        return self._missed is not None

    def stop(self, lasts_s: float) -> None:
        """Stop the process (SIGSTOP), and continue it ``lasts_s`` seconds later (SIGCONT)."""
        if self.alive and self._missed is None:
            self._clock.trace(self.name, f"does nothing for {lasts_s} s")
            self._missed = []
            if lasts_s < NEVER:
                self._clock.after(lasts_s, self._cont)

    def _cont(self) -> None:
        missed, self._missed = self._missed or [], None
        missed.sort(key=lambda call: getattr(call[0], "__func__", None) is not Alarm._ring)
        for what, args in missed:  # all calls that were due meanwhile, at the same time; a timer before what is unread
            self._clock.after(0.0, self.run, what, *args)

    def end(self) -> None:
        """Let the process end, also if it is stopped."""
        self.alive, self._missed = False, None


class Alarm:
    """The timer of a state machine: keeps one call queued for the machine's deadline or an earlier time.

    Args:
        process: the process that the machine belongs to.
        deadline: returns the machine's deadline; None for no deadline.
        due: is called when the deadline has come; has to move it.
    """

    __slots__ = ("_at", "_deadline", "_due", "_process")

    def __init__(self, process: Process, deadline: Callable[[], float | None], due: Callable[[], None]) -> None:
        self._process, self._deadline, self._due = process, deadline, due
        self._at = NEVER

    def plan(self) -> None:
        """Queue a call for the deadline, unless one is queued for that time or an earlier one."""
        deadline, clock = self._deadline(), self._process._clock
        if deadline is not None and deadline < self._at and self._process.alive:
            self._at = max(deadline, clock.now)
            clock.at(self._at, self._process.run, self._ring, self._at)

    def _ring(self, planned: float) -> None:
        if planned != self._at:
            return
        self._at = NEVER
        if self._has_come():
            self._due()
            if self._process.alive and not self._process.stopped and self._has_come():
                raise InvariantBroken(f"I6: the deadline of the machine of {self._process.name} does not move")
        self.plan()

    def _has_come(self) -> bool:
        deadline = self._deadline()
        return deadline is not None and deadline <= self._process._clock.now
