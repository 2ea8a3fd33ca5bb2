"""The all-reduce of a simulated job: over when all have come; when one dies some are let go and others are held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttp.core.layout import Rank
from ttp.testing.toy import reduce

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation


class _Collective:
    __slots__ = ("broken", "complete", "leaving", "parts")

    def __init__(self) -> None:
        self.parts: dict[Rank, int] = {}
        self.leaving: set[Rank] = set()
        self.complete = False
        self.broken = False


class Collectives:
    """Those of one incarnation; constant time for each rank that comes or goes.

    Args:
        world: the simulation.
    """

    def __init__(self, world: Simulation) -> None:
        self._world, self._ranks = world, world.ranks
        self._open: dict[int, _Collective] = {}
        self._somebody_died = False

    def arrive(self, rank: SimRank, step: int, part: int) -> None:
        """A rank brings its part of the gradient of ``step``."""
        collective = self._open.setdefault(step, _Collective())
        collective.parts[rank.rank] = part
        if len(collective.parts) < self._world.layout.world_size:
            if self._somebody_died:
                self._fail(rank)
            return
        gradient = reduce(collective.parts.values())
        collective.complete = True
        collective.leaving = set(collective.parts)
        for r in range(self._world.layout.world_size):
            self._world.after(self._world.rng.random() * 0.002, self._leave, step, collective, Rank(r), gradient)

    def _leave(self, step: int, collective: _Collective, rank: Rank, gradient: int) -> None:
        if rank in collective.leaving:
            collective.leaving.discard(rank)
            if not collective.leaving:
                self._open.pop(step, None)
            process = self._ranks[rank]
            process.run(process.trainer.go_on, gradient)

    def broken_by(self, dead: Rank) -> None:
        """Whoever waits for the dead rank hangs or raises; of those that have all they need some get away."""
        self._somebody_died = True
        for collective in self._open.values():
            if not collective.complete:
                self._fail_all(sorted(collective.parts))
                collective.parts.clear()
            elif not collective.broken or len(collective.leaving) < 64:  # in a large world the first death is enough
                collective.broken = True
                held = [r for r in sorted(collective.leaving) if self._world.rng.random() < 0.5]
                collective.leaving.difference_update(held)
                self._fail_all(held)

    def _fail_all(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            process = self._ranks[rank]
            if process.alive:
                self._fail(process)

    def _fail(self, rank: SimRank) -> None:
        if self._world.rng.random() < 0.5:  # else it hangs for ever
            soon = self._world.rng.choice((0.0001, 0.01, 0.6)) * self._world.rng.random()
            self._world.after(soon, rank.run, rank.trainer.go_on, None)
