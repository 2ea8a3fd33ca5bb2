"""What is said of copies on other hosts: of shards (``ttp.core.replication``) and of rank-local pages."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version


@dataclass(frozen=True, slots=True)
class Mirror:
    """What is left of a dead rank's page, in the hands of its launcher."""

    rank: Rank
    version: Version
    final: bool
    incarnation: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Copied(m.Report):
    """What came of this rank's copy of ``version``; see ``ttp.core.replication``.

    Args:
        rank: who copied.
        version: whose turn it was.
        stored: the copy is whole, here and at the buddy; else ``text`` says why not.
        text: for people.
        whole: the newest version that this rank knows to be whole everywhere; 0: none.
    """

    version: Version
    stored: bool
    text: str
    whole: Version


@dataclass(frozen=True, slots=True)
class Keep(m.LedOrder):
    """Keep the page of rank ``of``, which runs on another host."""

    of: Rank
    version: Version
    final: bool
    incarnation: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyTo(m.LedOrder):
    """Copies of this rank's shards go to ``buddy`` too, at ``address`` (host:port); -1: there is no other host."""

    buddy: Rank
    address: str


@dataclass(frozen=True, slots=True)
class MirrorTo(m.LedOrder):
    """Copies of this rank's page go to ``keeper`` too, at ``address`` (host:port)."""

    keeper: Rank
    address: str


@dataclass(frozen=True, slots=True)
class Settled(m.LedOrder):
    """The copies of ``version`` are whole on every rank, so that older ones can go; or they never will be."""

    version: Version
    whole: bool
