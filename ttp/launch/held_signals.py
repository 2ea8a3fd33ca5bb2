"""Signals to a launcher: some are held back while it does what they must not interrupt, others may repeat."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger("ttp.launch")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def obey(stop: Callable[[], object], interruption: Any) -> None:
    """Stop workers after a signal. Batch systems repeat SIGTERM; only a second Ctrl-C ends the wait for saves.

    Args:
        stop: stops the workers; called again when a signal has interrupted it.
        interruption: class of the exception that the launcher's handlers raise; ``sigval`` is the signal.
    """
    while True:
        try:
            stop()
            return
        except interruption as again:
            if again.sigval == signal.SIGINT:
                logger.warning("interrupted again: not waiting for ranks that save")
                return


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Call the handlers of ``SIGNALS`` after the block: a started process must be recorded, a stopped one waited for.

    Of several signals only the first counts. Outside of the main thread, where no handler runs, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    held = [True]

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            came.append(number)
        else:  # it came while the handlers were put back
            before[number](number, frame)

    try:
        for how in SIGNALS:
            handler = signal.getsignal(how)
            if callable(handler):
                before[how] = handler
                signal.signal(how, hold)
        yield
    finally:
        held.clear()
        left, raised = list(before.items()), list[BaseException]()
        while left:
            try:
                while left:
                    signal.signal(*left[0])
                    del left[0]
            except BaseException as problem:  # a handler that is back was called: the others have to come back too
                raised.append(problem)
        if came:
            signal.raise_signal(came[0])
        if raised:
            raise raised[0]
