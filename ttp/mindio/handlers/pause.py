"""The end of a step, at which all ranks can be made to stand still."""

from __future__ import annotations

import threading
import time

from ttp.mindio.handlers.loop import ForcedStop

HALTED = "FORCE STOP. By ttp pause_train"
MOVES = "STEP FINISH. By ttp pause_train"
"""Text of an exception that programs written for MindIO look for when ranks are moved to other hosts."""


class PausePoint:
    """The point at the end of a step; see ``ttp.mindio.protocol.pause``. ``pass_by`` is for the training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._halted = ""
        self._limit: int | None = None
        self._passed: int | None = None
        self._standing: int | None = None

    def pass_by(self, step: int) -> None:
        """Pass the end of ``step``, or stand still there while the point is held.

        Raises:
            ForcedStop: the training thread is to leave its loop.
        """
        with self._changed:
            if self._held:
                self._stand(step)
            self._passed = step

    def _stand(self, step: int) -> None:
        self._standing = step
        self._changed.notify_all()
        while self._held and not self._halted and not (self._limit is not None and step < self._limit):
            self._changed.wait()
        self._standing = None
        if self._halted:
            text, self._halted = self._halted, ""
            raise ForcedStop(text)

    # --------------------------------------------------------------------------------------------------------- rounds

    def hold(self, version: int) -> int:
        """Hold the training thread at the end of its running step, and return that step. ``version``: updates made."""
        with self._changed:
            self._held, self._limit = True, None
            if self._standing is not None:
                return self._standing
            return (version if self._passed is None else self._passed) + 1

    def stand_at(self, step: int, timeout_s: float) -> bool:
        """Let the training thread go on to the end of ``step`` and stand there; returns whether it does."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._limit = step
            self._changed.notify_all()
            while self._held and self._standing != step and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._standing == step

    def release(self) -> None:
        """End the pause."""
        with self._changed:
            self._held, self._limit = False, None
            self._changed.notify_all()

    def halt(self, text: str = HALTED) -> None:
        """Make a thread that stands here leave its loop, by an exception with this text."""
        with self._changed:
            self._halted = text if self._standing is not None else ""
            self._changed.notify_all()
