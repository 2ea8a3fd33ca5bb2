"""The messages by which ranks and the controller agree on the checkpoint to restore."""

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
    """The share of a candidate that a rank has read, or will read before it loads the candidate.

    Args:
        copy: identifies the files: it differs between files of equal contents in different places.
        index: which of ``count`` parts.
        count: 1: the share is everything; 0: the share is nothing.
    """

    copy: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class RestoreView(m.Report):
    """Report: the checkpoints that this rank can restore. ``readings``: one for each of ``candidates``."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[str, ...]
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored(m.Report):
    """Report: this rank has read the checkpoint that it begins with.

    Args:
        version: the version of its state now.
        size: bytes of the checkpoint; 0 if not known here.
    """

    version: Version
    size: int = 0


@dataclass(frozen=True, slots=True)
class RestoreDecision(m.LedOrder):
    """Order: the checkpoint to restore. ``version`` 0 with an empty name: start from nothing.

    A non-empty ``error`` is raised on every rank. An error with a version is one that only an operator can mend: that
    version was committed, and has vanished, is damaged like all others, or needs a newer ttp; or a rank was refused
    (then the version is 1). ``unread``: the ranks do more and send a ``RestoreView`` again. If there is an error, they
    look again after a pause; else they have together not read all of the checkpoint, and read more.
    """

    version: Version
    name: str
    manifest_digest: str
    error: str
    unread: bool = False
