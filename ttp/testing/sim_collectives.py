"""Simulated all-reduces and barriers: all ranks must come. If one dies, some leave and others hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ttp.core.layout import Rank
from ttp.testing.toy import reduce

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation


Told = Callable[[int | None], None]
"""Called with the result; None: the collective failed."""


class _Collective:
    __slots__ = ("broken", "complete", "leaving", "parts", "told")

    def __init__(self) -> None:
        self.parts: dict[Rank, int] = {}
        self.told: dict[Rank, Told] = {}
        self.leaving: set[Rank] = set()
        self.complete = False
        self.broken = False


class Collectives:
    """The collectives of one incarnation. Each arrival or death takes constant time.

    Args:
        world: the simulation.
    """

    def __init__(self, world: Simulation) -> None:
        self._world, self._ranks = world, world.ranks
        self._open: dict[tuple[str, int], _Collective] = {}
        self._somebody_died = False

    def arrive(self, rank: SimRank, name: tuple[str, int], part: int, told: Told) -> None:
        """Let a rank bring its part of the sum and wait."""
        collective = self._open.get(name)
        if collective is None:
            collective = self._open[name] = _Collective()
        collective.parts[rank.rank], collective.told[rank.rank] = part, told
        if len(collective.parts) < self._world.layout.world_size:
            if self._somebody_died:
                self._fail(rank, told)
            return
        total = reduce(collective.parts.values())
        collective.complete = True
        collective.leaving = set(collective.parts)
        for r in range(self._world.layout.world_size):
            self._world.after(self._world.rng.random() * 0.002, self._leave, name, collective, Rank(r), total)

    def _leave(self, name: tuple[str, int], collective: _Collective, rank: Rank, total: int) -> None:
        if rank in collective.leaving:
            collective.leaving.discard(rank)
            if not collective.leaving:
                self._open.pop(name, None)
            self._ranks[rank].run(collective.told[rank], total)

    def broken_by(self, dead: Rank) -> None:
        """Break the open collectives after a death: waiting ranks hang or fail; some with all they need leave."""
        self._somebody_died = True
        for collective in self._open.values():
            if not collective.complete:
                self._fail_all(collective, sorted(collective.parts))
                collective.parts.clear()
            elif not collective.broken or len(collective.leaving) < 64:  # in a large world the first death is enough
                collective.broken = True
                held = [r for r in sorted(collective.leaving) if self._world.rng.random() < 0.5]
                collective.leaving.difference_update(held)
                self._fail_all(collective, held)

    def _fail_all(self, collective: _Collective, ranks: list[Rank]) -> None:
        for rank in ranks:
            process = self._ranks[rank]
            if process.alive:
                self._fail(process, collective.told[rank])

    def _fail(self, rank: SimRank, told: Told) -> None:
        if self._world.rng.random() < 0.5:  # else it hangs for ever
            soon = self._world.rng.choice((0.0001, 0.01, 0.6)) * self._world.rng.random()
            self._world.after(soon, rank.run, told, None)
