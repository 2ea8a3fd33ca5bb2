"""Pages of ranks kept on another host: who keeps whose.

What only one rank has lies in the memory of its host and is lost with it. Switched on (``TTP_MIRROR``), every rank
sends its page with each update, the controller passes it on to a rank of the next host, and that one can add it to a
checkpoint. The controller keeps nothing.

Where only the ranks of a host have died and not its memory, their launcher hands the pages over, mirrored or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttp.core import messages as m
from ttp.core.layout import Rank
from ttp.core.membership import Membership
from ttp.core.outbox import Outbox


class Mirrors:
    """Passes pages on. Buddies are chosen once all ranks are known, and stay.

    Args:
        job: the ranks.
        outbox: takes the pages.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox
        self._buddies: dict[Rank, Rank] = {}
        self.kept: dict[Rank, Rank] = {}
        """Whose page has been passed on, and to whom."""

    def reset(self) -> None:
        """A new incarnation begins."""
        self._buddies, self.kept = {}, {}

    def pass_on(self, page: m.Mirror) -> None:
        """To the buddy of its rank; a job on one host has no buddies."""
        if not self._buddies and self._job.complete:
            self._choose()
        buddy = self._buddies.get(page.rank)
        if buddy is None or page.incarnation != self._job.incarnation:
            return
        self._send(buddy, page)

    def hand_over(self, page: m.Mirror) -> None:
        """What a dead rank has left on its host goes to one that lives: who has its earlier pages, else anybody."""
        job = self._job
        if page.rank in job.live or page.rank not in job.members or page.incarnation != job.incarnation:
            return
        keeper = self.kept.get(page.rank)
        if keeper not in job.live:
            keeper = min(job.live, default=None)
        if keeper is not None:
            self._send(keeper, page)

    def _send(self, keeper: Rank, page: m.Mirror) -> None:
        self.kept[page.rank] = keeper
        self._outbox.send_to(
            keeper, m.Keep(keeper, self._job.term, page.rank, page.version, page.final, page.incarnation, page.data)
        )

    def _choose(self) -> None:
        self._buddies = next_host(self._job.hosts())


def next_host(ranks_of: Mapping[str, Sequence[Rank]]) -> dict[Rank, Rank]:
    """For each rank one of the next host, evenly; empty when there is only one host."""
    hosts = list(ranks_of.values())
    if len(hosts) < 2:
        return {}
    following = [*hosts[1:], hosts[0]]
    return {r: there[i % len(there)] for here, there in zip(hosts, following, strict=True) for i, r in enumerate(here)}
