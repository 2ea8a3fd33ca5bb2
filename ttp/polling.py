"""Waiting for something that nobody announces: look again and again, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def poll(look: Callable[[], _T], within_s: float, every_s: float) -> _T:
    """Call ``look`` until it returns something true: each ``every_s`` seconds, for ``within_s`` seconds, at least once.

    The first pauses are shorter, because much of what is waited for comes at once.

    Returns:
        What ``look`` returned last.
    """
    ends_s, pause_s = time.monotonic() + within_s, every_s / 16
    while not (found := look()) and time.monotonic() < ends_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, every_s)
    return found
