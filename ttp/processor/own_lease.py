"""The lease of this process, by which it asks its launcher not to stop it yet; see ``ttp.launch.leases``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ttp.launch.leases import Leases
from ttp.processor.serial_worker import SerialWorker

LEASE_S = 1.0
"""How long a process that leaves waits for its lease to be taken back."""


class OwnLease:
    """Asks the launcher not to stop this process. Files are written on a thread, as their directory may block.

    Args:
        run_dir: where processes of this host leave files for one another.
    """

    def __init__(self, run_dir: Path) -> None:
        self.writer = SerialWorker("ttp-lease")
        """For other small files in the same directory."""
        self._leases, self._pid = Leases(run_dir), os.getpid()

    def arm(self) -> None:
        """Note that a processor runs in this process. Waits for the directory."""
        self._leases.arm(self._pid)

    def disarm(self) -> None:
        """It does not join the job. Waits for the directory."""
        self._leases.disarm(self._pid)

    def hold(self, until: float) -> None:
        """Ask not to be stopped before ``until``, in seconds of ``time.monotonic()``."""
        self.writer.submit(lambda: self._leases.grant(self._pid, until))

    def drop(self) -> None:
        """Nothing has to be held back any more."""
        self.writer.submit(lambda: self._leases.revoke(self._pid))

    def close(self) -> None:
        """The process leaves the job in good order."""
        with contextlib.suppress(RuntimeError):  # no thread can be started: it ends with the process
            self.writer.submit(self.disarm)
        self.writer.wait_done(LEASE_S)
        self.writer.close()
