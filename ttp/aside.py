"""Work beside the threads that a processor or a launcher always has."""

from __future__ import annotations

import threading
from collections.abc import Callable


def aside(name: str, job: Callable[[], object]) -> threading.Thread:
    """Run a function that may block, on a thread of its own with this name. Return the thread.

    Raises:
        RuntimeError: no thread can be started.
    """
    thread = threading.Thread(target=job, name=name, daemon=True)
    thread.start()
    return thread


def aside_or_here(name: str, job: Callable[[], object]) -> None:
    """Run a function as ``aside`` does; where no thread can be started, run it here, and return when it is over."""
    try:
        aside(name, job)
    except RuntimeError:
        job()
