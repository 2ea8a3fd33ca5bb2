"""A queue whose ``get`` keeps its time limit, and whose ``put`` is safe in a signal handler.

The queues of the standard library lack one or the other:

- ``queue.SimpleQueue.get(timeout=...)`` of CPython 3.10 to 3.12 sometimes waits without a limit. If the limit passes
  at a wrong moment (the thread was not scheduled, a signal handler ran), the time left is negative, and the lock below
  takes a negative time as "for ever".
- ``queue.Queue.put`` takes a lock. A signal handler that calls it waits for ever if its own thread holds that lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """A queue that any thread or signal handler puts items into, and one thread takes them out of in order."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._filled = threading.Lock()  # unlocked if something was put since the reader last looked
        self._filled.acquire()

    def put(self, item: _T) -> None:
        """Add an item. Does not wait."""
        self._items.append(item)
        try:
            self._filled.release()
        except RuntimeError:  # already unlocked
            return

    def get(self, timeout: float | None = None) -> _T:
        """Remove and return the oldest item, waiting for one if there is none.

        Args:
            timeout: how long to wait, in seconds. Below zero: not at all; None: without a limit.

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
        """Remove and return the oldest item without waiting.

        Raises:
            queue.Empty: there is none.
        """
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Return whether the queue holds nothing."""
        return not self._items
