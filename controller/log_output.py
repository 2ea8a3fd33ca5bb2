"""The controller's log: which records are logged, and a thread that writes them, as a hanging disk must not stop the
rescue.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

from ttp.launch.log_format import FACTS, TEXT, formatter
from ttp.store.history import BEGINS

log = logging.getLogger("ttp.controller")

ALIKE_MAX = 16
"""Number of records of one kind that are logged in an incident, or between two incidents, of a launch.

In a large job thousands of ranks join, fail and leave alike.
"""
TEXT_MAX = 2000
"""Largest number of characters of a record's facts that are logged."""
LINES_MAX = 20_000
"""Most lines that may wait. Further lines are dropped, and the next line that is written says how many."""
FLUSH_S = 2.0
"""Seconds that the process waits at its end for queued lines to be written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class RecordLog:
    """Logs the records of the controller at level INFO: of each kind the first ``ALIKE_MAX``, the others at DEBUG.

    Answers to a freeze are logged at DEBUG, and two machines with one name at WARNING. The incident's file and watchers
    get every record.
    """

    def __init__(self) -> None:
        self._incident = ""
        self._counts: Counter[str] = Counter()

    def take(self, kind: str, incident: str, facts: Mapping[str, object], text: str) -> None:
        """Log a record.

        Args:
            kind: its kind.
            incident: id of the open incident; empty: none is open.
            facts: its facts.
            text: the facts as JSON.
        """
        if kind == BEGINS or incident != self._incident:
            self._incident, self._counts = incident, Counter()
        alike = f"{kind} {facts.get('evidence') or facts.get('code') or ''}".rstrip()
        self._counts[alike] += 1
        where, more = f"[{incident}] " if incident else "", self._counts[alike] - ALIKE_MAX
        normal = logging.WARNING if kind == "one_name" else logging.INFO
        level = logging.DEBUG if kind == "answer" or more > 0 else normal
        if log.isEnabledFor(level):
            shown = {"event": kind, "incident": incident, **facts}
            log.log(level, "%s%s %s", where, kind, text[:TEXT_MAX], extra={FACTS: shown})
        if more == 1 and kind != "answer":
            log.info("%s%s: more of these are logged at level DEBUG only", where, alike)


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
