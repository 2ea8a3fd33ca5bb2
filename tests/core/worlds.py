"""Enumerates every quiet state in which ``shards x replicas`` ranks can be left when some of them are killed.

The model of one step of one rank, and its waits:

==============  ========================================================================================================
computing       forward and backward; the gradient of every group depends on every rank's part
in the reduce   of its replica group; over when all of the group have arrived and all ranks have begun this step
reduced         holds the final gradient
in the barrier  over all ranks; over when all have arrived. Without a barrier no rank waits here
passed          about to write
updating        torn if killed here
==============  ========================================================================================================

A rank that dies while computing may or may not have given other groups what they need. A rank that dies in a collective
that was complete leaves its neighbours in one of two ways: an *atomic* collective lets all of them go, or none; from a
*real* one some get away and others hang. A state is quiet when no further event has to happen. Two quiet states are the
same when the dead ranks died at the same points and the living ranks have the same version and gradient. States are
counted if a rank was killed and every shard has a living copy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from ttp.core.answer import Answer
from ttp.core.layout import Layout, Rank, Version
from ttp.testing.scenario import grid

COMPUTING, REDUCING, REDUCED, AT_BARRIER, PASSED, UPDATING, PHASES = range(7)

Position = tuple[int, bool]
"""(phases since the beginning, alive); ``phases // PHASES`` is the version."""
State = tuple[Position, ...]


class Barrier(enum.Enum):
    """The kind of barrier between the gradients' reduction and the update."""

    ATOMIC = "atomic"
    REAL = "real"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class World:
    """``shards * replicas`` ranks that do ``steps`` steps, of which up to ``kills`` die; see the module."""

    shards: int
    replicas: int
    kills: int
    barrier: Barrier
    steps: int

    @property
    def layout(self) -> Layout:
        """Rank r holds shard ``r % shards``."""
        return grid(self.shards, self.replicas)

    def quiet(self) -> set[State]:
        """Return one state of every kind with a dead rank and a living copy of every shard."""
        kinds: dict[tuple[object, ...], State] = {}
        for state in self._reach():
            living = {r % self.shards for r, (_, alive) in enumerate(state) if alive}
            if len(living) == self.shards and not all(alive for _, alive in state):
                kinds.setdefault(_kind(state), state)
        return set(kinds.values())

    def _reach(self) -> Iterator[State]:
        start: State = ((0, True),) * (self.shards * self.replicas)
        seen, stack = {start}, [start]
        while stack:
            state = stack.pop()
            moves = list(self._moves(state))
            if not any(forced for _, forced in moves):
                yield state
            successors = [after for after, _ in moves]
            if sum(not alive for _, alive in state) < self.kills:
                successors += [_with(state, [r], p, alive=False) for r, (p, alive) in enumerate(state) if alive]
            fresh = set(successors) - seen
            seen |= fresh
            stack.extend(fresh)

    def _moves(self, state: State) -> Iterator[tuple[State, bool]]:
        """Yield the moves that may happen next, and whether each has to happen."""
        for rank, (p, alive) in enumerate(state):
            step, phase = divmod(p, PHASES)
            if not alive or step >= self.steps:
                continue
            if phase == COMPUTING:
                yield _with(state, [rank], p + 1), (p, False) not in state
            elif phase == REDUCING:
                if all(q >= step * PHASES for q, _ in state):
                    group = range(rank % self.shards, len(state), self.shards)
                    yield from self._leave(state, rank, list(group), real=self.barrier is Barrier.REAL)
            elif phase == AT_BARRIER:
                yield from self._leave(state, rank, list(range(len(state))), real=self.barrier is Barrier.REAL)
            elif phase == REDUCED and self.barrier is Barrier.NONE:
                yield _with(state, [rank], p + PASSED - REDUCED), True
            else:
                yield _with(state, [rank], p + 1), True

    def _leave(self, state: State, rank: int, group: list[int], *, real: bool) -> Iterator[tuple[State, bool]]:
        p = state[rank][0]
        if any(state[r][0] < p for r in group):
            return  # somebody has not arrived
        if real:
            yield _with(state, [rank], p + 1), all(state[r][1] for r in group)
        elif p % PHASES == REDUCING or (p, False) not in state:
            yield _with(state, [r for r in group if state[r] == (p, True)], p + 1), True


def _with(state: State, ranks: list[int], position: int, *, alive: bool = True) -> State:
    after = list(state)
    for rank in ranks:
        after[rank] = (position, alive)
    return tuple(after)


def _kind(state: State) -> tuple[object, ...]:
    return tuple((p // PHASES, p % PHASES >= REDUCED) if alive else p for p, alive in state)


def answers(state: State, *, undo: bool = False, redo: bool = False) -> tuple[Answer, ...]:
    """Return the answers of the living ranks of a quiet state when they are frozen."""
    return tuple(
        Answer(
            Rank(r),
            Version(p // PHASES),
            has_gradient=redo and p % PHASES >= REDUCED,
            has_preimage=undo and p >= PHASES,
        )
        for r, (p, alive) in enumerate(state)
        if alive
    )
