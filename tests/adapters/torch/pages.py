"""Reads what a rank has written to its page."""

from __future__ import annotations

from ttp.adapters.torch.local_state.image import LocalState, decode
from ttp.processor.local_state.pages import Page, PageWriter, read_page


def written(page: PageWriter, version: int) -> Page:
    found = read_page(page.path.parent, 0, version, 0)
    assert isinstance(found, Page), found
    return found


def read(page: PageWriter, version: int) -> LocalState:
    return decode(written(page, version).data)
