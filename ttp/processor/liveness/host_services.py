"""Owns what a rank shares in its host's memory: its page, its sentinel, and kept pages of ranks of other hosts."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core.copy_messages import Keep, MirrorTo
from ttp.core.layout import Rank
from ttp.processor.liveness import stacks
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel import Sentinel
from ttp.processor.local_state.mirror import KeptPages, PageMirror
from ttp.processor.local_state.page_dir import PageDirectory
from ttp.processor.local_state.page_file import page_name
from ttp.processor.local_state.page_sender import PageSender
from ttp.processor.serial_worker import SerialWorker
from ttp.processor.source import StateSource

log = logging.getLogger("ttp.processor")

STORE_S = 2.0
"""Seconds that the sender of a page waits until it is stored."""


class HostServices:
    """Opens and closes the page, the sentinel and the watchers of this rank.

    Args:
        config: the job's settings.
        env: identity of this rank.
        nonce: random id of this process.
        died: called on any thread when a neighbour has died: rank, nonce, what happened.
    """

    def __init__(self, config: Config, env: RankEnv, *, nonce: str, died: Callable[[int, str, str], None]) -> None:
        self._config, self._env, self._run_dir, self._nonce = config, env, config.resolved_run_dir(), nonce
        self._died = died
        self._sender = PageSender(Rank(env.rank), config.token, env.run_id)
        self.pages: PageDirectory | None = None
        self._incarnation = 0
        self._page: Path | None = None
        """The page, if the source has made one."""
        self._making = threading.Lock()
        self._kept: KeptPages | None = None
        self._keeper = SerialWorker("ttp-keeper")
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._keeper.close)

    def show_stacks(self) -> None:
        """Let other processes of this host ask for the stacks of this one."""
        if self._config.stacks and stacks.install(self._run_dir):
            self._stack.callback(stacks.uninstall, self._run_dir)

    def begin(self, source: StateSource, incarnation: int) -> Path:
        """Make this rank's page and its sentinel, and watch the next rank of the host.

        Returns:
            The directory of pages of this host.

        Raises:
            OSError: there is no place for pages.
        """
        rank, self._incarnation = self._env.rank, incarnation
        self.pages = PageDirectory(self._run_dir, self._env, self._config.port or 0, host=self._config.host)
        path = self.pages.path
        source.on_welcome(Rank(rank), incarnation, path)
        self._note_page(path)
        sentinel = Sentinel(path, rank, self._nonce, incarnation)
        self._stack.callback(sentinel.close)
        neighbours = PeerWatcher(path, rank, incarnation, self._died)
        self._stack.callback(neighbours.close)
        neighbours.start()
        self._kept = KeptPages(path, rank, incarnation)
        self._stack.callback(self._kept.close)
        if self._config.mirror:
            self._stack.callback(self._sender.close)
            try:
                mirror = PageMirror(path, rank, incarnation, self._sender.send)
            except RuntimeError as problem:
                log.warning("the rank-local state of rank %s is not mirrored to another host: %s", rank, problem)
            else:
                self._stack.callback(mirror.close)
                source.watch_pages(mirror.changed)
        return path

    def look_after(self, source: StateSource) -> None:
        """Make this rank's page again if it was removed: its next version is then kept as before."""
        with self._making:
            page, pages = self._page, self.pages
            try:
                if pages is None or page is None or page.exists():
                    return
                log.warning("%s was removed by another program: it is made again, but lacks the versions so far", page)
                pages.renew()
                source.on_welcome(Rank(self._env.rank), self._incarnation, page.parent)
                self._note_page(page.parent)
            except Exception as problem:  # of the system, or of the adapter
                self._page = None  # once is enough
                log.warning("the page of this rank cannot be made again: %s", problem)

    def _note_page(self, directory: Path) -> None:
        page = directory / page_name(self._env.rank)
        self._page = page if page.exists() else None

    def store(self, order: Keep) -> None:
        """Write the page of another host's rank to memory. Does not wait. Any thread."""
        self._keeper.submit(lambda: self._store(order))

    def keep(self, order: Keep) -> str:
        """Like ``store``, but waits, and returns the reason if the page is not kept. Any thread."""
        refused = [f"it was not stored within {STORE_S:g} s"]
        self._keeper.submit(lambda: refused.append(self._store(order)))
        self._keeper.wait_done(STORE_S)
        return refused[-1]

    def _store(self, order: Keep) -> str:
        return self._kept.store(order) if self._kept is not None else "this rank has not joined yet"

    def mirror_to(self, order: MirrorTo) -> None:
        """Send the pages of this rank from now on to the keeper that the order names."""
        self._sender.named(order)

    def wait_stored(self, timeout_s: float) -> bool:
        """Wait until the pages that have arrived are in memory. Returns False after ``timeout_s`` seconds."""
        return self._keeper.wait_done(timeout_s)

    def leave(self) -> None:
        """Close the sentinel in good order, stop all that ``begin`` has started, and keep no more pages."""
        with self._making:
            self._page = None
        with contextlib.suppress(Exception):
            self._stack.close()

    def close(self) -> None:
        """Remove the page."""
        if self.pages is not None:
            self.pages.close()
