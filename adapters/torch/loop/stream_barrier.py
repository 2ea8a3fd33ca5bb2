"""The barrier before an update, on the device: the training's stream waits for other ranks while the host runs ahead.

Used with ``TTP_STREAM_BARRIER=1``; decision 33 has the theory. The host queues an event behind the last gradient, and
behind the event a wait for a word in host memory. A thread waits for the event, meets the other ranks, and writes the
word.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from ttp.adapters.torch.device.accelerator import Event, Runtime, poll
from ttp.processor.faults import describe
from ttp.processor.gate.meeting import BrokenError, Meeting, run

log = logging.getLogger("ttp.adapters.torch")

LEAD_MAX = 2
"""Number of updates that the host may queue behind a barrier that is not over. It is less than ``AHEAD_MAX``, the
number of versions of which copies are kept for a host that is ahead."""
_WATCHED = range(2, 4)
"""Updates in which ttp checks whether the optimizer waits for the device. Not the first one, which makes its state."""
_PROBE_S = 60.0
_LOOK_S = 0.1

_Turn = tuple[int, int, Event]


def meet(meeting: Meeting, turn: int, patience_s: float, leaves: Callable[[], bool]) -> None:
    """Come to a meeting, and wait until all ranks have come or ``leaves``, asked after each ring, returns True.

    Raises:
        BrokenError: a rank will never come.
        TimeoutError: not all ranks came within ``patience_s``.
    """
    if run(meeting.come(turn)):
        return
    deadline = time.monotonic() + patience_s

    async def leave() -> bool:
        if leaves():
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to the barrier within {patience_s:g} s")
        return False

    run(meeting.wait(turn, leave))


class StreamBarrier:
    """Makes the device wait for the other ranks instead of the host, once it is known that this is possible.

    Args:
        meeting: the meeting of this rank with the others.
        runtime: the device, with a side stream that is used for nothing else.
        why_not: called once, after the first updates; returns why the host has to wait; empty: the device may wait.
        closed: returns whether the gate is closed.
        patience_s: seconds to wait for the other ranks; then the device waits for an order.

    Raises:
        OSError: there is no driver that can make a stream wait for the host.
        AttributeError: the driver is too old.
        RuntimeError: the driver refuses, or a test shows that streams do not wait or do not go on.
    """

    def __init__(
        self,
        meeting: Meeting,
        runtime: Runtime,
        why_not: Callable[[], str],
        closed: Callable[[], bool],
        patience_s: float,
    ) -> None:
        self._meeting, self._runtime, self._why_not, self._closed = meeting, runtime, why_not, closed
        self._patience_s = patience_s
        self._on: bool | None = None  # whether the device waits instead of the host; None: not known yet
        self._watch = contextlib.ExitStack()
        self._waited: list[str] = []
        self._hold = runtime.hold()
        self._probe()
        self._changed = threading.Condition()
        self._held: tuple[int, int] | None = None  # meeting and version of the update before which the device waits
        self._admitted = -1  # the last version that this rank was ordered to make without the others
        self._released = 0  # number of the last meeting that is over
        self._problem = ""  # why the thread has ended
        self._inbox: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()

    def _probe(self) -> None:
        """Check that a stream waits for the word in memory, and goes on when it is written.

        Raises:
            RuntimeError: it does not.
        """
        with self._runtime.on_side():
            self._hold.queue(1)
        event = self._runtime.event(side=True)
        held = not event.query()
        self._hold.release(1)
        if not poll(event.query, _PROBE_S) or not held:
            raise RuntimeError("a stream that had to wait for the host " + ("hangs" if held else "did not wait"))

    # ----------------------------------------------------------------------------------------------- training thread

    def ready(self, turn: int) -> bool:
        """Return whether the device waits for meeting ``turn``, so that the host need not."""
        self._watch.close()  # still open if the last update was left by an exception
        if self._on is None and self._waited:
            self._decide(f"optimizer.step() waits for the device ({self._waited[0]})")
        elif self._on is None and turn >= _WATCHED.stop:
            self._decide(self._why_not())
            self._released = turn - 1
        return bool(self._on)

    def watch(self, turn: int) -> None:
        """Begin to check whether the optimizer waits for the device, if the update after ``turn`` is one to check."""
        if self._on is None and turn in _WATCHED:
            self._watch.enter_context(self._runtime.noticing(self._waited))

    def updated(self) -> None:
        """Note that the update is over."""
        self._watch.close()

    def queue(self, turn: int, version: int) -> None:
        """Make the device wait before the update to ``version`` until all ranks have come to meeting ``turn``.

        The host itself waits only while it is more than ``LEAD_MAX`` updates ahead.

        Raises:
            RuntimeError: the thread of this object has ended with an error.
        """
        with self._changed:
            while turn - self._released > LEAD_MAX and not (self._problem or self._closed()):
                self._changed.wait(_LOOK_S)
        if self._problem:
            raise RuntimeError(f"the barrier before the update broke: {self._problem}")
        event = self._runtime.event(side=False)
        self._hold.queue(turn)
        self._inbox.put((turn, version, event))

    def _decide(self, reason: str) -> None:
        self._on = not reason
        if reason:
            log.warning("the host waits for its device in the barrier before each update: %s", reason)
            return
        log.info("the barrier before each update is on the training's stream: the host runs ahead of it")
        threading.Thread(target=self._run, name="ttp-stream-barrier", daemon=True).start()

    # ---------------------------------------------------------------------------------------------------- any thread

    def held(self, version: int) -> bool:
        """Return whether the device, with its gradient, waits before the update to ``version``."""
        held = self._held
        return held is not None and held[1] == version

    def admit(self, version: int) -> bool:
        """Let the device make the update to ``version`` without the other ranks.

        Returns:
            Whether the device was waiting before that update.
        """
        if not self.held(version):
            return False
        self._admitted = version
        with contextlib.suppress(OSError):
            run(self._meeting.ring())
        return True

    def close(self) -> None:
        """End the thread: no more updates are made. A device that waits before an update keeps waiting."""
        self._watch.close()
        self._inbox.put(None)

    # ----------------------------------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        try:
            for turn, version, event in iter(self._inbox.get, None):
                event.synchronize()
                self._held = turn, version
                self._meet(turn, version)
                self._held = None
                self._hold.release(turn)
                with self._changed:
                    self._released = turn
                    self._changed.notify_all()
        except Exception as problem:  # the device is gone, or there are no futexes any more
            self._problem = describe(problem)
            log.warning("this rank has left the barrier: its device makes no further update: %s", self._problem)

    def _meet(self, turn: int, version: int) -> None:
        """Return when all ranks have come, or when this rank is ordered to go on without them; else never return."""
        try:
            meet(self._meeting, turn, self._patience_s, lambda: self._admitted >= version)
        except (BrokenError, TimeoutError) as problem:
            log.warning("the device makes the update to version %s only by order: %s", version, describe(problem))
            while self._admitted < version:
                run(self._meeting.pause(lambda: self._admitted >= version))
