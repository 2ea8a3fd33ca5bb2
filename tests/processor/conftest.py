"""Fixtures for all tests of a processor's parts."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

MIB = 1 << 20
HALF_EMPTY = SimpleNamespace(f_bavail=1 << 19, f_frsize=MIB, f_blocks=1 << 20, f_files=0)


@pytest.fixture(autouse=True)
def room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a half empty file system: ``tmp_path`` stands for the memory of a host, however full its disk is."""
    monkeypatch.setattr(os, "statvfs", lambda _: HALF_EMPTY)
