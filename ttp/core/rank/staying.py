"""Decides whether ranks that go on stay in the loops of their programs, or leave them. Pure.

All ranks stay or none: each says where it stands, and all draw the same conclusion from what all have said.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.core.layout import Version

SEAT = "seat"
"""Said by a rank that takes the seat of a dead one: it does as the others do."""
_STAY, _LEAVE = "stay ", "leave "


def stay(version: Version) -> str:
    """Return the word of a rank that can make the update after ``version``, in which it was stopped, again."""
    return f"{_STAY}{version}"


def leave(why: str) -> str:
    """Return the word of a rank that has left its loop, or must. ``why``: empty if no decorated function was called."""
    return _LEAVE + why


def why_left(said: Sequence[str]) -> str | None:
    """Return why all ranks leave their loops; None if all stay in them.

    Args:
        said: the word of each rank, by number.
    """
    for rank, word in enumerate(said):
        if word.startswith(_LEAVE):
            return f"rank {rank}: {word.removeprefix(_LEAVE)}"
    places = {word: rank for rank, word in enumerate(said) if word != SEAT}
    if len(places) == 1:
        return None
    return "nobody is in one" if not places else "ranks stand in different updates"
