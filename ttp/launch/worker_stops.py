"""Waits for workers that save, and stops or kills workers, on one host."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from subprocess import Popen
from typing import Any

from ttp.launch.again import Again
from ttp.launch.hold import FIRST_LEASE_S, Hold, HoldDecision, WorkersNow
from ttp.launch.leases import Leases, worker_of
from ttp.launch.proc_files import status_of
from ttp.launch.worker_watch import WorkerWatch

logger = logging.getLogger("ttp.launch")

Workers = Mapping[int, Popen[Any]]
"""Worker processes by global rank; each leads its own process group."""

LOOK_S = 0.01
TELL_S = 1.0
"""Seconds of waiting that are not worth a line: most ranks have saved by then, and only leave."""
GRACE_S = 30.0
"""Seconds that torch leaves a worker between SIGTERM and SIGKILL."""


class WorkerStops:
    """Ends workers, but lets those that save finish.

    Args:
        leases: the leases of this host.
        again: the marks of ranks that go on in their processes.
        watch: reports deaths, except those that are expected.
        patience_s: the longest time to wait for workers that save, in seconds (``TTP_OT``).
    """

    def __init__(self, leases: Leases, again: Again, watch: WorkerWatch, patience_s: float) -> None:
        self._leases, self._again, self._watch, self._patience_s = leases, again, watch, patience_s

    def hold(self, workers: Workers) -> bool:
        """Wait, after a worker failed or before a restart, until the survivors may be stopped.

        Survivors that are armed but take no lease get SIGTERM, which a processor understands as "save now".

        Returns:
            True if the survivors go on in their processes instead, so that only the dead workers have to be started.
        """
        verdict = self._wait(workers, Hold(time.monotonic(), self._patience_s, FIRST_LEASE_S))
        if verdict is HoldDecision.STOP and self._armed(workers):
            logger.warning("no rank saves, or has begun to within %.0f s: sending SIGTERM to all", FIRST_LEASE_S)
            self.stop(workers, signal.SIGTERM, GRACE_S)
        return verdict is HoldDecision.AGAIN

    def stop_going_on(self, workers: Workers, why: str) -> None:
        """Kill the workers that were released to go on: all workers are started anew.

        Nothing is lost, because these workers have begun no update since the checkpoint.

        Args:
            workers: worker processes by global rank.
            why: reason for the log; empty: it was logged before.
        """
        if why:
            logger.warning("ranks do not go on in their processes: %s", why)
        self._send(self._again.marks(), signal.SIGKILL, workers)

    def stop(self, workers: Workers, how: signal.Signals, grace_s: float) -> None:
        """Ask the workers to save and wait while they do; kill armed ones that neither save nor leave.

        Does nothing if no worker is armed.

        Args:
            workers: worker processes by global rank.
            how: the operator's signal. Programs know SIGINT, ranks save on SIGTERM: they get SIGTERM for any other.
            grace_s: seconds to wait for a worker that holds no lease.
        """
        if not self._armed(workers):
            return
        asked = signal.SIGINT if how == signal.SIGINT else signal.SIGTERM
        if asked is signal.SIGINT and not all(_ignores(pid, asked) for pid in self._armed(workers)):
            logger.warning("Ctrl-C (SIGINT) saves nothing: to stop a job with a save, send SIGTERM to its launcher")
        self._send(_alive(workers), asked, workers)
        verdict = self._wait(workers, Hold(time.monotonic(), self._patience_s, grace_s))
        if verdict in (HoldDecision.STOP, HoldDecision.OUT_OF_PATIENCE):
            self._send(self._armed(workers), signal.SIGKILL, workers)

    def expect(self, workers: Workers) -> None:
        """Do not report the deaths of these workers: the launcher stops them now."""
        self._watch.expect(_alive(workers))

    def _wait(self, workers: Workers, hold: Hold) -> HoldDecision:
        told, began = False, time.monotonic()
        while True:
            verdict = hold.look(time.monotonic(), self._scene(workers))
            if verdict is HoldDecision.KILL_HUNG:
                logger.warning("killing %s: hung while the others saved and left", _names(workers, hold.hung))
                self._send(hold.hung, signal.SIGKILL, workers)
            elif verdict is not HoldDecision.WAIT:
                break
            elif not told and time.monotonic() - began > TELL_S:
                told = True
                logger.info("waiting up to %.0f s for ranks that save", self._patience_s)
            time.sleep(LOOK_S)
        if verdict is HoldDecision.OUT_OF_PATIENCE:
            logger.error(
                "%s did not finish saving within TTP_OT=%.0f s", _names(workers, _alive(workers)), self._patience_s
            )
        return verdict

    def _scene(self, workers: Workers) -> WorkersNow:
        exits, leases = {worker.pid: worker.poll() for worker in workers.values()}, self._leases.deadlines()
        return WorkersNow(
            alive=frozenset(pid for pid, code in exits.items() if code is None),
            exits={pid: code for pid, code in exits.items() if code is not None},
            armed=frozenset(worker_of(pid, exits) for pid in self._leases.armed()),
            deadlines={worker_of(pid, exits): until for pid, until in sorted(leases.items(), key=itemgetter(1))},
            again=self._again.marks(),
        )

    def _armed(self, workers: Workers) -> set[int]:
        alive = _alive(workers)
        return alive & {worker_of(pid, alive) for pid in self._leases.armed()}

    def _send(self, pids: Iterable[int], how: signal.Signals, workers: Workers) -> None:
        self._watch.expect(pids)
        alive, armed = _alive(workers), self._leases.armed()
        for pid in alive & set(pids):
            ranks = [rank for rank in armed - {pid} if worker_of(rank, alive) == pid]
            # The pid of a rank that was killed may be that of another process below an armed worker now.
            if not ranks or pid in armed or how is signal.SIGKILL:
                _kill(os.killpg, pid, how)
            for rank in ranks:  # of a shell script, which would end at once, before its rank has saved
                _kill(os.kill, rank, how)


def _alive(workers: Workers) -> set[int]:
    return {worker.pid for worker in workers.values() if worker.poll() is None}


def _kill(send: Callable[[int, int], None], pid: int, how: signal.Signals) -> None:
    deaf = how is signal.SIGINT and _ignores(pid, how)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGTERM if deaf else how)


def _ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal: shells make their background processes ignore Ctrl-C."""
    try:
        ignored = int(status_of(pid).get("SigIgn", "0"), 16)
    except OSError:
        return False
    return bool(ignored >> (number - 1) & 1)


def _names(workers: Workers, pids: Iterable[int]) -> str:
    wanted = set(pids)
    ranks = sorted(rank for rank, worker in workers.items() if worker.pid in wanted)
    return ", ".join(f"rank {rank}" for rank in ranks)
