"""What ranks and the controller say of the checkpoint that a job begins with."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Version


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that one rank found whole."""

    version: Version
    manifest_digest: str
    name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank has read of a candidate, or will before it loads it.

    Args:
        copy: tells these files from others of the same contents.
        index: which of ``count`` parts.
        count: 1: all of it; 0: nothing.
    """

    copy: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class RestoreView(m.Report):
    """``readings``: one for each of ``candidates``."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[str, ...]
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored(m.Report):
    """This rank has read what it begins with.

    Args:
        version: the state that it has now.
        size: bytes of the checkpoint; 0: not known here.
    """

    version: Version
    size: int = 0


@dataclass(frozen=True, slots=True)
class RestoreDecision(m.LedOrder):
    """``version`` 0 with an empty name: start from nothing. A non-empty ``error`` is raised on every rank.

    An error with a version: that one was committed and has vanished, which only an operator can mend.
    ``unread``: what the ranks have read is not all of it. They read more, and say once more what they found.
    """

    version: Version
    name: str
    manifest_digest: str
    error: str
    unread: bool = False
