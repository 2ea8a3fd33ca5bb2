"""Work beside the threads that a processor or a launcher always has."""

from __future__ import annotations

import threading
from collections.abc import Callable


def aside(name: str, job: Callable[[], object]) -> None:
    """Run a function that may block, on a thread of its own with this name.

    Raises:
        RuntimeError: no thread can be started.
    """
    threading.Thread(target=job, name=name, daemon=True).start()
