"""A whole job in one thread and in virtual time: real machines, a toy trainer, and everything that goes wrong.

One seed is one run: ``python -m ttp.testing.simulation --seed 7 --trace`` repeats it and prints what happened. A run
ends well when the job was trained to the end, through as many restarts as its faults cause, with every invariant of
``ttp.testing.invariants`` held at every moment and the bits of a run without faults.

What is modelled: a network that delays, breaks streams and repeats messages (``network``); ranks that die at any point,
raise, get SIGTERM (``sim_rank``); collectives that some ranks leave and others do not when one dies; controllers that
die between two actions of one event and are replaced; savers and committers that fail; snapshots. What is not: threads,
disks (``tests/store`` pulls that plug), several jobs on one port (``tests/core/test_controller_machine.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ttp.core import messages as m
from ttp.core import processor_machine as pm
from ttp.core.controller_events import Accused, Patience, SaveRequested
from ttp.core.layout import Rank, Version
from ttp.testing.invariants import Judge
from ttp.testing.network import Stream
from ttp.testing.scenario import Fault, Scenario, random_scenario
from ttp.testing.sim_controller import SimController
from ttp.testing.sim_rank import Killed, Pages, SimRank
from ttp.testing.toy import InvariantBroken, ToyState, ToyStorage, mix, reduce

PATIENCE = Patience(
    answer_s=0.5, freeze_s=2.0, grace_s=0.3, rescue_s=20.0, gather_s=1.0, exit_s=1.0, abandoned_s=40.0, linger_s=0.2
)
MANNERS = pm.Manners(
    heartbeat_s=5.0, rescue_s=20.0, retry_min_s=0.01, retry_max_s=0.2, alone_s=6.0, start_controller_after=2
)
EVENTS_MAX = 40_000
"""Budget of one incarnation: more is a live-lock."""
PATIENCE_OF_LAUNCHER_S = 30.0
"""After a process has ended badly a launcher waits so long for the others, then it kills them: it never has to."""
INCARNATIONS_MAX = 8


@dataclass(slots=True)
class Result:
    """How a run ended."""

    incarnations: int
    events: int
    exits: list[list[int | None]]
    digest: str
    trace: list[str]
    points: Counter[str]


@dataclass(slots=True)
class _Collective:
    parts: dict[Rank, int] = field(default_factory=dict)
    leaving: set[Rank] = field(default_factory=set)


class Simulation:
    """See the module.

    Args:
        scenario: the job and its faults.
        keep_trace: keep the text of the trace; its digest is always made.
    """

    def __init__(self, scenario: Scenario, *, keep_trace: bool = False) -> None:
        self.scenario, self.layout, self.steps = scenario, scenario.layout, scenario.steps
        self.now = 0.0
        self.rng = random.Random(f"run {scenario.seed}")
        self.storage = ToyStorage(self.layout)
        self.judge = Judge(self)
        self.controller: SimController | None = None
        self.ranks: dict[Rank, SimRank] = {}
        self.points: Counter[str] = Counter()
        self.launch = 0
        self.start = ToyState.initial(self.layout)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._events = 0
        self._lines: list[str] = []
        self._keep_trace = keep_trace
        self._hash = hashlib.sha256()
        self._connections = itertools.count(1)
        self._requests = itertools.count(1)
        self._collectives: dict[int, _Collective] = {}
        self._hosts: dict[str, Pages] = {}
        self._faults: list[Fault] = []
        self._blocked_until: dict[Rank, float] = {}
        self._at_points: dict[tuple[str, Rank], list[list[Any]]] = {}
        self._raises: Counter[tuple[str, Rank]] = Counter()
        self._first_death: float | None = None

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self) -> Result:
        """Train to the end.

        Raises:
            InvariantBroken: with the seed in its text.
        """
        exits: list[list[int | None]] = []
        try:
            while not exits or any(exits[-1]) or None in exits[-1]:
                if len(exits) == INCARNATIONS_MAX:
                    raise InvariantBroken(f"I6: the job does not end: {exits}")
                exits.append(self._incarnation(len(exits)))
            self.judge.trained(self.ranks)
        except Exception as problem:
            problem.args = (f"seed {self.scenario.seed} at {self.now:.6f} s: {problem}",)
            raise
        return Result(len(exits), self._events, exits, self._hash.hexdigest(), self._lines, self.points)

    def _incarnation(self, launch: int) -> list[int | None]:
        self.launch = launch
        newest = self.storage.newest
        self.start = self.state_at(newest.version if newest else Version(0))
        self.judge.begin(self.start)
        self._collectives, self._first_death = {}, None
        self._hosts = {}
        self.trace("launcher", f"starts incarnation {launch} at version {self.start.version}")
        for r in range(self.layout.world_size):
            self.ranks[Rank(r)] = SimRank(self, self._hello(Rank(r)), MANNERS)
        self._plan_faults(self.scenario.faults[launch] if launch < len(self.scenario.faults) else ())
        budget = self._events + EVENTS_MAX
        while any(r.alive for r in self.ranks.values()):
            if not self._queue or self._events > budget:
                raise InvariantBroken("I6: nothing happens any more" if not self._queue else "I6: it never ends")
            self._next()
            self._launcher()
        self.after(self.rng.choice((0.01, 0.5, 2.0)), lambda: None)
        pause_until = self.now + self.rng.choice((0.001, 0.05, 1.0))
        while self._queue and self._queue[0][0] <= pause_until:
            self._next()
        return [self.ranks[r].exit_code for r in sorted(self.ranks)]

    def _next(self) -> None:
        self.now, _, what = heapq.heappop(self._queue)
        self._events += 1
        what()

    def _launcher(self) -> None:
        """Kill what is left long after the first death; only a job that has not trained yet may need that."""
        if self._first_death is None or self.now < self._first_death + PATIENCE_OF_LAUNCHER_S:
            return
        self.judge.needed_the_launcher(self.ranks)
        for rank in self.ranks.values():
            rank.exit(None)

    def _hello(self, rank: Rank) -> m.Hello:
        return m.Hello(
            rank=rank,
            protocol_major=m.PROTOCOL_MAJOR,
            protocol_minor=m.PROTOCOL_MINOR,
            ttp_version="0",
            run_id="job",
            launch=self.launch,
            incarnation=0,
            nonce=f"{self.launch}.{rank}",
            world_size=self.layout.world_size,
            layout_digest=self.layout.digest,
            groups=tuple(m.ShardGroup(s, ranks) for s, ranks in self.layout.groups.items()),
            host=self.scenario.hosts[rank],
            pid=1000 * (self.launch + 1) + rank,
            local_rank=rank,
            save_dir="/save",
            framework="toy",
            version=Version(0),
            phase=m.Phase.IDLE,
            base_version=Version(0),
            term_seen=0,
            incident="",
            released=False,
            resume=False,
        )

    # ------------------------------------------------------------------------------------------------- for the others

    def at(self, when: float, what: Callable[[], None]) -> None:
        """See ``Clock``."""
        heapq.heappush(self._queue, (when, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """``at``, from now."""
        self.at(self.now + seconds, what)

    def trace(self, who: str, what: str) -> None:
        """Write down what happens."""
        line = f"{self.now:10.6f} {who:12} {what}"
        self._hash.update(line.encode())
        if self._keep_trace:
            self._lines.append(line)

    def state_at(self, version: Version) -> ToyState:
        """What a rank loads. A page that nobody could read is made again, and then no bits are promised."""
        if version == 0:
            return ToyState.initial(self.layout)
        found = self.storage.checkpoints[version]
        random_words = {Rank(r): found.random.get(Rank(r), mix("again", r)) for r in range(self.layout.world_size)}
        if len(found.random) < self.layout.world_size:
            self.judge.approximate = True
        return ToyState(version, dict(found.shards), random_words)

    def pages(self, host: str) -> Pages:
        """The shared memory of a host."""
        return self._hosts.setdefault(host, {})

    def connect(self, rank: SimRank, start_controller: bool) -> None:
        """A rank opens a stream; when nobody listens it may start a controller."""
        self.after(self._delay(), lambda: self._connect(rank, start_controller))

    def _connect(self, rank: SimRank, start_controller: bool) -> None:
        if not rank.alive:
            return
        blocked = self._blocked_until.get(rank.rank, 0.0) > self.now
        if not blocked and start_controller and (self.controller is None or not self.controller.alive):
            self.start_controller()
        if blocked or self.controller is None or not self.controller.alive:
            rank.on_down(None)
            return
        stream = self.controller.accept(self, rank, next(self._connections))
        self.after(self._delay(), lambda: self._attach(rank, stream))

    def _attach(self, rank: SimRank, stream: Stream) -> None:
        if not rank.alive:
            stream.end()
        elif stream.open:
            rank.attached(stream)
        else:
            rank.on_down(None)  # it broke before it was of any use

    def start_controller(self) -> None:
        """Its predecessor is dead or there was none."""
        self.controller = SimController(self, PATIENCE)
        self.trace("controller", "starts")

    def stream(self, rank: SimRank, controller: SimController, connection: int) -> Stream:
        """A new stream."""
        s = self.scenario
        return Stream(self, self.rng, rank, controller, connection, delay_s=s.delay_s, repeats=s.repeats)  # type: ignore[arg-type]

    def ended(self, rank: SimRank) -> None:
        """A process is gone, its stream with it."""
        if rank.stream is not None:
            if rank.exit_code is None:
                rank.stream.cut(rank_learns_s=0.0, controller_learns_s=self.rng.choice((0.0, 0.001, 0.02, 0.5)))
            else:
                rank.stream.end()
        if rank.exit_code != 0:
            self._first_death = self.now if self._first_death is None else self._first_death
            if self.rng.random() < 0.4:
                accused = Accused((rank.rank,), m.FaultKind.EXITED, "exited", (rank.hello.pid,))
                self.after(self.rng.random() * 0.1, lambda: self._tell_controller(accused))
        self._break_collectives(rank.rank)

    def _tell_controller(self, event: Accused | SaveRequested) -> None:
        if self.controller is not None:
            self.controller.on_event(event)

    def _delay(self) -> float:
        return self.scenario.delay_s * (0.5 + self.rng.random())

    # ----------------------------------------------------------------------------------------------------- collectives

    def arrive(self, rank: SimRank, step: int, part: int) -> None:
        """A rank brings its part of the gradient of ``step``."""
        collective = self._collectives.setdefault(step, _Collective())
        collective.parts[rank.rank] = part
        if len(collective.parts) < self.layout.world_size:
            if not all(r.alive for r in self.ranks.values()):
                self._fail(rank)
            return
        gradient = reduce(collective.parts.values())
        for r in sorted(self.ranks):
            collective.leaving.add(r)
            self.after(self.rng.random() * 0.002, lambda rank=self.ranks[r]: self._leave(collective, rank, gradient))  # type: ignore[misc]

    def _leave(self, collective: _Collective, rank: SimRank, gradient: int) -> None:
        if rank.rank in collective.leaving:
            collective.leaving.discard(rank.rank)
            rank.resume(gradient)

    def _break_collectives(self, dead: Rank) -> None:
        """Whoever waits for a dead rank hangs or raises; of those that have all they need some get away."""
        for collective in self._collectives.values():
            waiting = sorted(collective.leaving or collective.parts)
            complete = len(collective.parts) == self.layout.world_size
            for r in waiting:
                if r == dead or not self.ranks[r].alive:
                    continue
                if not complete:
                    self._fail(self.ranks[r])
                elif r in collective.leaving and self.rng.random() < 0.5:
                    collective.leaving.discard(r)
                    self._fail(self.ranks[r])
            if not complete:
                collective.parts.clear()

    def _fail(self, rank: SimRank) -> None:
        if self.rng.random() < 0.5:  # else it hangs for ever
            self.after(self.rng.choice((0.0001, 0.01, 0.6)) * self.rng.random(), lambda: rank.resume(None))

    # ---------------------------------------------------------------------------------------------------------- faults

    def _plan_faults(self, faults: tuple[Fault, ...]) -> None:
        self._at_points.clear()
        self._raises.clear()
        self._blocked_until.clear()
        self._faults = list(faults)
        for fault in faults:
            rank = self.ranks[fault.rank]
            match fault.kind:
                case "kill":
                    self.after(fault.at, lambda rank=rank: rank.exit(None))  # type: ignore[misc]
                case "kill_at" | "flap_at" | "controller_at":
                    self._at_points.setdefault((fault.point, fault.rank), []).append([int(fault.at), fault])
                case "raise":
                    self._raises[fault.point, fault.rank] = int(fault.at)
                case "flap":
                    self.after(fault.at, lambda rank=rank, s=fault.lasts_s: self._flap(rank, s))  # type: ignore[misc]
                case "controller":
                    self.after(fault.at, self._kill_controller)
                case "sigterm":
                    self.after(fault.at, self._sigterm)
                case "save":
                    self.after(fault.at, lambda: self._tell_controller(SaveRequested(next(self._requests), "asked")))

    def _flap(self, rank: SimRank, lasts_s: float) -> None:
        self._blocked_until[rank.rank] = self.now + lasts_s
        if rank.alive and rank.stream is not None:
            self.trace(rank.name, f"cannot be reached for {lasts_s} s")
            learns = self.rng.choice((0.0, 0.01, 0.1))
            rank.stream.cut(rank_learns_s=learns, controller_learns_s=self.rng.choice((0.0, 0.01, 0.1)))

    def _kill_controller(self) -> None:
        if self.controller is not None:
            if self.rng.random() < 0.5:
                self.controller.kill()
            else:
                self.controller.kill_in(events=self.rng.randint(1, 30), actions=self.rng.randint(0, 4))

    def _sigterm(self) -> None:
        for rank in list(self.ranks.values()):
            self.after(self.rng.random() * 0.01, rank.preempt)

    def reached(self, point: str, rank: SimRank) -> None:
        """A rank is at a point where it may be killed."""
        self.points[point] += 1
        for entry in self._at_points.get((point, rank.rank), ()):
            entry[0] -= 1
            if entry[0] == 0:
                self._strike(entry[1], rank)
        if not rank.alive:
            raise Killed

    def _strike(self, fault: Fault, rank: SimRank) -> None:
        self.trace(rank.name, f"{fault.kind} {fault.point}")
        match fault.kind:
            case "kill_at":
                rank.exit(None)
            case "flap_at":
                self._flap(rank, fault.lasts_s)
            case "controller_at":
                self.after(self.rng.random() * 2 * self.scenario.delay_s, self._kill_controller)

    def raises(self, rank: SimRank, where: str) -> bool:
        """Whether the training code raises now."""
        if self._raises[where, rank.rank]:
            self._raises[where, rank.rank] -= 1
            return not self._raises[where, rank.rank]
        return False

    def write_fails(self, rank: SimRank) -> bool:
        """Whether the disk of a saver is full."""
        return any(f.kind == "write" and f.rank == rank.rank for f in self._faults)

    def commit_fails(self, rank: SimRank) -> bool:
        """Whether a committer sees an error."""
        return any(f.kind == "commit" and f.rank == rank.rank for f in self._faults)


def run_seed(seed: int, *, keep_trace: bool = False, shards: int | None = None, replicas: int | None = None) -> Result:
    """One run of a random scenario."""
    return Simulation(random_scenario(seed, shards, replicas), keep_trace=keep_trace).run()


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ttp.testing.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--shards", type=int, help="distinct pieces of state; random by default")
    parser.add_argument("--replicas", type=int, help="copies of each; random by default")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args(arguments)
    failures = 0
    for seed in range(options.seed, options.seed + options.count):
        scenario = random_scenario(seed, options.shards, options.replicas)
        simulation = Simulation(scenario, keep_trace=options.trace)
        try:
            result = simulation.run()
            verdict = f"ok: {result.exits}, {result.events} events, trace {result.digest[:12]}"
        except Exception as problem:
            failures += 1
            verdict = f"BROKEN: {problem}"
        if options.trace:
            sys.stdout.write("\n".join([repr(scenario), *simulation._lines]) + "\n")
        if options.trace or options.count == 1 or not verdict.startswith("ok"):
            sys.stdout.write(f"seed {seed}: {verdict}\n")
    sys.stdout.write(f"{options.count} runs, {failures} broken\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
