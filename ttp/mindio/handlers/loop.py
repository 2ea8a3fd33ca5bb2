"""The position of the training thread: in its loop, out of it, or waiting to enter it again."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

POLL_S = 1.0
"""Seconds after which a waiting thread checks whether a controller is left; it handles signals then too."""


class NextAction(enum.IntEnum):
    """What a training thread has to do after it has left its loop."""

    RETRY = 0
    EXIT = 1


class ForcedStop(RuntimeError):  # noqa: N818 - not an error of the code that gets it
    """Raised in the training thread when it has to leave its loop, report that it was stopped, and wait."""


class Loop:
    """The state of the training loop, shared by the training thread and the rounds. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out = False
        self._cleaned = False
        self._resumes = 0
        self._left_at = 0

    # ------------------------------------------------------------------------------------------------- training thread

    def leave(self) -> None:
        """Record that the training thread has left its loop."""
        with self._changed:
            self._out, self._left_at = True, self._resumes
            self._changed.notify_all()

    def wait_cleaned(self, gone: Callable[[], bool]) -> NextAction:
        """Wait until the device is usable again. Return ``EXIT`` if ``gone()`` (no controller is left) becomes true."""
        return self._wait(lambda: self._cleaned or self._resumes > self._left_at, gone)

    def wait_resumed(self, gone: Callable[[], bool]) -> NextAction:
        """Wait until the loop can be entered again. Return ``EXIT`` if ``gone()`` becomes true."""
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
        """Wait up to ``timeout_s`` seconds for the training thread to leave its loop, and return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._out, timeout_s)

    def cleaned(self) -> None:
        """Record that the device is usable again."""
        with self._changed:
            self._cleaned = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Allow the training thread to enter its loop again."""
        with self._changed:
            self._out = self._cleaned = False
            self._resumes += 1
            self._changed.notify_all()
