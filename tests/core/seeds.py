"""Seeds of random jobs: some for every run of the tests, and many for a slow one."""

from __future__ import annotations

import pytest


def seeds(few: int, end: int) -> pytest.MarkDecorator:
    """Return a parametrization with the first ``few`` seeds, and with those from 1000 to ``end``, which is slow."""
    many = pytest.param(range(1000, end), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
    return pytest.mark.parametrize("seeds", [range(few), many], ids=str)
