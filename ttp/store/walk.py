"""Finds the newest candidate that can be opened, and tells why newer ones could not.

``restore``, ``ttp convert``, ``ttp recover``, ``ttp reshard`` and ``load_newest`` use it. It is pure: the caller
decides what a candidate is and how it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ttp.errors import CheckpointError

ATTEMPTS = 5
"""Candidates that are tried, as in MindSpore's Pangu training: five damaged ones in a row have one common cause."""

Candidate = TypeVar("Candidate")
Opened = TypeVar("Opened")


class NotTriedError(CheckpointError):
    """A candidate that is not a checkpoint, by its name or manifest: it does not count as an attempt."""


def walk_back(
    newest_first: Iterable[Candidate],
    open_one: Callable[[Candidate], Opened],
    *,
    attempts: int = ATTEMPTS,
    enough: int | None = 1,
    not_whole: type[CheckpointError] = CheckpointError,
) -> tuple[list[Opened], list[str]]:
    """Open candidates in their order until there are enough.

    Args:
        newest_first: the candidates to try.
        open_one: opens a candidate and checks that it is whole; raises ``not_whole`` if it is not.
        attempts: how many to open at most, whole or not.
        enough: stop after this number of whole ones; None: only ``attempts`` limits.
        not_whole: the error after which the next candidate is tried; any other error ends the walk.

    Returns:
        The results of ``open_one``, and the reasons for which other candidates could not be opened.
    """
    opened: list[Opened] = []
    skipped: list[str] = []
    for candidate in newest_first:
        if attempts <= 0 or (enough is not None and len(opened) >= enough):
            break
        try:
            opened.append(open_one(candidate))
        except NotTriedError as problem:
            skipped.append(str(problem))
            continue
        except not_whole as problem:
            skipped.append(str(problem))
        attempts -= 1
    return opened, skipped
