"""Either all ranks stay in their loops, or none does."""

from __future__ import annotations

import pytest

from ttp.core.layout import Version
from ttp.core.rank.staying import SEAT, leave, stay, why_left

FIVE, SIX = stay(Version(5)), stay(Version(6))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([FIVE, FIVE, FIVE], None),
        ([FIVE, SEAT, FIVE], None),
        ([FIVE, SIX, SEAT], "ranks stand in different updates"),
        ([FIVE, leave("too early"), FIVE], "rank 1: too early"),
        ([SEAT, leave(""), SEAT], "rank 1: "),
        ([SEAT, SEAT], "no rank is in its loop"),
    ],
)
def test_one_rank_that_cannot_has_all_leave(said: list[str], why: str | None) -> None:
    assert why_left(said) == why
