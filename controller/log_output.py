"""Writes the controller's log on a thread of its own: a hanging disk must not stop the rescue."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

from ttp.launch.log_format import TEXT, formatter

LINES_MAX = 20_000
"""Most lines that may wait. Further lines are dropped, and the next line that is written says how many."""
FLUSH_S = 2.0
"""Seconds that the process waits at its end for queued lines to be written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _Lossy(QueueHandler):
    """Puts records into a bounded queue without blocking, and counts the records that it drops."""

    lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.lost += 1
            return
        if self.lost:
            record.msg = f"{record.msg} ({self.lost} lines before this one were dropped: the log is written too slowly)"
            self.lost = 0


@contextmanager
def written_aside(level: str, stream: TextIO | None = None, kind: str = TEXT) -> Iterator[None]:
    """Write log records to ``stream`` on a thread while the context is open. Does nothing if logging is configured.

    Args:
        level: level of the root logger.
        stream: the stream; None: standard error.
        kind: kind of format; see ``formatter``.
    """
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(formatter(kind, FORMAT))
    handler = _Lossy(queue.Queue(LINES_MAX))
    listener = QueueListener(handler.queue, output)
    root.setLevel(level)
    root.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        end = threading.Thread(target=listener.stop, daemon=True)
        end.start()
        end.join(FLUSH_S)
