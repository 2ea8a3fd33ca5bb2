"""Whether ranks that go on stay in the loops of their programs, or leave them. Pure.

All or none: each says where it stands, and all draw the same conclusion from what all have said.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.core.layout import Version

SEAT = "seat"
"""Says a rank that takes the seat of a dead one: it does as the others do."""
_STAY, _LEAVE = "stay ", "leave "


def stay(version: Version) -> str:
    """What a rank says that can make the update behind ``version`` again, in which it was stopped."""
    return f"{_STAY}{version}"


def leave(why: str) -> str:
    """What a rank says that has left its loop, or has to. ``why``: empty where no decorated function was called."""
    return _LEAVE + why


def why_left(said: Sequence[str]) -> str | None:
    """Why all leave their loops; None: all stay in them.

    Args:
        said: by each rank, by number.
    """
    for rank, word in enumerate(said):
        if word.startswith(_LEAVE):
            return f"rank {rank}: {word.removeprefix(_LEAVE)}"
    places = {word: rank for rank, word in enumerate(said) if word != SEAT}
    if len(places) == 1:
        return None
    return "nobody is in one" if not places else "ranks stand in different updates"
