"""Sizes, durations and counts in words."""

from __future__ import annotations

import pytest

from ttp.cli.output import count_text, duration_text, when_text
from ttp.store.room import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_940, "999.9 kB"),
        (999_960, "1.0 MB"),
        (3.25e9, "3.2 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.31, "0.3 s"), (60, "1 min 0 s"), (252.9, "4 min 12 s"), (12_000, "3 h 20 min"), (190_000, "2 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_counts() -> None:
    assert [count_text(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize("moment", [0, 1e30, float("nan")])
def test_no_time(moment: float) -> None:
    assert when_text(moment) == ""
