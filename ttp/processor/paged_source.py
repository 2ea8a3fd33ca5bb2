"""Base class of adapters that keep rank-local state in pages, and whose steps go on after the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ttp.core.layout import Rank, Version
from ttp.processor.local_state.local_piece import Digests, Pages, collect
from ttp.processor.local_state.pages import PageWriter
from ttp.processor.source import Cancelled, StateSource

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

POST_STEP_S = 2.0
"""Seconds that a save waits for a schedule or a scaler after the update. A training thread that needs longer hangs."""
_POLL_S = 0.002


class PageCapture(Protocol):
    """Writes the page of a rank after each update."""

    on_written: Callable[[int, bool], None] | None

    def open_page(self, page: PageWriter) -> None:
        """Write to this page from now on."""

    def close(self) -> None:
        """Stop writing."""


class PagedSource(StateSource):
    """A source that opens the page of a rank, and reads the pages of its host.

    Args:
        capture: writes the rank-local state.
    """

    counts_bytes = True

    def __init__(self, capture: PageCapture) -> None:
        self._pages_of = capture
        self._processor: Processor | None = None
        self._page_dir: Path | None = None
        self._incarnation = 0

    @property
    def processor(self) -> Processor:
        """The processor of this rank. Not before the adapter is attached to it."""
        assert self._processor is not None
        return self._processor

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        """Open the page of this rank."""
        self._page_dir, self._incarnation = page_dir, incarnation
        self._pages_of.open_page(PageWriter(page_dir, rank, incarnation=incarnation))

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """See ``StateSource.watch_pages``."""
        self._pages_of.on_written = changed

    def close(self) -> None:
        """See ``StateSource.close``."""
        self._pages_of.close()

    @property
    def post_step_s(self) -> float:
        """Seconds that a save waits for the work that follows the update."""
        return POST_STEP_S

    def wait_post_step(self, cancelled: Callable[[], bool]) -> None:
        """Wait until the work after the update (scheduler) is done: a rank may be frozen just before that work.

        Gives up after ``post_step_s`` seconds.

        Raises:
            Cancelled: ``cancelled()`` became true.
        """
        begun = time.monotonic()
        while not self.post_step_done() and time.monotonic() < begun + self.post_step_s:
            if cancelled():
                raise Cancelled
            self.wrote(1)  # this wait must not look like hanging storage
            time.sleep(_POLL_S)

    def read_pages(self, ranks: Sequence[Rank], version: Version, digests: Digests | None = None) -> Pages:
        """Return the pages of these ranks, as they were at ``version``; for ``digests`` see ``collect``."""
        if self._page_dir is None:
            return Pages({}, (), dict.fromkeys(ranks, "this host has no rank-local pages"))
        return collect(self._page_dir, ranks, version, self._incarnation, digests)

    def wrote(self, count: int) -> None:
        """Count bytes that were written: the storage may be slow, but it does not hang."""
        self.processor.written += count
