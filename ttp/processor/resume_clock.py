"""Limits the time from the checkpoint to the first update of a rank that goes on in its process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ttp.launch.again import Again

log = logging.getLogger("ttp")


class ResumeClock:
    """A clock that ends a rank which does not go on in time. Its mark, a file, shows the launcher that the rank does.

    Args:
        files: the launcher's files about ranks that go on.
        within_s: seconds that the rank has (``TTP_CONTINUE_S``).
        leave: ends this process; takes the reason.
    """

    def __init__(self, files: Again, within_s: float, leave: Callable[[str], object]) -> None:
        self._files, self.within_s, self._leave, self._pid = files, within_s, leave, os.getpid()
        self.started_at = time.monotonic()
        self.runs = False
        self._timer: threading.Timer | None = None

    def start(self, launch: int) -> None:
        """Start the clock for a rank of this launch; a clock that runs already is replaced."""
        self.started_at = time.monotonic()
        self._files.mark(self._pid, self.started_at + self.within_s, launch)
        if self._timer is not None:
            self._timer.cancel()  # another rank died before the first update
        self._timer = threading.Timer(self.within_s, self._leave, (f"it did not go on within {self.within_s:g} s",))
        self._timer.daemon = self.runs = True
        self._timer.start()

    def stop(self) -> None:
        """Stop the clock, if it runs, and remove the mark."""
        self.runs = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if not self._files.unmark(self._pid):  # the launcher would kill it when its time is over
                self._leave("its mark for the launcher cannot be removed")
            log.info("training goes on in this process, %.3f s after the checkpoint", self.elapsed_s())

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was started."""
        return time.monotonic() - self.started_at
