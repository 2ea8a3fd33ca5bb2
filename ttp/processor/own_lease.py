"""The lease of this process: its request that the launcher not stop it yet (see ``ttp.launch.leases``)."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ttp.launch.leases import Leases
from ttp.processor.serial_worker import SerialWorker

log = logging.getLogger("ttp.processor")

LEASE_S = 1.0
"""Seconds that a leaving process waits until its lease is removed."""


class OwnLease:
    """Asks the launcher not to stop this process, by files that a thread writes because their directory may block.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self.writer = SerialWorker("ttp-lease", at_once=True)
        """Also writes other small files in the same directory."""
        self._leases, self._pid = Leases(run_dir), os.getpid()

    def arm(self) -> None:
        """Note that a processor runs in this process. Waits for the directory."""
        self._leases.arm(self._pid)

    def disarm(self) -> None:
        """Note that no processor runs in this process, and that it needs no lease. Waits for the directory."""
        self._leases.disarm(self._pid)

    def hold(self, until: float) -> None:
        """Ask the launcher not to stop this process before ``until``, in monotonic seconds. Does not wait."""
        try:
            self.writer.submit(lambda: self._leases.grant(self._pid, until))
        except RuntimeError as problem:  # no thread can be started; the gate has to close all the same
            log.warning("the launcher may stop this process although it saves: %s", problem)

    def drop(self) -> None:
        """Tell the launcher that it may stop this process. Does not wait; raises RuntimeError as ``SerialWorker``."""
        self.writer.submit(lambda: self._leases.revoke(self._pid))

    def close(self) -> None:
        """Remove the lease when the process leaves the job in good order. Waits at most ``LEASE_S`` seconds."""
        with contextlib.suppress(RuntimeError):  # no thread can be started; the lease ends with the process
            self.writer.submit(self.disarm)
        self.writer.wait_done(LEASE_S)
        self.writer.close()
