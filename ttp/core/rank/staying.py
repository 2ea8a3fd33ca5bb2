"""Decides whether ranks that go on stay in the loops of their programs, or leave them. Pure functions.

Either all ranks stay or none. Each rank publishes one word (``stay``, ``leave`` or ``SEAT``), and all ranks apply
``why_left`` to the words of all ranks, so they come to the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.core.layout import Version

SEAT = "seat"
"""The word of a rank that replaces a dead one: it does what the other ranks do."""
_STAY, _LEAVE = "stay ", "leave "


def stay(version: Version) -> str:
    """Return the word of a rank that was stopped in the update after ``version`` and can make that update again."""
    return f"{_STAY}{version}"


def leave(why: str) -> str:
    """Return the word of a rank that has left its loop, or must; an empty ``why``: no decorated function was called."""
    return _LEAVE + why


def why_left(said: Sequence[str]) -> str | None:
    """Return why all ranks leave their loops; None if all stay in them.

    Args:
        said: the word of each rank, in the order of ranks.
    """
    for rank, word in enumerate(said):
        if word.startswith(_LEAVE):
            return f"rank {rank}: {word.removeprefix(_LEAVE)}"
    places = {word: rank for rank, word in enumerate(said) if word != SEAT}
    if len(places) == 1:
        return None
    return "no rank is in its loop" if not places else "ranks stand in different updates"
