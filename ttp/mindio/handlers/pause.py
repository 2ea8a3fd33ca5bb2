"""The end of a step, at which all ranks can be made to stand still."""

from __future__ import annotations

import threading
import time

from ttp.mindio.handlers.loop import ForcedStop

HALTED = "FORCE STOP. By ttp pause_train"
MOVES = "STEP FINISH. By ttp pause_train"
"""What programs written for MindIO look for in the text of an exception where ranks are moved to other hosts."""


class PausePoint:
    """See ``ttp.mindio.protocol.pause``. ``pass_by`` belongs to the training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._halted = ""
        self._limit: int | None = None
        self._passed: int | None = None
        self._standing: int | None = None

    def pass_by(self, step: int) -> None:
        """The end of ``step``: go on, or stand still while it is held.

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
        """Let nobody go beyond the end of the running step; which that is. ``version``: finished updates."""
        with self._changed:
            self._held, self._limit = True, None
            if self._standing is not None:
                return self._standing
            return (version if self._passed is None else self._passed) + 1

    def stand_at(self, step: int, timeout_s: float) -> bool:
        """Go on to the end of ``step``, and stand there; whether that has happened."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._limit = step
            self._changed.notify_all()
            while self._held and self._standing != step and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._standing == step

    def release(self) -> None:
        """The pause is over."""
        with self._changed:
            self._held, self._limit = False, None
            self._changed.notify_all()

    def halt(self, text: str = HALTED) -> None:
        """Whoever stands here is to leave its loop, with an exception that says this."""
        with self._changed:
            self._halted = text if self._standing is not None else ""
            self._changed.notify_all()
