"""A forked worker, as its launcher sees it: the methods of ``subprocess.Popen`` that launchers use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from ttp.launch.deaths import POLL_S
from ttp.launch.warm.waiting import readable

LOST = 1
"""Exit code of a worker whose own code is not known."""


class ForkedWorker:
    """A child of this process that ``Popen`` did not start.

    Args:
        pid: process id of the child.
        args: its command line.
    """

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, list(args)
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # the kernel, a sandbox or this Python has none
            self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    code = os.waitstatus_to_exitcode(status) if pid == self.pid else None
                except ChildProcessError:  # other code has reaped it
                    code = LOST
                if code is not None:
                    self.returncode = code
                    if self._pidfd is not None:
                        os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            pause_s = min(left_s, 1.0) if left_s is not None else 1.0
            if self._pidfd is None:
                time.sleep(min(pause_s, POLL_S))
            else:
                readable(self._pidfd, pause_s)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
