"""Reports a dead worker to the controller at once, from a thread of the launcher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from subprocess import Popen
from typing import Any, Protocol

from ttp.launch.deaths import ORDERLY_EXITS, SIGKILLED, DeathWatch, describe_exit
from ttp.launch.oom import OomWatch

logger = logging.getLogger("ttp.launch")

TURN_S = 0.2
"""How soon the thread notices new workers; those that died before are seen then."""


class Reporter(Protocol):
    """Gets the reports. Must neither block nor raise."""

    def exited(self, rank: int, pid: int, reason: str, code: int = 0) -> None:
        """``rank``, process ``pid``, ended for ``reason``, with this exit code (0: not known)."""


class WorkerWatch:
    """Watches the workers of this host, one group after the other.

    An orderly exit (0, 75, 70) is not reported, nor is the death of a worker that the launcher itself stops.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[dict[int, Popen[Any]], Reporter] | None = None
        self._expected: set[int] = set()
        self._oom = OomWatch()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-worker-watch", daemon=True)
        self._thread.start()

    def watch(self, workers: Mapping[int, Popen[Any]], reporter: Reporter) -> None:
        """Watch these workers (by global rank) instead of the earlier ones."""
        oom = OomWatch(worker.pid for worker in workers.values())
        with self._lock:
            self._next = (dict(workers), reporter)
            self._oom = oom
            self._expected = set()

    def expect(self, pids: Iterable[int]) -> None:
        """Report no deaths of these workers: the launcher is about to stop them."""
        with self._lock:
            self._expected.update(pids)

    def expects(self, pid: int) -> bool:
        """Whether ``expect`` was called for this worker."""
        with self._lock:
            return pid in self._expected

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        watch = DeathWatch({})
        workers: dict[int, Popen[Any]] = {}
        reporter: Reporter | None = None
        while not self._over.is_set():
            try:
                with self._lock:
                    fresh, self._next = self._next, None
                if fresh is not None:
                    watch.close()
                    workers, reporter = fresh
                    watch = DeathWatch(workers)
                for rank, code in watch.wait(TURN_S).items():
                    if reporter is not None:
                        self._tell(reporter, rank, workers[rank].pid, code)
            except Exception:
                logger.exception("cannot watch the workers; their deaths are noticed by other means")
                return
        watch.close()

    def _tell(self, reporter: Reporter, rank: int, pid: int, code: int) -> None:
        if code in ORDERLY_EXITS or self.expects(pid):
            return
        reason = describe_exit(code, self._oom.explain(pid) if code in SIGKILLED else "")
        reporter.exited(rank, pid, reason, code)
        logger.warning("rank %d (pid %d): %s", rank, pid, reason)
