"""Reads what a rank has written to its page, and counts what is hashed for it."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from ttp.adapters.torch.local_state.image import LocalState, decode
from ttp.processor.local_state.pages import Page, PageWriter, read_page


def written(page: PageWriter, version: int) -> Page:
    found = read_page(page.path.parent, 0, version, 0)
    assert isinstance(found, Page), found
    return found


def read(page: PageWriter, version: int) -> LocalState:
    return decode(written(page, version).data)


def hashed_from_now_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the sizes of what is hashed are added."""
    sizes: list[int] = []
    digest = xxhash.xxh3_64_intdigest

    def counted(data: Any) -> int:
        sizes.append(len(data))
        return int(digest(data))

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", counted)
    return sizes
