"""The point at the end of a step at which training can be paused."""

from __future__ import annotations

import threading

from ttp.mindio.handlers.loop import ForcedStop

HALTED = "FORCE STOP. By ttp pause_train"
MOVES = "STEP FINISH. By ttp pause_train"
"""Text of the exception that programs written for MindIO look for when ranks are moved to other hosts."""


class PausePoint:
    """The pause point of one rank; see ``ttp.mindio.protocol.pause``. The training thread calls ``pass_by``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._halted = ""
        self._limit: int | None = None
        self._passed: int | None = None
        self._standing: int | None = None

    def pass_by(self, step: int) -> None:
        """Pass the end of ``step``, or wait there while training is paused.

        Raises:
            ForcedStop: the training thread has to leave its loop.
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
        """Begin a pause: hold the training thread at the end of its current step, and return that step.

        Args:
            version: number of finished updates.
        """
        with self._changed:
            self._held, self._halted, self._limit = True, "", None
            if self._standing is not None:
                return self._standing
            return (version if self._passed is None else self._passed) + 1

    def stand_at(self, step: int, timeout_s: float) -> bool:
        """Let the training thread continue to the end of ``step``, and return whether it is paused there in time.

        A later step will do: in the first step of a job that resumes, only the training thread knows its number.
        """
        with self._changed:
            self._limit = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stands(step) or not self._held, timeout_s)
            return self._stands(step)

    def _stands(self, step: int) -> bool:
        return self._standing is not None and self._standing >= step

    def release(self) -> None:
        """End the pause."""
        with self._changed:
            self._held, self._limit = False, None
            self._changed.notify_all()

    def restart(self) -> None:
        """End the pause, and forget the steps: the training thread enters its loop again, perhaps at an earlier one."""
        with self._changed:
            self._held, self._halted, self._limit, self._passed = False, "", None, None
            self._changed.notify_all()

    def halt(self, text: str = HALTED) -> None:
        """Make a training thread that is paused, or will be, leave its loop by a ``ForcedStop`` with this text."""
        with self._changed:
            self._halted = text if self._held else ""
            self._changed.notify_all()
