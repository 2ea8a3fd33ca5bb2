"""Keeps rank-local pages on another host, so that random streams survive the loss of a whole host.

``PageMirror`` runs in the rank that a page belongs to. It reads the page back after each write, and hands it over to be
sent, while training goes on. If it falls behind, it leaves out pages that are too old to be asked for.

``KeptPages`` runs in a rank of another host. It writes what arrives as a page like any other, but in a directory of its
own. So it can never overwrite a page of a process of its own host, and such a page is always preferred.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ttp.core.copy_messages import Keep
from ttp.processor.local_state.pages import Page, PageWriter, page_name, read_page

log = logging.getLogger("ttp.processor")

HandOver = Callable[[int, bool, int, bytes], None]
"""Function that takes version, final, incarnation and the bytes of a page."""

PAGE_BYTES_MAX = 8 << 20
"""Maximum size in bytes of a page that is mirrored: it is sent with every step."""

VERSIONS_KEPT = 2
"""Number of versions of a page that are kept; ranks of a job differ by at most one version."""


class PageMirror:
    """Sends the page of this rank whenever it has changed, on a thread of its own.

    Args:
        page_dir: the host's page directory.
        rank: this rank.
        incarnation: launch of the job.
        hand_over: sends a page; may block, and changes are gathered meanwhile.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, page_dir: Path, rank: int, incarnation: int, hand_over: HandOver) -> None:
        self._page_dir, self._rank, self._incarnation = page_dir, rank, incarnation
        self._hand_over = hand_over
        self._changed: dict[int, bool] = {}
        self._wake = threading.Event()
        self._closed = False
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="ttp-mirror", daemon=True)
        self._thread.start()

    def changed(self, version: int, final: bool) -> None:
        """Note that the page of ``version`` was written. For the training thread: one store and one wake-up."""
        self._changed[version] = final
        self._wake.set()

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            versions = sorted(self._changed)
            for version in versions:
                self._changed.pop(version)
                if not self._closed and version > versions[-1] - VERSIONS_KEPT:
                    self._mirror(version)

    def _mirror(self, version: int) -> None:
        try:
            page = read_page(self._page_dir, self._rank, version, self._incarnation)
            if isinstance(page, str):
                log.debug("not mirrored: %s", page)  # it was written again already: that page follows
            elif len(page.data) > PAGE_BYTES_MAX:
                self._complain(f"it has {len(page.data)} bytes, more than {PAGE_BYTES_MAX}")
            else:
                self._hand_over(page.version, page.final, self._incarnation, page.data)
        except Exception as problem:
            self._complain(repr(problem))

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("the rank-local state of rank %s is not mirrored to another host: %s", self._rank, reason)


class KeptPages:
    """Pages of ranks of other hosts that this rank keeps. Thread safe.

    Args:
        page_dir: the host's page directory.
        rank: this rank.
        incarnation: launch of the job; pages of another one are refused.
    """

    def __init__(self, page_dir: Path, rank: int, incarnation: int) -> None:
        self._directory = kept_directory(page_dir)
        self._rank, self._incarnation = rank, incarnation
        self._writers: dict[int, PageWriter] = {}
        self._newest: dict[int, tuple[int, bool]] = {}
        self._lock = threading.Lock()  # a page is not closed while it is written, as its descriptor may be reused

    def store(self, keep: Keep) -> str:
        """Write a page as the page of the rank to which it belongs. Never raises.

        Returns:
            Why it was refused; empty: it is stored.
        """
        with self._lock:
            reason = self._objection(keep)
            if not reason:
                writer = self._writer(keep.of)
                writer.write(keep.version, keep.final, [keep.data])
                reason = writer.problem
            if reason:
                log.warning("the page of rank %s, version %s, was not stored: %s", keep.of, keep.version, reason)
            else:
                self._newest[keep.of] = max(self._newest.get(keep.of, (0, False)), (keep.version, keep.final))
            return reason

    def close(self) -> None:
        """Close the files. The pages stay for the rank that saves; they are removed with the directory."""
        with self._lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _objection(self, keep: Keep) -> str:
        version, final = self._newest.get(keep.of, (0, False))
        if keep.incarnation != self._incarnation:
            return f"it is of incarnation {keep.incarnation}, not {self._incarnation}"
        if keep.of == self._rank or keep.rank != self._rank:
            return f"rank {self._rank} was asked in the name of rank {keep.rank}"
        if keep.version <= version - VERSIONS_KEPT or (keep.version == version and final and not keep.final):
            return f"version {version} is here already"
        if len(keep.data) > PAGE_BYTES_MAX:
            return f"it has {len(keep.data)} bytes, more than {PAGE_BYTES_MAX}"
        return ""

    def _writer(self, of: int) -> PageWriter:
        """Return the writer of a rank's page; a new one if another rank took the page over, or the file is lost."""
        writer = self._writers.get(of)
        if writer is None or not writer.in_place():
            if writer is not None:
                writer.close()
            writer = self._writers[of] = PageWriter(self._directory, of, incarnation=self._incarnation)
        return writer


def kept_directory(page_dir: Path) -> Path:
    """Return the directory of the pages of other hosts' ranks."""
    return page_dir / "kept"


def read_page_or_kept(page_dir: Path, rank: int, version: int, incarnation: int) -> Page | str:
    """Read a page like ``read_page``. If this host has no page of the rank, the kept one is read."""
    page = read_page(page_dir, rank, version, incarnation)
    kept = kept_directory(page_dir)
    if isinstance(page, Page) or not (kept / page_name(rank)).exists():
        return page
    found = read_page(kept, rank, version, incarnation)
    return found if isinstance(found, Page) else f"{page}; {found}"
