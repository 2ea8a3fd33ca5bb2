"""Lets the ranks of a host watch each other in a ring: each rank watches the next living rank, by number.

Each rank has one watching thread, which sleeps in the kernel. When the watched rank dies or leaves, the thread watches
the next one; a nearer rank that starts later is found within a second. So every death is seen, even if several ranks
die at once, as long as one rank of the host is left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ttp.processor.liveness.sentinel import Watcher
from ttp.processor.liveness.sentinel_reader import (
    REASON,
    BadSentinelError,
    Owner,
    SentinelReader,
    State,
    look,
    ranks_in,
)

log = logging.getLogger("ttp.processor")

LOOK_S = 1.0
"""Seconds between two searches for a nearer rank. Each costs a directory listing and one open file."""

OnDeath = Callable[[int, str, str], None]
"""Called on the watching thread: rank, nonce of the process, what was seen in words. Must not block."""


class PeerWatcher:
    """Watches the next living rank of this host.

    A failure of any kind is logged once, and deaths are then seen by other means, as where there is no shared memory.

    Args:
        page_dir: the host's page directory, held by this process.
        rank: rank of this process, which does not watch itself.
        incarnation: incarnation of the job; ranks of another one are not watched.
        on_death: called once for each process that died.
        look_s: seconds between two searches for ranks that came later.
    """

    def __init__(self, page_dir: Path, rank: int, incarnation: int, on_death: OnDeath, look_s: float = LOOK_S) -> None:
        self._page_dir, self._rank, self._incarnation = page_dir, rank, incarnation
        self._on_death, self._look_s = on_death, look_s
        self._told: set[str] = set()
        self._noted: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-neighbours", daemon=True)
        self.watched: int | None = None

    def start(self) -> None:
        """Begin to watch."""
        with contextlib.suppress(RuntimeError):  # no thread can be started: deaths are seen by other means
            self._thread.start()

    def close(self) -> None:
        """Stop watching. The thread ends within ``look_s``."""
        self._over.set()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                following = self._following()
                if following is None:
                    self.watched = None
                    self._over.wait(self._look_s)
                else:
                    self._watch(following)
        except Exception as problem:
            log.debug("neighbours are not watched, their deaths will be seen later: %s", problem, exc_info=True)

    def _watch(self, following: SentinelReader) -> None:
        try:
            self.watched = following.owner.rank
            if following.wait(self._look_s) is State.DIED:
                self._tell(following.owner)
        except BadSentinelError as problem:
            self._note(following.owner.rank, str(problem))
        finally:
            following.close()

    def _following(self) -> SentinelReader | None:
        """Return a reader of the next living rank; None: there is none. Ranks before it that have died are reported."""
        ranks = [rank for rank in ranks_in(self._page_dir) if rank != self._rank]
        for rank in sorted(ranks, key=lambda r: (r < self._rank, r)):
            seen = look(self._page_dir, rank, Watcher.NEIGHBOUR)
            if isinstance(seen, str):
                self._note(rank, seen)
            elif self._lives(seen):
                return seen
            else:
                seen.close()
        return None

    def _lives(self, seen: SentinelReader) -> bool:
        if seen.owner.incarnation != self._incarnation:
            return False
        try:
            state = seen.state()
        except BadSentinelError as problem:
            self._note(seen.owner.rank, str(problem))
            return False
        if state is State.DIED:
            self._tell(seen.owner)
        return state is State.ALIVE

    def _tell(self, owner: Owner) -> None:
        if owner.nonce not in self._told and not self._over.is_set():
            self._told.add(owner.nonce)
            self._on_death(owner.rank, owner.nonce, REASON)

    def _note(self, rank: int, text: str) -> None:
        if self._noted.get(rank) != text:
            self._noted[rank] = text
            log.debug("rank %d is not watched by this one: %s", rank, text)
