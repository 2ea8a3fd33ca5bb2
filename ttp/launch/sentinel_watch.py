"""Watches the sentinels of workers, so that the launcher learns of a death before the kernel has freed the memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ttp.aside import aside
from ttp.launch.proc_files import start_of
from ttp.processor.liveness.sentinel import Watcher
from ttp.processor.liveness.sentinel_reader import BadSentinelError, SentinelReader, State, look
from ttp.processor.local_state.page_dir import SHARED_MEMORY, page_directories

logger = logging.getLogger("ttp.launch")

LOOK_S = 1.0
"""Seconds between two searches for a worker's sentinel, and at most until a thread that is not needed has ended."""

NEIGHBOURS_FIRST_S = 0.003
"""Seconds by which the launcher delays its report of a death while another worker lives. That neighbour is woken at the
same instant and reports the death; a second report would only take CPU time from the first."""

OnDeath = Callable[[int, int], None]
"""Called on a watching thread with rank and pid of a dead worker. Must not block."""


class SentinelWatch:
    """Watches the sentinels of one group of workers after the other, with one thread per worker.

    A worker's sentinel is recognised by pid and start time. If a worker has no sentinel, its thread searches without
    result; ``WorkerWatch`` sees the end of the process in any case.

    Args:
        run_dir: run directory of the job on this host.
        shared_memory: directory of the file system in memory (``/dev/shm``) that holds the sentinels.
        look_s: see ``LOOK_S``.
        neighbours_first_s: see ``NEIGHBOURS_FIRST_S``.
    """

    def __init__(
        self,
        run_dir: Path,
        shared_memory: Path = SHARED_MEMORY,
        look_s: float = LOOK_S,
        neighbours_first_s: float = NEIGHBOURS_FIRST_S,
    ) -> None:
        self._run_dir, self._shared_memory, self._look_s = run_dir, shared_memory, look_s
        self._neighbours_first_s = neighbours_first_s
        self._over = threading.Event()
        self._starts: dict[int, int] = {}  # of the workers, by pid; 0: not known
        self.living: set[int] = set()
        """Ranks whose sentinel shows that they live. Each of them may report the death of another rank."""

    def watch(self, workers: Mapping[int, int], on_death: OnDeath) -> None:
        """Watch these workers (pid by global rank) instead of the earlier ones."""
        self.close()
        self._over, self.living = threading.Event(), set()
        self._starts = {pid: start_of(pid) for pid in workers.values()}
        for rank, pid in workers.items():
            run = functools.partial(self._run, rank, pid, self._starts[pid], on_death, self._over, self.living)
            with contextlib.suppress(RuntimeError):  # no room for another thread: there are other witnesses
                aside(f"ttp-sentinel-{rank}", run)

    def shows_death(self, rank: int, pid: int) -> bool:
        """Return whether a worker that has ended did not leave in good order, as far as its sentinel shows that."""
        for directory in page_directories(self._run_dir, self._shared_memory):
            seen = look(directory, rank, Watcher.LAUNCHER)
            if not isinstance(seen, str):
                with contextlib.closing(seen), contextlib.suppress(BadSentinelError):
                    same = seen.owner.pid == pid and self._starts.get(pid, 0) in (0, seen.owner.start)
                    if same and seen.state() is State.DIED:
                        return True
        return False

    def close(self) -> None:
        """Report nothing from now on. The threads end within ``look_s``."""
        self._over.set()

    def _run(self, rank: int, pid: int, start: int, on_death: OnDeath, over: threading.Event, living: set[int]) -> None:
        """Watch one worker until it dies or ``over`` is set."""
        try:
            while not over.is_set():
                if self._saw_death(rank, pid, start, over, living):
                    if not (living and over.wait(self._neighbours_first_s)):
                        on_death(rank, pid)
                    return
                over.wait(self._look_s)
        except Exception as problem:
            logger.debug("rank %d has no sentinel to watch, its end is seen by other means: %s", rank, problem)

    def _saw_death(self, rank: int, pid: int, start: int, over: threading.Event, living: set[int]) -> bool:
        """Look for the worker's sentinel and watch it to its end. Returns True if the worker died."""
        for directory in page_directories(self._run_dir, self._shared_memory):
            seen = look(directory, rank, Watcher.LAUNCHER)
            if isinstance(seen, str):
                continue
            try:
                if (seen.owner.pid, seen.owner.start) == (pid, start):
                    living.add(rank)
                    return self._died(seen, over)
            finally:
                living.discard(rank)
                seen.close()
        return False

    def _died(self, seen: SentinelReader, over: threading.Event) -> bool:
        state = State.ALIVE
        while state is State.ALIVE and not over.is_set():
            state = seen.wait(self._look_s)
        return state is State.DIED and not over.is_set()
