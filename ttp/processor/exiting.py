"""Ends the process on the controller's order, from a thread: the main thread may be blocked for half an hour."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable

from ttp.aside import aside
from ttp.errors import EXIT_BAD_CONFIG
from ttp.processor.last_words import leave_word
from ttp.processor.liveness.signals import set_default

log = logging.getLogger("ttp.processor")

EXIT_S = 10.0
"""Seconds within which the process has to end."""


def end_process(code: int, text: str, before_exit: Callable[[], None] | None, let_go: Callable[[], None]) -> None:
    """Exit within ``EXIT_S`` seconds even if threads of this process are blocked. Does not return.

    Args:
        code: the exit code.
        text: for the log: which rank leaves, and why.
        before_exit: a function of the program to call first, on a thread of its own, for at most half of ``EXIT_S``.
            Not called if ``code`` is 0, because MindSpore's client would end the process with 1.
        let_go: closes the stream and the files that other processes wait for.
    """
    last_resort = threading.Timer(EXIT_S, os._exit, (code,))  # writing the log may hang with the storage
    last_resort.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started: the signal below remains
        last_resort.start()
    with contextlib.suppress(OSError, ValueError):  # a driver that hangs may keep the interpreter lock
        set_default(signal.SIGALRM)  # a handler of the program would need that lock
        signal.setitimer(signal.ITIMER_REAL, 2 * EXIT_S)
    log.warning("%s", text)
    try:
        if code == EXIT_BAD_CONFIG:
            leave_word(text)
        if before_exit is not None and code:
            _within(before_exit, EXIT_S / 2)
        let_go()
        _within(_flush, 0.5)  # the main thread may hold the lock of stdout
    except Exception:
        log.exception("an error while this process was ending; it exits all the same")
    finally:
        with contextlib.suppress(Exception):
            for helper in multiprocessing.active_children():
                if helper.daemon:  # as the interpreter does at its end, which does not come
                    helper.terminate()
        os._exit(code)


def _within(job: Callable[[], None], patience_s: float) -> None:
    """Run a function on a thread of its own, and wait at most ``patience_s`` seconds for it."""
    with contextlib.suppress(RuntimeError):  # no thread can be started: the function is not called
        aside("ttp-exit", job).join(patience_s)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()
