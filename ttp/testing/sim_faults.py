"""Injects the faults of a simulated incarnation. ``scenario.KINDS`` explains them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core.controller.events import Accused, SaveRequested
from ttp.core.layout import Rank
from ttp.testing.scenario import Fault

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation

OPERATOR_S = 8.0
"""Seconds after which an operator reports a rank that stands still; see ``ttp report-fault``."""
OPERATOR_REPEATS_S, OPERATOR_TRIES = 2.0, 20
"""Seconds between the operator's reports, and their number before the operator ends the job by hand."""
NEVER = float("inf")
TINY_S = 1e-9
"""Added to the time for which a disk refuses, so that a fault of 0 s refuses once."""
RESTARTS = {"controller": 0, "controller_restart": 1, "controller_twice": 2}


class Faults:
    """Injects the faults of one incarnation.

    Args:
        world: the simulation, with its ranks.
        faults: the faults to inject.
    """

    def __init__(self, world: Simulation, faults: tuple[Fault, ...]) -> None:
        self._world, self._ranks = world, world.ranks
        self._at_points: dict[tuple[str, Rank], list[tuple[list[int], Fault]]] = {}
        self._raises: Counter[tuple[str, Rank]] = Counter()
        self._refuses: dict[tuple[str, Rank], float] = {}
        self._heals_at: dict[tuple[str, Rank], float] = {}
        self._slow: dict[tuple[str, Rank], float] = {}
        for fault in faults:
            self._plan(fault)

    def _plan(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                self._raises[fault.point, fault.rank] = int(fault.at)
            case "write" | "commit" | "sync":
                self._refuses[fault.kind, fault.rank] = fault.lasts_s
            case "slow" | "transfer":
                self._slow[fault.kind, fault.rank] = fault.lasts_s
            case _ if fault.point:
                self._at_points.setdefault((fault.point, fault.rank), []).append(([int(fault.at)], fault))
            case _:
                self._world.after(fault.at, self._strike, fault)

    # -------------------------------------------------------------------------------------------- for ranks and savers

    def reached(self, point: str, rank: SimRank) -> None:
        """Inject the faults that are planned for this visit of the rank to this point."""
        if self._at_points:
            for left, fault in self._at_points.get((point, rank.rank), ()):
                left[0] -= 1
                if left[0] == 0:
                    self._world.trace(rank.name, f"is {point}: {fault.kind}")
                    self._strike(fault)

    def raises(self, rank: SimRank, where: str) -> bool:
        """Return whether the training code raises now, at ``where``."""
        if self._raises and self._raises[where, rank.rank]:
            self._raises[where, rank.rank] -= 1
            return not self._raises[where, rank.rank]
        return False

    def refuses(self, kind: str, rank: SimRank) -> bool:
        """Return whether the disk refuses a ``write``, a ``commit`` or the ``sync`` after it now."""
        lasts_s, now = self._refuses.get((kind, rank.rank)), self._world.now
        return lasts_s is not None and now < self._heals_at.setdefault((kind, rank.rank), now + lasts_s) + TINY_S

    def extra_s(self, kind: str, rank: SimRank) -> float:
        """Return the extra seconds that a file (``slow``) or a message (``transfer``) takes; may be infinite."""
        return self._slow.get((kind, rank.rank), 0.0)

    # -------------------------------------------------------------------------------------------------------- injection

    def _strike(self, fault: Fault) -> None:
        rank, world = self._ranks[fault.rank], self._world
        if self._ranks is not world.ranks:
            return  # the fault belongs to an incarnation that is over
        match fault.kind:
            case "kill":
                rank.exit(None)
            case "host":
                self._host_dies(rank.host)
            case "power":
                world.roads.lose_power(rank.host)
                self._host_dies(rank.host)
            case "silence":
                world.roads.fall_silent(rank.host, fault.lasts_s)
            case "stop" | "silent":
                self._stop(rank, fault)
            case "hang":
                rank.trainer.hang(fault.lasts_s)
                self._watch(rank, fault)
            case "leave":
                rank.trainer.leave_gate()
            case "relay":
                world.roads.relay_dies(rank.host)
            case "flap":
                world.roads.block(rank, fault.lasts_s)
            case "partition":
                world.roads.cut_off(rank.host, fault.lasts_s)
            case "split":
                world.roads.split(fault.lasts_s)
            case "controller" | "controller_restart" | "controller_twice":
                soon = world.rng.random() * 2 * world.scenario.delay_s if fault.point else 0.0
                world.after(soon, self._kill_controller, RESTARTS[fault.kind])
            case "controller_stop":
                if world.roads.controller is not None:
                    world.roads.controller.stop(fault.lasts_s)
            case "sigterm":
                for each in self._ranks.values():
                    world.after(world.rng.random() * 0.01, each.run, each.preempt)
            case "save":
                world.tell_controller(SaveRequested(world.next_request(), "asked"))

    def _host_dies(self, host: str) -> None:
        self._world.trace(host, "loses power")
        self._world.roads.relay_dies(host)
        self._world.pages(host).clear()
        self._world.copies(host).clear()
        for rank in self._ranks.values():
            if rank.host == host:
                rank.exit(None)
        self._world.roads.host_died(host)

    def _stop(self, rank: SimRank, fault: Fault) -> None:
        if not rank.alive or rank.stopped:
            return
        rank.stop(fault.lasts_s)
        self._watch(rank, fault)
        if fault.kind == "stop" and fault.lasts_s > self._world.keepalive_s:
            self._world.after(self._world.keepalive_s * (1 + self._world.rng.random()), self._not_kept_alive, rank)

    def _not_kept_alive(self, rank: SimRank) -> None:
        if rank.stopped and rank.stream is not None:
            rank.stream.cut(rank_learns_s=0.0, controller_learns_s=0.0)

    def _watch(self, rank: SimRank, fault: Fault) -> None:
        if fault.lasts_s > OPERATOR_S:
            self._world.after(OPERATOR_S, self._operator, rank, OPERATOR_TRIES)

    def _operator(self, rank: SimRank, tries: int) -> None:
        if not (rank.alive and (rank.stopped or rank.trainer.hanging)):
            return
        if tries == 0:
            self._world.end_by_hand()
            return
        self._world.judge.operator_came(self._world.roads.controller, rank)
        accused = Accused((rank.rank,), m.FaultKind.OUTSIDE, "does not move", (rank.hello.pid,))
        self._world.tell_controller(accused)
        self._world.after(OPERATOR_REPEATS_S, self._operator, rank, tries - 1)

    def _kill_controller(self, restarts: int) -> None:
        controller, rng = self._world.roads.controller, self._world.rng
        if controller is None:
            return
        controller.restarts = restarts
        if rng.random() < 0.5:
            controller.kill()
        else:
            controller.kill_in(events=rng.randint(1, 30), actions=rng.randint(0, 4))
