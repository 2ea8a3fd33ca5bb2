"""Waiting for something that nobody announces: look again and again, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def poll(look: Callable[[], _T], within_s: float, every_s: float) -> _T:
    """Call ``look`` until it returns something true: each ``every_s`` seconds, for ``within_s`` seconds, at least once.

    Returns:
        What ``look`` returned last.
    """
    ends_s = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < ends_s:
        time.sleep(every_s)
    return found
