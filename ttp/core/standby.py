"""Controllers that stand by on other hosts: who has one, and telling everybody where.

A controller that stands by knows nothing. When ranks come to it because theirs is gone, it learns everything from their
hellos and takes over. So all that is needed ahead of time is that it runs, and that every rank knows its address.
"""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.layout import Rank
from ttp.core.membership import Membership
from ttp.core.outbox import Outbox


class Standby:
    """The standby controllers of one job.

    Args:
        job: the ranks.
        outbox: takes the orders.
        host: of this controller; it needs no other here.
        wanted: how many there should be.
    """

    def __init__(self, job: Membership, outbox: Outbox, host: str, wanted: int) -> None:
        self._job, self._outbox, self._host, self._wanted = job, outbox, host, wanted
        self._up: dict[str, str] = {}
        self._asked: set[str] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they listen (host:port), in the order in which ranks will try them."""
        return tuple(self._up.values())

    def reset(self) -> None:
        """A new incarnation: the processes that looked after them are gone."""
        self._up, self._asked = {}, set()

    def joined(self, rank: Rank) -> None:
        """A host can be asked as soon as a rank of it has come: the sooner one stands by, the better."""
        self.tell(rank)
        self._ask(rank)

    def _ask(self, rank: Rank) -> None:
        host = self._job.members[rank].hello.host
        enough = len(self._up) + len(self._asked) >= self._wanted
        if not (enough or host == self._host or host in self._asked or host in self._up):
            self._asked.add(host)
            self._outbox.send_to(rank, m.StandBy(rank, self._job.term))

    def answered(self, report: m.StandbyUp) -> None:
        """A host has one now, or cannot have one."""
        host = self._job.members[report.rank].hello.host
        if host not in self._asked or host in self._up:
            return
        if not report.address:
            self._wanted_less(host)
            return
        self._asked.discard(host)
        self._up[host] = report.address
        self._outbox.record("standby", rank=report.rank, host=host, address=report.address)
        for rank in sorted(self._job.live):
            self.tell(rank)

    def tell(self, rank: Rank) -> None:
        """The rank may have come after they were announced."""
        if self._up:
            self._outbox.send_to(rank, m.Standbys(rank, self._job.term, self.addresses))

    def _wanted_less(self, host: str) -> None:
        """It stays among those that were asked, so that it is not asked again; another one is."""
        self._wanted += 1
        self._outbox.record("no_standby", host=host)
        for rank in sorted(self._job.live):
            self._ask(rank)
