"""Tells the launcher of a worker's death before the kernel has freed its memory; a thread for each worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ttp.processor.liveness.sentinel import Seat, process_start
from ttp.processor.liveness.sentinel_reader import SentinelReader, State, look
from ttp.processor.local_state.page_dir import SHARED_MEMORY, page_directories

logger = logging.getLogger("ttp.launch")

LOOK_S = 1.0
"""Seconds between two searches for a worker's sentinel; a thread that is not needed ends within them."""

NEIGHBOURS_FIRST_S = 0.003
"""Seconds for which the launcher leaves the news to a neighbour, which is woken at the same instant: a second report
would only take the processor from the first. If no other worker lives it does not wait."""

OnDeath = Callable[[int, int], None]
"""Called on a watching thread with rank and pid. Must not block."""


class SentinelWatch:
    """Watches the sentinels of the workers of this host, one group after the other; a thread for each worker.

    Workers are recognised by pid and start time, so nothing has to be known of their job. If a worker has no sentinel
    its thread looks in vain; ``WorkerWatch`` sees the end of the process in any case.

    Args:
        run_dir: run directory of the job on this host.
        shared_memory: where directories in memory are made.
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
        self.living: set[int] = set()
        """Workers whose sentinel is in place and shows that they live; each of them may watch another one."""

    def watch(self, workers: Mapping[int, int], on_death: OnDeath) -> None:
        """Watch these workers (pid by global rank) instead of the earlier ones."""
        self.close()
        self._over, self.living = threading.Event(), set()
        for rank, pid in workers.items():
            threading.Thread(
                target=self._run,
                args=(rank, pid, on_death, self._over, self.living),
                name=f"ttp-sentinel-{rank}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Report nothing from now on. The threads end within ``look_s``."""
        self._over.set()

    def _run(self, rank: int, pid: int, on_death: OnDeath, over: threading.Event, living: set[int]) -> None:
        try:
            start = process_start(pid)
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
            seen = look(directory, rank, Seat.LAUNCHER)
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
