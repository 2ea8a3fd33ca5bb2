"""Mirrors of rank-local pages on other hosts: chooses the rank that keeps each rank's page.

Rank-local state lies in the memory of its host and is lost with that host. If mirrors are switched on
(``TTP_MIRROR``), every rank sends its page with each update to a rank of the next host, which can add the page to a
checkpoint. Pages go directly from rank to rank; the controller only tells each rank the address.

If the ranks of a host have died but the host lives, their launcher hands the pages to the controller, with or without
mirrors, and the controller sends them to a living rank.
"""

from __future__ import annotations

from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.copy_messages import Keep, Mirror, MirrorTo
from ttp.core.layout import Rank
from ttp.core.replication import next_host


class Mirrors:
    """Chooses the keeper of each rank's page. Keepers are chosen once, when all ranks are known.

    Args:
        job: the ranks.
        outbox: takes the orders.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox
        self._looked = False  # whether it is known if pages are mirrored
        self._keepers: dict[Rank, Rank] = {}
        self._kept_by: dict[Rank, list[Rank]] = {}
        self._inherited: dict[Rank, Rank] = {}
        """The rank that each page handed over by a launcher was sent to, by the page's rank."""

    def reset(self) -> None:
        """Forget all keepers, because a new incarnation begins."""
        self._looked, self._keepers, self._kept_by, self._inherited = False, {}, {}, {}

    def keeper(self, rank: Rank) -> Rank | None:
        """Return the rank that may have the page of ``rank``, whose host is lost; None: no rank has."""
        return self._inherited.get(rank, self._keepers.get(rank))

    def joined(self, rank: Rank) -> None:
        """Tell ranks their keepers once all ranks have said hello; tell a rank that comes back again.

        A job on one host has no keepers.
        """
        job = self._job
        if not job.complete:
            return
        if self._looked:
            told = [rank, *self._kept_by.get(rank, ())]  # an address may change
        else:
            self._looked = True
            if any(member.hello.pages_at for member in job.members.values()):
                self._keepers = next_host(job.hosts())
            for of, keeper in self._keepers.items():
                self._kept_by.setdefault(keeper, []).append(of)
            told = list(self._keepers)
        for of in told:
            self._tell(of)

    def _tell(self, rank: Rank) -> None:
        keeper = self._keepers.get(rank)
        address = self._job.members[keeper].hello.pages_at if keeper is not None else ""
        if keeper is not None and address and self._job.members[rank].hello.pages_at:
            self._outbox.send_to(rank, MirrorTo(rank, self._job.term, keeper, address))

    def hand_over(self, page: Mirror) -> None:
        """Send the page that a dead rank left on its host to a living rank: its keeper, else the lowest rank."""
        job = self._job
        if page.rank in job.live or page.rank not in job.members or page.incarnation != job.incarnation:
            return
        keeper = self.keeper(page.rank)
        if keeper not in job.live:
            keeper = min(job.live, default=None)
        if keeper is not None:
            self._inherited[page.rank] = keeper
            order = Keep(keeper, job.term, page.rank, page.version, page.final, page.incarnation, page.data)
            self._outbox.send_to(keeper, order)
