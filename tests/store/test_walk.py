"""The walk back to the newest whole checkpoint, against a simple list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.errors import CheckpointError
from ttp.store.walk import NotTriedError, walk_back

KINDS = ("whole", "damaged", "none")


def open_one(kind: str) -> str:
    if kind == "none":
        raise NotTriedError("none")
    if kind == "damaged":
        raise CheckpointError("damaged")
    return kind


@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=12),
    attempts=st.integers(1, 6),
    enough=st.none() | st.integers(1, 3),
)
def test_it_takes_what_a_patient_person_would(kinds: list[str], attempts: int, enough: int | None) -> None:
    tried = [place for place, kind in enumerate(kinds) if kind != "none"][:attempts]
    whole = [place for place in tried if kinds[place] == "whole"][:enough]
    opened, skipped = walk_back(kinds, open_one, attempts=attempts, enough=enough)
    assert len(opened) == len(whole)
    if enough is not None and len(whole) == enough:
        last = whole[-1]
    elif len(tried) == attempts:
        last = tried[-1]
    else:
        last = len(kinds)
    assert skipped == [kind for kind in kinds[:last] + kinds[last : last + 1] if kind != "whole"]


def test_nothing_is_looked_at_beyond_what_is_needed() -> None:
    seen: list[int] = []

    def open_and_note(number: int) -> int:
        seen.append(number)
        return number

    assert walk_back(iter(range(9)), open_and_note) == ([0], [])
    assert seen == [0]


def test_another_error_ends_the_walk() -> None:
    class DamagedError(CheckpointError):
        pass

    def open_misfit(number: int) -> int:
        raise CheckpointError("misfit") if number else DamagedError("damaged")

    with pytest.raises(CheckpointError, match="misfit"):
        walk_back([0, 1, 2], open_misfit, not_whole=DamagedError)
