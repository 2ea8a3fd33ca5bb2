"""Waits until other threads and processes have done something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(
    condition: Callable[[], Any],
    timeout_s: float = 60.0,
    story: Callable[[], object] = lambda: "did not come true in time",
    every_s: float = 0.005,
) -> Any:
    """Wait until ``condition`` returns a true value, and return it.

    It is asked every ``every_s`` at first, and less often the longer it takes, at last every 50 ms: to ask a controller
    takes it and this process milliseconds of the CPU each time.

    Raises:
        AssertionError: with ``story``, if it does not come in time.
    """
    begun = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - begun
        assert waited < timeout_s, story()
        time.sleep(max(every_s, min(waited / 20, 0.05)))
    return found


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if nobody has waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
