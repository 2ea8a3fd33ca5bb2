"""Second copies of shards that only one rank holds: which rank copies what, to which buddy, and when copies may go.

A shard without replicas dies with its rank. If second copies are requested (``wrap_optimizer(buddy=True)``), every rank
copies its assigned shards (``keepers``) every k updates into the memory of its host, beside the training, and sends
them to a rank of the next host. All shards are copied, each by one of its ranks, replicated shards too: a checkpoint
needs all shards of one version.

Theory of operation
-------------------
The copy of version c is *whole* when every rank has stored its own part, here and at its buddy. Until then every rank
has to keep the copy before. Only the controller hears from all ranks, so ranks report (``Copied``) and the controller
settles the *fate* of each version once: whole as soon as all ranks have stored it, failed if one rank could not. A rank
drops the older copy when the newer one is whole, and the newer one when it has failed, and makes no other copy until it
knows. So a rank holds at most two copies, and at any moment there is a version of which every rank holds a copy: no
rank drops c - k before all ranks have c, and no rank drops c unless some rank never stored it.

The bound: a copy begins every k updates and takes r updates to become whole. A rank lost after n finished updates costs
at most k + r - 1 of them: the job falls back to the newest multiple of k that is at most n - r. With r <= k that is at
most 2k - 1. A copy that takes longer makes the turns in between be skipped, and each skipped turn adds k to the bound.

Copies that fail cost time as well. After the second failure in a row only every second turn is tried, then every
fourth, then every eighth. The number of the turn decides, so that ranks with different counts of failures (one skipped
a turn that others tried) still try the same turns. A rank that does not try reports at once that it has no copy.

After a takeover the new controller knows no fates. Ranks repeat their last report, with the newest version that they
know to be whole. A rank that reports a later version has learnt the fates of all earlier ones before: an earlier
version that it does not know to be whole has failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ttp.core.copy_messages import Copied, CopyTo, Settled
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import SEVERAL

if TYPE_CHECKING:  # ranks import this module, and nothing else of a controller
    from ttp.core.controller.membership import Membership
    from ttp.core.controller.outbox import Outbox

NOBODY = Rank(-1)
FATES_MAX = 16
"""Number of versions whose fate is remembered: ranks are at most one update apart, so they need the last two."""

RARER_MAX = 3
"""Every ``2 ** RARER_MAX``-th turn is tried, however many copies failed before."""


def next_host(ranks_of: Mapping[str, Sequence[Rank]]) -> dict[Rank, Rank]:
    """Return for each rank a rank of the next host that keeps its page, spread evenly; empty with one host.

    ``ranks_of`` maps each host to its ranks.
    """
    hosts = list(ranks_of.values())
    if len(hosts) < 2:
        return {}
    following = [*hosts[1:], hosts[0]]
    return {r: there[i % len(there)] for here, there in zip(hosts, following, strict=True) for i, r in enumerate(here)}


def keepers(layout: Layout) -> dict[Rank, tuple[Shard, ...]]:
    """Return the shards that each rank has to copy: each shard is copied by one of its ranks, spread evenly.

    All ranks compute the same result.
    """
    found: dict[Rank, list[Shard]] = {}
    load: Counter[Rank] = Counter()
    for shard, ranks in sorted(layout.groups.items(), key=lambda item: (len(item[1]), item[0])):
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += 1
        found.setdefault(rank, []).append(shard)
    return {rank: tuple(shards) for rank, shards in found.items()}


class OwnCopies:
    """The copies that one rank holds: the newest one known to be whole, and one whose fate is open."""

    def __init__(self) -> None:
        self.whole: Version | None = None
        self.pending: Version | None = None
        self._failed = 0
        self._tried = True

    def tries(self, turn: int) -> bool:
        """Return whether to make a copy in the turn that begins now; see the module's docstring."""
        self._tried = turn % (1 << min(max(self._failed - 1, 0), RARER_MAX)) == 0
        return self._tried

    def begin(self, version: Version) -> bool:
        """Begin the copy of ``version``. Return False if it is skipped because the copy before is not settled yet."""
        if self.pending is not None:
            return False
        self.pending = version
        return True

    def settle(self, version: Version, *, whole: bool) -> Version | None:
        """Note the fate of a version. Return the version to drop, if any."""
        if version != self.pending:
            return None
        gone = self.whole if whole else version
        if whole:
            self.whole = version
        self._failed = 0 if whole else self._failed + self._tried
        self.pending = None  # last, because another thread may begin the next copy from now on
        return gone


class Buddies:
    """Assigns a buddy to every rank, and settles the fate of each version.

    Args:
        job: the ranks.
        outbox: takes the orders.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self.whole = Version(0)
        """The newest version that every rank has stored; 0 if there is none."""
        self._job, self._outbox = job, outbox
        self._named: dict[Rank, Rank] = {}
        self._looked = False  # whether it is known if every rank keeps copies
        self._stored: dict[Version, set[Rank]] = {}
        self._fates: dict[Version, bool] = {}
        self._well: bool | None = None  # whether the last settled copy became whole

    def reset(self) -> None:
        """Forget everything, because a new incarnation begins."""
        self.whole, self._named, self._stored, self._fates, self._well = Version(0), {}, {}, {}, None
        self._looked = False

    # --------------------------------------------------------------------------------------------------------- buddies

    @property
    def named(self) -> bool:
        """Whether ranks have buddies, i.e. copies are made."""
        return bool(self._named)

    def joined(self, rank: Rank) -> None:
        """Tell ranks their buddies once all ranks have said hello; tell a rank that comes back again."""
        if not self._job.complete:
            return
        if self._looked:
            if self._named:
                self._tell(rank)
            return
        self._looked = True
        without = [r for r, member in sorted(self._job.members.items()) if not member.hello.copies_at]
        if without:
            if len(without) < len(self._job.members):
                self._outbox.record("no_buddies", text="not every rank keeps copies", ranks=without[:8])
            return
        self._named = next_host(self._job.hosts()) or dict.fromkeys(sorted(self._job.members), NOBODY)
        self._outbox.record("buddies", buddies={str(rank): buddy for rank, buddy in self._named.items()})
        for named in self._named:
            self._tell(named)

    def _tell(self, rank: Rank) -> None:
        buddy = self._named[rank]
        address = "" if buddy == NOBODY else self._job.members[buddy].hello.copies_at
        self._outbox.send_to(rank, CopyTo(rank, self._job.term, buddy, address))

    # ----------------------------------------------------------------------------------------------------------- fates

    def copied(self, report: Copied) -> None:
        """Take a rank's report about its copy."""
        if report.version in self._fates:
            self._settled(report.version, (report.rank,))
            return
        self._learn(report)
        if report.version in self._fates:
            return
        if not report.stored:
            if self._well is not False:  # once, until a copy is whole again
                self._outbox.record("not_copied", rank=report.rank, version=report.version, text=report.text)
            self._settle(report.version, whole=False)
        else:
            stored = self._stored.setdefault(report.version, set())
            stored.add(report.rank)
            if self._job.complete and len(stored) == len(self._job.members):
                self._settle(report.version, whole=True)

    def _learn(self, report: Copied) -> None:
        """Settle the versions whose fate another controller has settled, as far as the report shows it."""
        if report.whole > self.whole:
            self._settle(report.whole, whole=True)
        for version in [v for v in self._stored if v < report.version]:
            self._settle(version, whole=False)

    def _settle(self, version: Version, *, whole: bool) -> None:
        self._fates[version] = whole
        self._stored.pop(version, None)
        if whole:
            self.whole = max(self.whole, version)
            if not self._well:  # only after a failure: a healthy job makes a copy every few seconds
                self._outbox.record("copied", version=version)
        self._well = whole
        for old in sorted(self._fates)[:-FATES_MAX]:
            del self._fates[old]
        self._settled(version, sorted(self._job.live))

    def _settled(self, version: Version, ranks: Iterable[Rank]) -> None:
        self._outbox.send_alike(ranks, Settled(SEVERAL, self._job.term, version, self._fates[version]))
