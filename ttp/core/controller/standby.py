"""Has standby controllers started on other hosts, and tells every rank their addresses.

A standby controller has no state of the job. When ranks come to it because their controller is lost, it learns all it
needs from their hellos and takes over. So the only preparation is that it runs and that every rank knows its address.
The address of a standby is announced as soon as it is ordered, with the port that it takes if that port is free: if
this controller is lost while the standby starts, ranks already know where to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttp.core import messages as m
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import Rank

UNABLE_MAX = 8
"""Number of hosts without success after which no further host is asked: what they lack, all hosts lack.

Every rank is told of each attempt, so to ask a thousand hosts would take a million messages.
"""


class Standby:
    """The standby controllers of one job, on other hosts than this controller's.

    Args:
        job: the ranks.
        outbox: takes the orders.
        wanted: the number of standby controllers.
        port: the controller port of the job, which standbys take as well if it is free on their host; 0 if unknown.
    """

    def __init__(self, job: Membership, outbox: Outbox, wanted: int, port: int) -> None:
        self._job, self._outbox, self._wanted, self._port = job, outbox, wanted, port
        self._places: dict[str, str] = {}
        self._asked: dict[str, Rank] = {}
        self._up: set[str] = set()
        self._unable: set[str] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses (host:port) of the standby controllers that have started."""
        return tuple(place for host, place in self._places.items() if host in self._up)

    def reset(self) -> None:
        """Forget all standby controllers: in a new incarnation the processes that started them are gone."""
        self._places, self._asked, self._up, self._unable = {}, {}, set(), set()

    def joined(self, rank: Rank) -> None:
        """Tell a rank that has joined the addresses of the standbys, and order one on its host if more are wanted."""
        self._tell((rank,))
        host = self._job.members[rank].hello.host
        if self._ask(rank):
            self._tell_all()
        elif self._asked.get(host) == rank and host in self._places:  # the order may have been lost with its stream,
            self._outbox.send_to(rank, m.StandBy(rank, self._job.term))  # or the standby ends with the process before

    def _ask(self, rank: Rank) -> bool:
        hello = self._job.members[rank].hello
        known = hello.host == self._job.home or hello.host in self._places or hello.host in self._unable
        if known or len(self._places) >= self._wanted or len(self._unable) >= UNABLE_MAX:
            return False
        self._places[hello.host], self._asked[hello.host] = _at(hello.address, self._port), rank
        self._outbox.send_to(rank, m.StandBy(rank, self._job.term))
        return True

    def answered(self, report: m.StandbyUp) -> None:
        """Take the answer of a rank that was ordered to start a standby; if it failed, order one on another host.

        A standby that had started may have ended, and one that has failed may start later. A rank repeats its answer
        after each welcome, so a standby may have been ordered by the controller before.
        """
        host = self._job.members[report.rank].hello.host
        if report.address and self._wanted and host != self._job.home:
            if host in self._up and self._places[host] == report.address:
                return
            self._up.add(host)
            self._unable.discard(host)
            self._places[host] = report.address
            self._outbox.record("standby", rank=report.rank, host=host, address=report.address)
        elif host in self._places and (host not in self._up or self._asked.get(host) == report.rank):
            self._up.discard(host)
            self._unable.add(host)
            del self._places[host]
            self._outbox.record("no_standby", host=host)
            any(self._ask(rank) for rank in sorted(self._job.live))
        else:
            return
        self._tell_all()

    def _tell_all(self) -> None:
        self._tell(sorted(self._job.live))

    def _tell(self, ranks: Iterable[Rank]) -> None:
        places = tuple(place for place in self._places.values() if place)
        if places:
            self._outbox.send_alike(ranks, m.Standbys(m.SEVERAL, self._job.term, places))


def _at(address: str, port: int) -> str:
    if not (address and port):
        return ""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
