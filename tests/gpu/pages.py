"""Waits for the page of a rank of this process."""

from __future__ import annotations

import time

import ttp.session
from ttp.processor.local_state.pages import Page, read_page


def written(rank: int, version: int | None = None) -> Page:
    """Return the rank's page of a version when it is there; None: of the version that the next update makes."""
    processor = ttp.session.current().processor
    assert processor is not None and processor.host.pages is not None
    deadline = time.monotonic() + 20
    while True:
        wanted = processor.gate.version + 1 if version is None else version
        found = read_page(processor.host.pages.path, rank, wanted, processor.incarnation)
        if isinstance(found, Page):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.002)
