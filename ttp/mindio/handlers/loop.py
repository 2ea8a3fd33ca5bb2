"""Where the training thread is: in its loop, out of it, on its way back."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

POLL_S = 1.0
"""How often a thread that waits looks whether anybody is left to wait for, and handles signals."""


class NextAction(enum.IntEnum):
    """What a training thread is to do that has left its loop."""

    RETRY = 0
    EXIT = 1


class ForcedStop(RuntimeError):  # noqa: N818 - it is not an error of whoever gets it
    """The training thread is to leave its loop, report that it was stopped, and wait for what comes next."""


class Loop:
    """What one training thread waits for, and what others have to know of it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out = False
        self._cleaned = False
        self._resumes = 0
        self._left_at = 0

    # ------------------------------------------------------------------------------------------------- training thread

    def leave(self) -> None:
        """It is not in its loop any more."""
        with self._changed:
            self._out, self._left_at = True, self._resumes
            self._changed.notify_all()

    def wait_cleaned(self, gone: Callable[[], bool]) -> NextAction:
        """Until the device is usable again; ``EXIT`` when nobody is left to say so."""
        return self._wait(lambda: self._cleaned or self._resumes > self._left_at, gone)

    def wait_resumed(self, gone: Callable[[], bool]) -> NextAction:
        """Until the loop can be entered again; ``EXIT`` when nobody is left to say so."""
        return self._wait(lambda: self._resumes > self._left_at, gone)

    def _wait(self, came: Callable[[], bool], gone: Callable[[], bool]) -> NextAction:
        with self._changed:
            while not came():
                if gone():
                    return NextAction.EXIT
                self._changed.wait(POLL_S)
        return NextAction.RETRY

    # --------------------------------------------------------------------------------------------------------- rounds

    def wait_left(self, timeout_s: float) -> bool:
        """Whether it has left its loop; waits for that."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._out and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._out

    def cleaned(self) -> None:
        """The device is usable again."""
        with self._changed:
            self._cleaned = True
            self._changed.notify_all()

    def resume(self) -> None:
        """The loop can be entered again."""
        with self._changed:
            self._out = self._cleaned = False
            self._resumes += 1
            self._changed.notify_all()
