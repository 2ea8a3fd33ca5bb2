"""A queue whose wait with a time limit ends.

``queue.SimpleQueue.get(timeout=...)`` of CPython 3.10 to 3.12 now and then waits without a limit. If the limit passes
at a wrong moment (the thread was not scheduled, a signal handler ran), the time that is left is negative, which means
"for ever" to what it calls. ``queue.Queue`` has no such fault, but its ``put`` takes a lock: a signal handler that puts
something into it waits for ever if its own thread holds that lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """Takes things from all threads and from signal handlers, for one thread that takes them out in order."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._filled = threading.Lock()  # open when something was put since the reader last looked
        self._filled.acquire()

    def put(self, item: _T) -> None:
        """Add an item. Does not wait."""
        self._items.append(item)
        try:
            self._filled.release()
        except RuntimeError:  # it is open
            return

    def get(self, timeout: float | None = None) -> _T:
        """The oldest item.

        Args:
            timeout: how long to wait for one, seconds; below zero: not at all; None: without a limit.

        Raises:
            queue.Empty: none came in time.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = -1.0 if ends is None else ends - time.monotonic()
            if (ends is not None and left <= 0.0) or not self._filled.acquire(timeout=left):
                return self.get_nowait()
        return self._items.popleft()

    def get_nowait(self) -> _T:
        """The oldest item.

        Raises:
            queue.Empty: there is none.
        """
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._items
