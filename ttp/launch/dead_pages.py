"""Reads the rank-local pages of dead workers for the controller when no rank of this host is left to save them.

The page of a dead rank stays in the host's shared memory. Usually another rank of the host adds it to the checkpoint.
With one rank per host, or when all ranks of a host die together, only the launcher is left: it sends the pages to the
controller with the report of the death, so that savers on other hosts have them in time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from ttp.core.copy_messages import Mirror
from ttp.core.layout import Rank, Version
from ttp.launch.proc_files import start_of
from ttp.processor.local_state.mirror import PAGE_BYTES_MAX, VERSIONS_KEPT
from ttp.processor.local_state.page_dir import SHARED_MEMORY, page_directories
from ttp.processor.local_state.page_reader import newest_pages

logger = logging.getLogger("ttp.launch")


class DeadPages:
    """Reads the pages of one group of workers after the last of them has died. Thread safe.

    Args:
        run_dir: run directory of the job on this host.
        workers: pid by global rank.
        shared_memory: directory of the file system in memory (``/dev/shm``) that holds the page directories.
    """

    def __init__(self, run_dir: Path, workers: Mapping[int, int], shared_memory: Path = SHARED_MEMORY) -> None:
        self._run_dir, self._shared_memory = run_dir, shared_memory
        self._workers, self._starts = dict(workers), {pid: start_of(pid) for pid in workers.values()}
        self._living = set(workers)
        self._lock = threading.Lock()

    def after(self, rank: int, pid: int) -> list[Mirror]:
        """Note that a rank's process has died; return the pages of all workers if it was the last one. Never raises.

        Each rank has pages of its newest versions; one of them is the version that its peers have reached.
        """
        with self._lock:
            if rank not in self._living or pid != self._workers[rank]:
                return []  # reported before; or of an earlier process in this seat
            self._living.discard(rank)
            if self._living:
                return []
        try:
            return [page for r, pid in sorted(self._workers.items()) for page in self._read(r, pid)]
        except Exception as problem:  # the rescue goes on without them
            logger.warning("cannot send the rank-local state of dead ranks to another host: %s", problem)
            return []

    def _read(self, rank: int, pid: int) -> list[Mirror]:
        for directory in page_directories(self._run_dir, self._shared_memory):
            incarnation, pages = newest_pages(directory, rank, pid, VERSIONS_KEPT, self._starts[pid])
            fitting = [page for page in pages if len(page.data) <= PAGE_BYTES_MAX]
            if len(fitting) < len(pages):
                logger.warning(
                    "the rank-local page of rank %d is larger than %d bytes and is not sent", rank, PAGE_BYTES_MAX
                )
            if pages:
                return [Mirror(Rank(rank), Version(p.version), p.final, incarnation, p.data) for p in fitting]
        return []
