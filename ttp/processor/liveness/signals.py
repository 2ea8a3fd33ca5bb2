"""Reports SIGTERM as a fault, even while the main thread is blocked in C code.

A Python signal handler runs only when the main thread gets back to Python, which can take half an hour in a collective.
The C-level handler serves ``signal.set_wakeup_fd`` at once, so a reader thread learns of the signal in any case. There
is one such descriptor per process, and asyncio takes it for its own signals; then only the Python handler is left.

A forked child inherits both, but is not the rank: SIGTERM has to end it, and must not be reported by its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from ttp.aside import aside

log = logging.getLogger("ttp.processor")

LOOK_S = 1.0
NOTED_S = 0.5
"""Seconds within which the thread that reads the pipe answers."""

_HANDLED, _ASKED = b"\0", b"\xff"
"""What the Python handler, and who asks for signals, write into the pipe: no signal has these numbers."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

_installed: weakref.WeakSet[Preemption] = weakref.WeakSet()


def set_default(signum: signal.Signals) -> None:
    """Give a signal its default action, on any thread: Python allows that to the main thread only."""
    ctypes.PyDLL(None).signal(int(signum), ctypes.c_void_p(0))


def _forget_in_child() -> None:
    for preemption in tuple(_installed):
        preemption.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class Preemption:
    """Calls ``report`` on SIGTERM while it is installed.

    Args:
        report: called with what happened to the rank, a sentence without its subject, on a thread of its own.
        in_vain: waits up to so many seconds, and returns True if no controller has heard the report and none will. The
            process then ends by the signal as it would without ttp. None: it stays.
    """

    def __init__(self, report: Callable[[str], None], in_vain: Callable[[float], bool] | None = None) -> None:
        self._report, self._in_vain = report, in_vain
        self._read_fd = self._write_fd = -1
        self._previous: Handler = None
        self._previous_fd = -1
        self._installed = False
        self._came, self._answered = False, threading.Event()
        self.alone = False
        """True while a handler of the program is not called: it might raise in a thread that waits for the rescue."""

    def install(self) -> None:
        """Install the handler. Off the main thread that is impossible, which is logged."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "ttp was started outside the main thread and cannot handle SIGTERM: "
                "SIGTERM ends this process without saving first"
            )
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous = signal.signal(signal.SIGTERM, self._handle)  # last: alone it would swallow the signal
        self._installed = True
        _installed.add(self)
        aside("ttp-signals", self._listen)

    def program_ends(self) -> None:
        """Report that the main thread ends the program while another one trains. Signals do not end the wait."""
        self.alone = True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self.install()
        self._report("ended its program, but train() still runs on another thread")

    def came(self) -> bool:
        """Return whether SIGTERM has come, and was reported, even if only a handler installed over this one saw it."""
        if self._installed:
            self._answered.clear()
            with contextlib.suppress(OSError):
                os.write(self._write_fd, _ASKED)
                self._answered.wait(NOTED_S)  # the signals before have been reported then
        return self._installed and self._came

    def uninstall(self) -> None:
        """Restore the former handler of SIGTERM, unless another has been installed over this one."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = self.alone = False
        _installed.discard(self)
        if self._handles():
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # it may be closed by now
            signal.set_wakeup_fd(self._previous_fd if current == self._write_fd else current)
        with contextlib.suppress(OSError):
            os.close(self._write_fd)

    def forget(self) -> None:
        """Restore the former handler in a forked child, and close its copies of the pipe."""
        self.uninstall()
        with contextlib.suppress(OSError):
            os.close(self._read_fd)

    def _handles(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Replace the default action of SIGTERM. The user's handler still runs, unless ``alone``."""
        if self._installed:  # a handler that was installed over this one may call it later, too
            with contextlib.suppress(OSError):
                os.write(self._write_fd, _HANDLED)
        if callable(self._previous) and not self.alone:
            self._previous(signum, frame)

    def _listen(self) -> None:
        reported = False  # of a SIGTERM that was reported, the byte of the Python handler is still to come
        while data := os.read(self._read_fd, 1):
            if data == _ASKED:
                self._answered.set()
                continue
            if data == _HANDLED:
                if not reported:
                    self._tell()
                reported = False
                continue
            if self._previous_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._previous_fd, data)
            if data[0] == signal.SIGTERM:
                reported = True
                self._tell()
        os.close(self._read_fd)

    def _tell(self) -> None:
        self._report("was asked to end by SIGTERM (preemption, or a launcher that stops the job)")
        self._came = True
        if self._in_vain is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the process stays
                aside("ttp-preempted", functools.partial(self._end_if, self._in_vain))
            self._in_vain = None

    def _end_if(self, in_vain: Callable[[float], bool]) -> None:
        while not in_vain(LOOK_S):
            pass
        if self._installed and self._previous is signal.SIG_DFL and self._handles():
            log.error("no controller can order a save after SIGTERM: this process ends as it would without ttp")
            set_default(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
