"""Simulated all-reduces and barriers. When a rank dies in one, some ranks finish it, some fail and some hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ttp.core.layout import Rank
from ttp.testing.toy import reduce

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation


Told = Callable[[int | None], None]
"""A callback that gets the result of the collective; None if the collective failed."""


@dataclass(slots=True)
class _Collective:
    parts: dict[Rank, int] = field(default_factory=dict)
    told: dict[Rank, Told] = field(default_factory=dict)
    leaving: set[Rank] = field(default_factory=set)
    complete: bool = False
    broken: bool = False


class Collectives:
    """The collectives of one incarnation. Handling an arrival takes constant time.

    Args:
        world: the simulation.
    """

    def __init__(self, world: Simulation) -> None:
        self._world, self._ranks = world, world.ranks
        self._open: dict[tuple[str, int], _Collective] = {}
        self._somebody_died = False

    def arrive(self, rank: SimRank, name: tuple[str, int], part: int, told: Told) -> None:
        """Let a rank join a collective.

        Args:
            rank: the rank.
            name: name and number of the collective.
            part: the rank's part of the sum.
            told: is called with the sum, or with None if the collective fails.
        """
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
        """Break the open collectives after a death.

        Ranks that wait for others hang or fail. Where all ranks had arrived, some still leave with the result.
        """
        self._somebody_died = True
        for collective in self._open.values():
            if not collective.complete:
                self._fail_all(collective, sorted(collective.parts))
                collective.parts.clear()
            elif not collective.broken or len(collective.leaving) < 64:  # in a large job only the first death counts
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
        if self._world.rng.random() < 0.5:  # else the rank hangs forever
            soon = self._world.rng.choice((0.0001, 0.01, 0.6)) * self._world.rng.random()
            self._world.after(soon, rank.run, told, None)
