"""A rank's reports about second copies of its shards (``buddy=True``), by turn; see ``ttp.core.replication``."""

from __future__ import annotations

from dataclasses import replace

from ttp.core.copy_messages import Copied, Settled
from ttp.core.layout import Rank, Version
from ttp.core.rank.actions import SettleCopy
from ttp.core.rank.events import CopyMade, CopySkipped
from ttp.core.rank.outbox import RankOutbox


class CopyTurns:
    """Reports one copy at a time: made here, then settled by the controller once its fate is known.

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
        """Take a copy that was made or skipped. A skipped one is reported only when the copy before it is settled."""
        if isinstance(event, CopyMade):
            whole = self._copy.whole if self._copy is not None else Version(0)
            self._copy = Copied(self._rank, event.version, event.stored, event.text, whole)
            self._unsettled = True
        else:
            self._skipped = event.version
        if self._unsettled:
            self.repeat()

    def settled(self, order: Settled) -> None:
        """Take the controller's word on whether the copies of a version are whole everywhere."""
        copy = self._copy
        if copy is None or order.version != copy.version or not self._unsettled:
            return
        whole = order.version if order.whole else copy.whole
        self._copy, self._unsettled = replace(copy, whole=whole), False
        self._outbox.do(SettleCopy(order.version, order.whole))
        if self._skipped > order.version:
            text = f"the copy of version {order.version} was not through yet"
            self._copy = Copied(self._rank, self._skipped, False, text, whole)
            self.repeat()

    def repeat(self) -> None:
        """Repeat the last report, because the controller may be new."""
        if self._copy is not None:
            self._outbox.report(self._copy)
