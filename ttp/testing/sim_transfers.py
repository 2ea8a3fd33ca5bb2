"""How the ranks of a launch with survivors get their state: kept in memory, sent by another rank, or read from disk.

As in ``ttp.adapters.torch.restoring.registered``, all ranks of such a launch meet after the decision which version to
restore: once when each has verified its share of the checkpoint, and once to exchange which ranks have a state. Then
the givers send theirs, in several messages. ``ttp.core.rank.kept_state`` decides what is kept, adopted and given. The
messages are torch's collectives, so the machines do not see them: if one end dies, the other gets an error or hangs.

Until its first update each rank of such a launch is marked, and has ``CONTINUE_S`` to make that update. The launcher
kills marked ranks when another process of the launch ends, or when they have not left by themselves after that time.

Not modelled: the set-up of the process groups, and damaged messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank.kept_state import Look, Origin, givers, why_not_adopted, why_not_kept
from ttp.errors import EXIT_SAVED
from ttp.testing.invariants import largest_version
from ttp.testing.sim_trainer import Thread
from ttp.testing.toy import InvariantBroken, Words

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation

CONTINUE_S, LATE_S = 30.0, 0.5
"""Seconds in which a marked rank has to make its first update, and seconds after that until its launcher kills it."""
HAS_GRADIENT = 4
"""Value of ``Trainer.mark`` from which on the rank has the reduced gradient: it is in the barrier or at the gate."""
MESSAGES = 4
"""Number of messages of one transfer: the description of the state, its tensors in two parts, and their digest."""
State = tuple[Origin, Mapping[Shard, Words]]
"""A kept state, and where it comes from."""


class Transfers:
    """The transfers of one simulation.

    Args:
        world: the simulation.
    """

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._looks: dict[SimRank, Look] = {}
        self._kept: dict[Rank, State] = {}
        self._marked: dict[SimRank, float] = {}
        self._holders: set[Rank] = set()
        self._open: dict[tuple[Rank, Rank, int], SimRank] = {}
        """The rank that waits for its peer, by message (giver, taker, number)."""
        self.gone: list[SimRank] = []
        """The ranks of this launch that were released to continue in their processes."""

    def begin(self, *, going_on: bool) -> None:
        """Begin a launch.

        Args:
            going_on: whether survivors of the last launch are in it.
        """
        self._looks, self._marked, self._open = {}, {}, {}
        self._holders, self.gone = set(), []
        if not going_on:
            self._kept = {}
            return
        for rank in self._world.ranks.values():
            self._marked[rank] = self._world.now
            self._world.after(CONTINUE_S, rank.run, self._over, rank)
            self._world.after(CONTINUE_S + LATE_S, self._end_late, rank)

    def goes_on(self, rank: SimRank) -> None:
        """Let a released rank keep its state, if the state has not changed since the freeze."""
        self.gone.append(rank)
        if self._world.rng.random() < 0.1:  # the program has written to its state since the freeze
            shard, (word, other) = next(iter(rank.trainer.shards.items()))
            rank.trainer.shards[shard] = (word + 1, other)
        version, phase = rank.truth
        if not why_not_kept(self._looks.get(rank), _look(rank), version, phase):
            self._kept[rank.rank] = Origin(version, rank.machine.incident), dict(rank.trainer.shards)

    def reached(self, point: str, rank: SimRank) -> None:
        """Record that a rank is at a point of its step."""
        if point == "after Frozen" and rank.acked:
            self._looks[rank] = _look(rank)
        elif point in ("in barrier", "before update") and rank in self._marked:
            self._begins(rank)

    def _begins(self, rank: SimRank) -> None:
        base, version = self._world.judge.base, rank.trainer.gate.version
        if version != base.version or any(base.shards[s] != words for s, words in rank.trainer.shards.items()):
            raise InvariantBroken(f"I9: rank {rank.rank} trains on with a state other than that of step {base.version}")
        if self._world.now > self._marked.pop(rank) + CONTINUE_S + LATE_S:
            raise InvariantBroken(f"I9: rank {rank.rank} makes its first update after its time limit")

    # ---------------------------------------------------------------------------------------------- the training thread

    def state(self, rank: SimRank, version: Version) -> Thread:
        """Put the state of ``version`` for a marked rank into ``trainer.received``: the one that it kept, or a giver's.

        It stays None if there is neither; then the rank reads the checkpoint.
        """
        rank.trainer.received = None
        if rank not in self._marked:
            return
        yield from self._meet(rank, "verified")
        found = self._world.storage.checkpoints.get(version)
        kept = self._kept.pop(rank.rank, None)
        if kept is not None and found is not None and not why_not_adopted(kept[0], Origin(version, found.incident)):
            rank.trainer.received = dict(kept[1])
            self._holders.add(rank.rank)
        yield from self._meet(rank, "said")
        plan = givers(self._world.layout, sorted(self._holders))
        for other in [other for other, giver in plan.items() if giver == rank.rank]:
            yield from self._send(rank, self._world.ranks[other], "sending")
        if rank.rank in plan:
            giver = self._world.ranks[plan[rank.rank]]
            yield from self._send(rank, giver, "receiving")
            assert giver.trainer.received is not None
            mine = self._world.layout.shards_of(rank.rank)
            rank.trainer.received = {s: giver.trainer.received[s] for s in mine}
        self._world.reached("received", rank)

    def _meet(self, rank: SimRank, name: str) -> Thread:
        self._world.reached(name, rank)
        self._world.collectives.arrive(rank, (name, 0), 0, rank.trainer.go_on)
        yield from self._wait(rank)

    def _send(self, rank: SimRank, other: SimRank, point: str) -> Thread:
        """Run one end of the transfer between ``rank`` and ``other``; ``point`` says which, sending or receiving."""
        world = self._world
        giver, taker = (rank, other) if point == "sending" else (other, rank)
        for number in range(MESSAGES):
            world.reached(point, rank)
            place = giver.rank, taker.rank, number
            if self._open.pop(place, None) is not None:
                takes_s = world.delay() + sum(world.faults.extra_s("transfer", end) for end in (rank, other))
                if takes_s < float("inf"):  # else both ends hang
                    for end, peer in ((rank, other), (other, rank)):
                        world.after(takes_s * (1 + world.rng.random()), end.run, self._arrives, end, peer)
            else:
                self._open[place] = rank
                if not other.alive:
                    self._broken(place)
            yield from self._wait(rank)

    def _arrives(self, rank: SimRank, peer: SimRank) -> None:
        if peer.alive or self._world.rng.random() < 0.5:
            rank.trainer.go_on(0)
        else:
            self._fail(rank)

    def _wait(self, rank: SimRank) -> Thread:
        """Wait for the other ranks; exit with 75 on an error."""
        given = yield None
        if given is None:
            self._leave(rank, "has met an error on its way")

    def _leave(self, rank: SimRank, why: str) -> None:
        self._world.trace(rank.name, why)
        rank.exit(EXIT_SAVED)
        self._world.reached("", rank)  # raises Killed, which ends the running call of the process

    # ------------------------------------------------------------------------------------------ the ends of processes

    def ended(self, rank: SimRank) -> None:
        """Handle the end of a process: its peers in transfers hang or fail, and the launcher restarts all ranks."""
        self._marked.pop(rank, None)
        for place in [place for place in self._open if rank.rank in place[:2] and self._open[place] is not rank]:
            self._broken(place)
        if self._marked and rank.exit_code != 0:
            self._world.after(self._world.rng.random() * 0.1, self._start_anew, self._world.ranks)

    def _broken(self, place: tuple[Rank, Rank, int]) -> None:
        self._fail(self._open.pop(place))

    def _fail(self, rank: SimRank) -> None:
        if self._world.rng.random() < 0.5:  # else the rank hangs forever
            self._world.after(self._world.rng.random() * 0.01, rank.run, rank.trainer.go_on, None)

    def _over(self, rank: SimRank) -> None:
        if rank in self._marked:
            self._leave(rank, f"did not go on within {CONTINUE_S:g} s")

    def _end_late(self, rank: SimRank) -> None:
        if rank in self._marked:
            self._kill(rank)

    def _start_anew(self, ranks: Mapping[Rank, SimRank]) -> None:
        for rank in list(self._marked) if ranks is self._world.ranks else ():
            self._kill(rank)

    def _kill(self, rank: SimRank) -> None:
        """Kill a rank that has not made its first update, after a check that no finished version is lost thereby."""
        world = self._world
        held = {r: {each.trainer.gate.version} for r, each in world.ranks.items() if each.alive and each is not rank}
        newest = max((v for versions in held.values() for v in versions), default=Version(0))
        able = {newest} if rank.trainer.mark >= HAS_GRADIENT else set()
        wanted = largest_version(world.layout, held | {rank.rank: able}, {}) == newest > world.judge.base.version
        if wanted and largest_version(world.layout, held, {}) != newest:
            raise InvariantBroken(f"I9: rank {rank.rank} is killed before its first update; others finished {newest}")
        world.trace(rank.name, "is on its way, and all are started anew")
        rank.exit(None)


def _look(rank: SimRank) -> Look:
    shards = sorted(rank.trainer.shards.items())
    return Look(rank.trainer.gate.version, tuple(map(str, shards)), ())
