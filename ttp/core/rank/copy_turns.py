"""Reports the second copies (``buddy=True``) that a rank makes or skips; see ``ttp.core.replication``."""

from __future__ import annotations

from dataclasses import replace

from ttp.core.copy_messages import Copied, Settled
from ttp.core.layout import Rank, Version
from ttp.core.rank.actions import SettleCopy
from ttp.core.rank.events import CopyMade, CopySkipped
from ttp.core.rank.outbox import RankOutbox


class CopyTurns:
    """Reports one copy at a time, and waits until the controller has settled its fate.

    Args:
        rank: the rank that copies.
        outbox: takes reports and actions.
    """

    def __init__(self, rank: Rank, outbox: RankOutbox) -> None:
        self._rank, self._outbox = rank, outbox
        self._copy: Copied | None = None
        self._unsettled = False
        self._skipped = Version(0)

    def happened(self, event: CopyMade | CopySkipped) -> None:
        """Take a copy that was made or skipped. A skipped copy is reported once the copy before it is settled."""
        if isinstance(event, CopyMade):
            whole = self._copy.whole if self._copy is not None else Version(0)
            self._copy = Copied(self._rank, event.version, event.stored, event.text, whole)
            self._unsettled = True
        else:
            self._skipped = event.version
        if self._unsettled:
            self.repeat()

    def settled(self, order: Settled) -> None:
        """Take the controller's decision whether every rank has stored a version."""
        copy = self._copy
        if copy is None or order.version != copy.version or not self._unsettled:
            return
        whole = order.version if order.whole else copy.whole
        self._copy, self._unsettled = replace(copy, whole=whole), False
        self._outbox.do(SettleCopy(order.version, order.whole))
        if self._skipped > order.version:
            text = f"the copy of version {order.version} was not finished yet"
            self._copy = Copied(self._rank, self._skipped, False, text, whole)
            self.repeat()

    def repeat(self) -> None:
        """Send the last report again, because the controller may be new."""
        if self._copy is not None:
            self._outbox.report(self._copy)
