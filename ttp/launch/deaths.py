"""Notices at once that a child process has ended, and leaves its exit status to ``subprocess.Popen``."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from subprocess import Popen
from typing import Any

from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED

ORDERLY_EXITS = frozenset({EXIT_TRAINED, EXIT_NOT_SAVED, EXIT_SAVED})
"""Exit codes that are no fault: trained to the end, or released by the controller."""

SIGKILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
"""Exit codes of a process killed by SIGKILL: as ``Popen`` reports it, and as a shell around the process reports it."""

POLL_S = 0.01
"""Seconds between two checks where the kernel has no pidfd (before Linux 5.3, some sandboxes)."""


class DeathWatch:
    """Waits for the first of some child processes to end.

    A pidfd becomes readable when its process has ended; ``waitid`` with ``WNOWAIT`` then reads the status and leaves it
    for ``Popen``. Not thread safe.

    Args:
        children: child processes by any key, e.g. the global rank.
    """

    def __init__(self, children: Mapping[int, Popen[Any]]) -> None:
        self._children = dict(children)
        self._poller = select.poll()
        self._descriptors: dict[int, int] = {}
        for key, child in children.items():
            with contextlib.suppress(AttributeError, OSError):  # it was reaped already, or the kernel has no pidfd
                self._descriptors[key] = os.pidfd_open(child.pid)
                self._poller.register(self._descriptors[key], select.POLLIN)

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait up to ``timeout_s`` seconds until a child ends.

        Returns:
            Key -> exit code (negative: killed by that signal) of the children that ended since the last call.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self._collect()
            left_s = deadline_s - time.monotonic()
            if ended or left_s <= 0:
                return ended
            kernel_tells = len(self._descriptors) == len(self._children)
            self._poller.poll(1000 * (left_s if kernel_tells else min(POLL_S, left_s)))

    def close(self) -> None:
        """Close the descriptors. ``wait`` reports nothing from now on."""
        for key in list(self._children):
            self._forget(key)

    def _collect(self) -> dict[int, int]:
        ended: dict[int, int] = {}
        for key, child in list(self._children.items()):
            code = exit_code(child)
            if code is not None:
                ended[key] = code
                self._forget(key)
        return ended

    def _forget(self, key: int) -> None:
        del self._children[key]
        descriptor = self._descriptors.pop(key, None)
        if descriptor is not None:
            self._poller.unregister(descriptor)
            os.close(descriptor)


def exit_code(child: Popen[Any]) -> int | None:
    """Return the exit code of ``child``, as in ``Popen.returncode``; None while it runs. Does not reap it."""
    if child.returncode is not None:
        return int(child.returncode)
    try:
        status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # another thread is just reaping it
        return child.poll()
    if status is None:
        return None
    return int(status.si_status) if status.si_code == os.CLD_EXITED else -int(status.si_status)


def describe_exit(code: int, why: str = "") -> str:
    """Return ``killed by signal 9 (SIGKILL)`` or ``exited with code 1``, followed by ``: why`` if that is given."""
    reason = f": {why}" if why else ""
    if code >= 0:
        return f"exited with code {code}{reason}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name}){reason}"
    except ValueError:
        return f"killed by signal {-code}{reason}"
