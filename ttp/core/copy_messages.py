"""Messages about copies on other hosts: of shards (``ttp.core.replication``) and of rank-local pages."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version


@dataclass(frozen=True, slots=True)
class Mirror:
    """The rank-local page that a dead rank left behind; its launcher sends it to the controller."""

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
        version: the version that was to be copied.
        stored: whether the copy is complete, here and at the buddy; if not, ``text`` is the reason.
        text: the reason, for people.
        whole: the newest version that every rank has stored, as far as this rank knows; 0 if it knows of none.
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
    """Order: also send copies of this rank's shards to ``buddy`` at ``address`` (host:port); -1: there is no buddy."""

    buddy: Rank
    address: str


@dataclass(frozen=True, slots=True)
class MirrorTo(m.LedOrder):
    """Order: also send copies of this rank's page to ``keeper`` at ``address`` (host:port)."""

    keeper: Rank
    address: str


@dataclass(frozen=True, slots=True)
class Settled(m.LedOrder):
    """Order: drop the copy that is no longer needed.

    If ``whole``, every rank has stored its copy of ``version``: drop the older one. Else some rank could not store its
    copy: drop that of ``version``.
    """

    version: Version
    whole: bool
