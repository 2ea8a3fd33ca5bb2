"""Simulate a whole job in one thread and in virtual time: the real machines, a toy trainer, and faults.

One seed is one run: ``ttp simulate --seed 7 --trace`` repeats it and prints its trace. A run is good if the job trains
to the end, through as many restarts as its faults cause, every invariant of ``ttp.testing.invariants`` holds all the
time, and the bits are those of a run without faults.

Modelled are: a network that delays and repeats messages and breaks streams (``network``); hosts that are cut off, and
two controllers at a time (``sim_roads``); ranks that die at any point, raise, stand still, get SIGTERM (``sim_rank``);
collectives that some ranks finish and others do not when a rank dies (``sim_collectives``); controllers that die
between two actions of one event and are replaced; savers and committers that fail or hang; redo and undo of updates,
with a barrier where that is needed; snapshots; on request, how ranks that continue in their processes get their state
(``sim_transfers``). Not modelled are: threads, disks (``tests/store`` simulates power cuts), and several jobs on one
port (``tests/core/test_admission.py``).

Every event takes constant time, so jobs of 10^5 ranks can be simulated.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY
from ttp.core.controller.events import Accused, ConnectionId, ControllerTimeouts, SaveRequested
from ttp.core.layout import Rank, Version
from ttp.core.layout_messages import in_parts
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.replication import keepers
from ttp.testing.clock import Clock, Killed
from ttp.testing.invariants import Judge
from ttp.testing.network import RankEnd, Stream
from ttp.testing.scenario import Scenario
from ttp.testing.sim_collectives import Collectives
from ttp.testing.sim_controller import KEEPALIVE_S, SimController
from ttp.testing.sim_copies import Copies
from ttp.testing.sim_faults import Faults
from ttp.testing.sim_memory import HostMemory
from ttp.testing.sim_rank import SimRank
from ttp.testing.sim_roads import GIVES_UP_S, Roads
from ttp.testing.sim_transfers import Transfers
from ttp.testing.toy import InvariantBroken, Pages, ToyState, ToyStorage, hello, mix

PATIENCE = ControllerTimeouts(
    answer_s=0.5,
    freeze_s=2.0,
    grace_s=0.3,
    rescue_s=20.0,
    gather_s=1.0,
    silent_s=1.0,
    quiet_s=0.6,
    meanwhile_s=0.3,
    doubt_s=1.0,
    doubt_max_s=4.0,
    partition_s=1.5,
    stall_s=3.0,
    second_look_s=0.5,
    hope_s=0.3,
    heartbeat_s=0.5,
    exit_s=1.0,
    abandoned_s=40.0,
    forming_s=40.0,
    linger_s=0.2,
)
RANK_TIMEOUTS = RankTimeouts(
    heartbeat_s=0.5,
    rescue_s=20.0,
    retry_min_s=0.01,
    retry_max_s=0.2,
    alone_s=6.0,
    start_controller_after=2,
    failover_s=0.1,
    redo_s=1.0,
    connect_s=0.2,
    doubt_s=1.0,
)
WATCHED_BEAT_S, WATCHED_FLOOR_S = 0.02, 0.1
"""Heartbeat and least patience, in seconds, of jobs with hang detection, which end before a usual heartbeat is due."""
EVENTS_MAX, EVENTS_PER_RANK_MAX = 40_000, 4_000
"""Largest number of events of an incarnation: a fixed part, and a part per rank. More events mean a live-lock."""
PATIENCE_OF_LAUNCHER_S = 30.0
"""Seconds from the first bad end of a process until the launcher kills the others; a good run never needs it."""
INCARNATIONS_MAX = 8


@dataclass(slots=True)
class Result:
    """The result of one run.

    Args:
        seed: the seed of the run.
        events: number of calls that the clock made.
        virtual_s: duration of the run in virtual seconds.
        digest: digest of the trace.
        trace: text of the trace; empty unless it was kept.
        points: how often ranks were at each point of ``scenario.POINTS``.
        exits: exit codes of all ranks of each incarnation; ``None`` means killed. Empty if the run is not good.
        saved: versions of the checkpoints, in the order of their commits. Empty if the run is not good.
        problem: the broken invariant or the error, in words; empty if the run is good.
    """

    seed: int
    events: int
    virtual_s: float
    digest: str
    trace: str
    points: Counter[str]
    exits: Sequence[Sequence[int | None]] = ()
    saved: Sequence[Version] = ()
    problem: str = ""


class Simulation(Clock):
    """One simulated job, and its clock.

    Args:
        scenario: the job and its faults.
        keep_trace: whether to keep the text of the trace; its digest is always computed.
        patience: the timeouts of every controller; the defaults are a fraction of those of real jobs.
        timeouts: the timeouts of every rank; likewise.
        keepalive_s: seconds without an answer from the other end after which gRPC considers a stream dead.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        keep_trace: bool = False,
        patience: ControllerTimeouts = PATIENCE,
        timeouts: RankTimeouts = RANK_TIMEOUTS,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        super().__init__(keep_trace=keep_trace)
        self.scenario, self.layout, self.steps = scenario, scenario.layout, scenario.steps
        self.rng = random.Random(f"run {scenario.seed}")
        self.storage = ToyStorage(self.layout)
        self.keepers = keepers(self.layout)
        """The ranks that keep second copies, with their shards; equal on all ranks, so computed once here."""
        self.judge = Judge(self)
        self.patience, self.timeouts = patience, timeouts
        if scenario.watched:
            self.patience = replace(patience, heartbeat_s=WATCHED_BEAT_S, hang_s=WATCHED_FLOOR_S)
            self.timeouts = replace(timeouts, heartbeat_s=WATCHED_BEAT_S)
        self.roads = Roads(self, self.patience)
        self.keepalive_s, self.roads.gives_up_s = keepalive_s, max(keepalive_s, GIVES_UP_S)
        self.ranks: dict[Rank, SimRank] = {}
        self.collectives = Collectives(self)
        self.points: Counter[str] = Counter()
        self.faults = Faults(self, ())
        self.parts = in_parts(self.layout)
        """The layout in parts, as ranks send it to a controller that asks for it."""
        self._early: dict[Rank, SimRank] = {}
        """Ranks of the next launch that continued in their processes while ranks of this launch still run."""
        self.transfers = Transfers(self) if scenario.transfers else None
        self.memory = HostMemory(self) if scenario.shadow else None
        self.history: dict[int, tuple[Version, str]] = {}
        """Version and path of the last checkpoint of each incarnation, as controllers have recorded it on disk."""
        self._skipped = 0  # launches cut off because the launcher started all ranks anew
        self._hosts: dict[str, Pages] = {}
        self._copies: dict[str, Copies] = {}
        self.barrier = len(self.layout.groups) > 1 and not scenario.undo
        """Whether an update waits until every rank holds its gradient; see ``ttp.adapters.torch.loop.barrier``."""
        self._requests = 0
        self._alive = 0
        self._somebody_died = False

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self) -> Result:
        """Simulate the job until it has trained to the end.

        Raises:
            InvariantBroken: an invariant was broken; the text names the seed and the virtual time.
        """
        exits: list[list[int | None]] = []
        try:
            while not exits or any(code != 0 for code in exits[-1]):
                if len(exits) == INCARNATIONS_MAX:
                    raise InvariantBroken(f"I6: the job does not end: {exits}")
                exits.append(self._incarnation(len(exits)))
            self.judge.trained(self.ranks)
        except Exception as problem:
            problem.args = (f"seed {self.scenario.seed} at {self.now:.6f} s: {problem}",)
            raise
        return replace(self.so_far(), exits=exits, saved=self.judge.saved)

    def so_far(self) -> Result:
        """Return what is known of a run that has not ended well, or not yet."""
        return Result(self.scenario.seed, self.events, self.now, self.digest(), self.text(), self.points)

    def _incarnation(self, launch: int) -> list[int | None]:
        self._launch(launch)
        budget = self.events + EVENTS_MAX + EVENTS_PER_RANK_MAX * self.layout.world_size
        while self._alive:
            if not self.step():
                raise InvariantBroken("I6: ranks are alive but no event is due")
            if self.events > budget:
                raise InvariantBroken("I6: it never ends")
        self.run_until(self.now + self.rng.choice((0.001, 0.05, 1.0)))
        return [self.ranks[r].exit_code for r in sorted(self.ranks)]

    def _launch(self, launch: int) -> None:
        newest = self.storage.newest
        start = self.state_at(newest.version if newest else Version(0))
        self.judge.begin(start)
        self._hosts, self._copies, self._somebody_died = {}, {}, False
        self.trace("launcher", f"starts incarnation {launch} at version {start.version}")
        world_size = self.layout.world_size
        early = self._early_of(launch + self._skipped)
        launch += self._skipped
        seats = [Rank(r) for r in range(world_size) if r not in early]
        self.ranks = early | {r: SimRank(self, self._hello(r, launch), self.timeouts) for r in seats}
        self._alive = world_size
        self.collectives = Collectives(self)
        self.roads.new_incarnation()
        if self.transfers is not None:
            self.transfers.begin(going_on=bool(early))
        faults = self.scenario.faults
        self.faults = Faults(self, faults[launch] if launch < len(faults) else ())

    def goes_on(self, rank: SimRank) -> None:
        """Let a rank continue in its process. It may connect before other ranks have received their release."""
        if self.transfers is not None:
            self.transfers.goes_on(rank)
        if not self.scenario.relays:
            self.after(self.rng.choice((0.0, 0.001, 0.05, 0.5)), self._rejoin, rank)

    def _rejoin(self, old: SimRank) -> None:
        if self.ranks.get(old.rank) is old and old.rank not in self._early:
            self._early[old.rank] = SimRank(self, self._hello(old.rank, old.hello.launch + 1), self.timeouts)

    def _early_of(self, launch: int) -> dict[Rank, SimRank]:
        """Return the ranks of the next launch that run already; none if the launcher restarts all ranks."""
        for rank in self.transfers.gone if self.transfers is not None else ():
            self._rejoin(rank)
        early, self._early = self._early, {}
        went_on = all(r.exit_code is None or r.rank in early for r in self.ranks.values())
        if early and (not went_on or self.rng.random() < 0.2):
            for rank in early.values():
                rank.exit(None)
            self._skipped += 1
            return {}
        return {r: rank for r, rank in early.items() if rank.alive and rank.hello.launch == launch}

    def _hello(self, rank: Rank, launch: int) -> m.Hello:
        here = self.scenario.hosts[rank]
        return hello(
            rank,
            self.layout,
            launch=launch,
            nonce=f"{launch}.{rank}",
            host=here,
            stripes=self.scenario.stripes,
            pid=(launch + 1) * 1_000_000 + rank,
            address=here,
            fallback_dir="/fallback" if self.scenario.fallback else "",
            pages_at=f"{here}:1" if self.scenario.mirror else "",
            copies_at=f"{here}:1" if self.scenario.buddy else "",
            can_continue=self.scenario.keep,
        )

    # ------------------------------------------------------------------------------------------ launcher and operators

    def ended(self, rank: SimRank) -> None:
        """Handle the end of a process: its streams end, and neighbours and the launcher may report the death."""
        early = self.ranks.get(rank.rank) is not rank
        self._alive -= not early
        if rank.stream is not None:
            if rank.exit_code is None:
                late_s = self.roads.learns_late(rank) + self.rng.choice((0.0, 0.001, 0.02, 0.5))
                rank.stream.cut(rank_learns_s=0.0, controller_learns_s=late_s)
            else:
                rank.stream.end()
        rank.aside.died(self.roads.learns_late(rank))
        if self.transfers is not None and not early:
            self.transfers.ended(rank)
        if rank.exit_code != 0 and not early:
            if not self._somebody_died:
                self._somebody_died = True
                self.after(PATIENCE_OF_LAUNCHER_S, self._kill_what_is_left, self.ranks)
            self._neighbours_see(rank)
            told = 0.9 if self.scenario.keep else 0.4
            if self.rng.random() < told and not self.roads.learns_late(rank):  # else the launcher reports nothing
                seat = SEAT_READY if self.scenario.keep else ""
                accused = Accused((rank.rank,), m.FaultKind.EXITED, "exited", (rank.hello.pid,), seat=seat)
                self.after(self.rng.random() * 0.1, self.tell_controller, accused)
        if not early:
            self.collectives.broken_by(rank.rank)

    def _neighbours_see(self, dead: SimRank) -> None:
        """Let another rank of the host see the death, possibly as the first one."""
        if self.rng.random() < 0.5:
            for r in range(dead.rank + 1, dead.rank + 8):
                other = self.ranks[Rank(r % self.layout.world_size)]
                if other.alive and other.host == dead.host:
                    text, nonce = f"rank {dead.rank} has ended", dead.hello.nonce
                    seen = m.Fault(other.rank, dead.rank, m.FaultKind.EXITED, text, nonce=nonce)
                    self.after(self.rng.random() * 0.002, other.run, other.put, ev.Tell(seen))
                    return

    def _kill_what_is_left(self, ranks: dict[Rank, SimRank]) -> None:
        """End a launch long after its first death; only a job that has not trained yet may need this."""
        if ranks is self.ranks:
            self.end_by_hand()

    def end_by_hand(self) -> None:
        """Kill all ranks, as an operator would, after a check that this was necessary."""
        self.judge.needed_the_launcher([r for r in self.ranks.values() if not self.roads.nobody_to_ask(r)])
        for rank in self.ranks.values():
            rank.exit(None)

    def tell_controller(self, event: Accused | SaveRequested) -> None:
        """Give an event from outside the job to the controller, if one lives."""
        controller = self.roads.controller
        if controller is not None:
            controller.on_event(event)

    def next_request(self) -> int:
        """Return a new number for a request to save."""
        self._requests += 1
        return self._requests

    # -------------------------------------------------------------------------------------------------- for the ranks

    def stream(self, rank: RankEnd, controller: SimController, connection: ConnectionId) -> Stream:
        """Open a stream."""
        s = self.scenario
        return Stream(self, self.rng, rank, controller, connection, delay_s=s.delay_s, repeats=s.repeats)

    def delay(self) -> float:
        """Return the seconds that opening a connection takes."""
        return self.scenario.delay_s * (0.5 + self.rng.random())

    def reached(self, point: str, rank: SimRank) -> None:
        """Record that a rank is at a point of ``scenario.POINTS``. Raises ``Killed`` if the rank is dead then."""
        self.points[point] += 1
        self.faults.reached(point, rank)
        if self.transfers is not None and rank.alive:
            self.transfers.reached(point, rank)
        if not rank.alive:
            raise Killed

    # ---------------------------------------------------------------------------------------------------------- storage

    def state_at(self, version: Version) -> ToyState:
        """Return the state of ``version`` that ranks restore. A rank whose page was lost gets a new random stream."""
        if version == self.judge.base.version:
            return self.judge.base
        found = self.storage.checkpoints[version]
        random_words = {Rank(r): found.random.get(Rank(r), mix("again", r)) for r in range(self.layout.world_size)}
        if len(found.random) < self.layout.world_size:
            self.judge.approximate = True
        return ToyState(version, dict(found.shards), random_words)

    def pages(self, host: str) -> Pages:
        """Return the pages in the shared memory of a host."""
        return self._hosts.setdefault(host, {})

    def copies(self, host: str) -> Copies:
        """Return the second copies in the memory of a host."""
        return self._copies.setdefault(host, {})

    def commit(self, order: m.Commit) -> None:
        """Commit a draft."""
        self.storage.commit(order)
        if self.memory is not None:
            self.memory.committed(order)
        self.judge.committed(order.version)
