"""Holds signals back while a launcher does what a signal must not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def later() -> Iterator[None]:
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
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
