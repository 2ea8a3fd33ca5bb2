"""The second copies of a simulated rank: ``ttp.processor.copies.copier`` in virtual time, without threads.

The state is copied at once; the time until the copy is in the host's memory and at the buddy is random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.replication import NOBODY, OwnCopies
from ttp.testing.toy import Words

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank

EVERY = 2
"""Updates from one copy to the next."""

Copy = tuple[dict[Shard, Words], int]
"""A copy: the shards of a rank that it keeps, and its random stream."""
Copies = dict[tuple[Rank, Version], Copy]
"""The copies in the memory of a host, by rank and version."""


class SimCopies:
    """Makes the second copies of one rank, and reads those that its host keeps.

    Args:
        rank: the rank that makes the copies.
    """

    __slots__ = ("_buddy", "_copies", "_deferred", "_rank", "_world")

    def __init__(self, rank: SimRank) -> None:
        self._rank, self._world = rank, rank.world
        self._copies = OwnCopies()
        self._buddy: Rank | None = None
        self._deferred: list[act.SettleCopy] = []

    def named(self, order: CopyTo) -> None:
        """Send copies to the buddy that the order names from now on."""
        self._buddy = order.buddy

    def updated(self, version: Version) -> None:
        """Begin a copy, if one is due after the update to ``version``."""
        if self._buddy is None or version % EVERY:
            return
        if not self._copies.begin(version):
            self._rank.put(ev.CopySkipped(version))
            return
        if not self._copies.tries(version // EVERY):
            self._rank.put(ev.CopyMade(version, False, "not tried"))
            return
        mine = self._world.keepers.get(self._rank.rank, ())
        trainer = self._rank.trainer
        copy = ({shard: trainer.shards[shard] for shard in mine}, trainer.random)
        self._world.after(self._rank.takes(0.005), self._rank.run, self._stored, version, copy)

    def _stored(self, version: Version, copy: Copy) -> None:
        if self._rank.machine.incident:
            self._rank.put(ev.CopyMade(version, False, "the job is frozen"))
            return
        self._world.copies(self._rank.host)[self._rank.rank, version] = copy
        self._world.after(self._rank.takes(0.01), self._rank.run, self._sent, version, copy)

    def _sent(self, version: Version, copy: Copy) -> None:
        buddy = None if self._buddy in (None, NOBODY) else self._world.ranks[Rank(self._buddy or 0)]
        if buddy is None:
            self._rank.put(ev.CopyMade(version, True))
        elif not buddy.alive or buddy.stopped or buddy.machine.incident or self._world.rng.random() < 0.1:
            self._rank.put(ev.CopyMade(version, False, "the buddy did not take it"))
        else:
            there = self._world.copies(buddy.host)
            for of, old in list(there):
                if of == self._rank.rank and old != self._copies.whole:
                    del there[of, old]
            there[self._rank.rank, version] = copy
            self._rank.put(ev.CopyMade(version, True))

    def settle(self, action: act.SettleCopy) -> None:
        """Apply the controller's decision about a copy: whether it is whole, and so which older copy is deleted."""
        if self._rank.machine.incident:
            self._deferred.append(action)
            return
        gone = self._copies.settle(action.version, whole=action.whole)
        if gone is not None:
            self._world.copies(self._rank.host).pop((self._rank.rank, gone), None)

    def thaw(self) -> None:
        """Apply the decisions that arrived while the job was frozen."""
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.settle(action)

    def held(self) -> tuple[m.KeptCopy, ...]:
        """Return the copies in the memory of this rank's host, which the rank can write."""
        return tuple(m.KeptCopy(of, version) for of, version in sorted(self._world.copies(self._rank.host)))

    def shard(self, shard: Shard, version: Version) -> Words | None:
        """Return the shard of a kept copy; None if the copy is gone."""
        keeper = next(rank for rank, shards in self._world.keepers.items() if shard in shards)
        copy = self._world.copies(self._rank.host).get((keeper, version))
        return None if copy is None else copy[0][shard]

    def page(self, of: Rank, version: Version) -> int | None:
        """Return the page of rank ``of`` from a kept copy; None if there is no such copy."""
        found = self._world.copies(self._rank.host).get((of, version))
        return None if found is None else found[1]
