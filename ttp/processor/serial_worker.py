"""A thread that runs jobs one after the other, and that can be abandoned when one of them blocks.

Unlike the threads of a ``ThreadPoolExecutor`` it is a daemon, so a write that hangs in the kernel does not keep the
interpreter from ending.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("ttp.processor")


class SerialWorker:
    """Runs jobs one after the other on a thread. Jobs must not raise; the exception of a job that does is logged.

    Args:
        name: name of the threads.
        at_once: start a thread now. When a job comes, as in an incident, the system may allow no more threads.
    """

    def __init__(self, name: str, *, at_once: bool = False) -> None:
        self._name = name
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # any thread submits jobs: held for as long as a thread takes to start
        if at_once:
            with contextlib.suppress(RuntimeError):  # the first job tries again
                self._begin()

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job`` after the jobs before it.

        Raises:
            RuntimeError: no thread can be started now. The job is dropped; the next one tries again.
        """
        with self._lock:
            self._begin()
            self._jobs.put(job)

    def _begin(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def wait_done(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the jobs submitted so far. Returns False if they take longer."""
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                return True
            self._jobs.put(done.set)
        return done.wait(timeout_s)

    @property
    def busy(self) -> bool:
        """True while a job runs or waits to be run."""
        return self._thread is not None and self._jobs.unfinished_tasks > 0

    def leave_behind(self) -> None:
        """Abandon the jobs submitted so far. Later jobs run on a new thread."""
        with self._lock:
            self._jobs.put(None)
            self._jobs, self._thread = queue.Queue(), None

    def close(self) -> None:
        """Accept no more jobs. The thread ends after the jobs submitted so far."""
        self._jobs.put(None)


def _run(jobs: queue.Queue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            log.exception("a background job of the processor failed")
        jobs.task_done()
    jobs.task_done()
