"""Ends the process by order of the controller, from a thread: the main thread may be blocked for half an hour."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from ttp.errors import EXIT_BAD_CONFIG
from ttp.processor.last_words import leave_word

log = logging.getLogger("ttp.processor")

EXIT_S = 10.0
"""Seconds that the end of the process may take."""


def end_process(code: int, text: str, before_exit: Callable[[], None] | None, let_go: Callable[[], None]) -> None:
    """Exit, whatever blocks in this process. Does not return.

    Args:
        code: the exit code.
        text: for the log: which rank leaves, and why.
        before_exit: last function of the program; runs on a thread of its own, for half of ``EXIT_S`` at most. Not
            called where ``code`` is 0: that of MindSpore's client ends the process with 1.
        let_go: closes what others would wait for.
    """
    last_resort = threading.Timer(EXIT_S, os._exit, (code,))  # logs may be on the storage that hangs
    last_resort.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started: the timer below is left
        last_resort.start()
    with contextlib.suppress(OSError, ValueError):  # a driver that hangs may keep the interpreter lock
        signal.setitimer(signal.ITIMER_REAL, 2 * EXIT_S)
    log.warning("%s", text)
    try:
        if code == EXIT_BAD_CONFIG:
            leave_word(text)
        if before_exit is not None and code:
            _aside(before_exit, EXIT_S / 2)
        let_go()
        _aside(_flush, 0.5)  # the main thread may hold the lock of stdout
    except Exception:
        log.exception("an error while this process was ending; it exits all the same")
    finally:
        os._exit(code)


def _aside(job: Callable[[], None], patience_s: float) -> None:
    """Run a function on a thread of its own and wait for it for a bounded time."""
    thread = threading.Thread(target=job, name="ttp-exit", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: it is left out
        thread.start()
        thread.join(patience_s)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()
