"""Finds the record of a version in a page file, for tests that tear it."""

from __future__ import annotations

from ttp.processor.local_state.pages import PageWriter


def record_of(writer: PageWriter, version: int) -> int:
    """Return the offset of the record of the slot that ``version`` was written to last."""
    return writer._older[version % 3].after.after.record_at
