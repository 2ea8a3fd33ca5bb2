"""Messages about copies on other hosts: of shards (``ttp.core.replication``) and of rank-local pages."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version


@dataclass(frozen=True, slots=True)
class Mirror:
    """The page that a dead rank left behind, as its launcher hands it over."""

    rank: Rank
    version: Version
    final: bool
    incarnation: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Copied(m.Report):
    """Report: the result of this rank's copy of ``version``; see ``ttp.core.replication``.

    Args:
        rank: the rank that copied.
        version: the version whose turn it was.
        stored: whether the copy is whole, here and at the buddy; if not, ``text`` says why.
        text: for people.
        whole: the newest version that this rank knows to be whole on every rank; 0 if it knows of none.
    """

    version: Version
    stored: bool
    text: str
    whole: Version


@dataclass(frozen=True, slots=True)
class Keep(m.LedOrder):
    """Order: keep the page of rank ``of``, which runs on another host."""

    of: Rank
    version: Version
    final: bool
    incarnation: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyTo(m.LedOrder):
    """Order: send copies of this rank's shards to ``buddy`` too, at ``address`` (host:port); -1: no other host."""

    buddy: Rank
    address: str


@dataclass(frozen=True, slots=True)
class MirrorTo(m.LedOrder):
    """Order: send copies of this rank's page to ``keeper`` too, at ``address`` (host:port)."""

    keeper: Rank
    address: str


@dataclass(frozen=True, slots=True)
class Settled(m.LedOrder):
    """Order: all copies of ``version`` are whole, so older ones can go; or, if not ``whole``, they never will be."""

    version: Version
    whole: bool
