"""Simulate many jobs, one per seed, in several processes, and parse the faults that ``ttp simulate --faults`` names."""

from __future__ import annotations

import contextlib
import difflib
import gc
import multiprocessing
import random
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from ttp.core.layout import Rank
from ttp.errors import TtpError, UsageError
from ttp.testing.scenario import (
    KINDS,
    LASTS,
    POINTS,
    TRANSFER_POINTS,
    Fault,
    Scenario,
    grid,
    random_fault,
    random_scenario,
    with_relays,
    with_shadow,
    with_transfers,
)
from ttp.testing.simulation import Result, Simulation

SEEDS_AT_ONCE = 100
"""Number of seeds that a process simulates per task; garbage is collected once per task."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of the jobs to simulate. An option that is ``None`` is drawn from the seed.

    Args:
        shards: number of distinct shards.
        replicas: ranks that hold each shard.
        hosts: number of hosts; ranks are spread evenly.
        steps: updates until the training is over.
        faults: text that ``parse_faults`` reads.
        relays: whether every job has relays; otherwise the seed decides.
        transfers: whether every job is one of ``with_transfers``.
        shadow: whether every job is one of ``with_shadow``; then ``transfers`` changes nothing.
    """

    shards: int | None = None
    replicas: int | None = None
    hosts: int | None = None
    steps: int | None = None
    faults: str | None = None
    relays: bool = False
    transfers: bool = False
    shadow: bool = False

    def scenario(self, seed: int) -> Scenario:
        """Return the job of one seed.

        Raises:
            UsageError: the options contradict each other, or the text of the faults cannot be parsed.
        """
        scenario = random_scenario(seed, self.shards, self.replicas)
        if self.shards is not None and self.replicas is not None:
            scenario = replace(scenario, layout=grid(self.shards, self.replicas))
        if self.hosts is not None:
            world = scenario.layout.world_size
            if self.hosts > world:
                raise UsageError(f"{self.hosts} hosts for {world} ranks: there must be a rank on every host")
            scenario = replace(scenario, hosts=tuple(f"h{r * self.hosts // world}" for r in range(world)))
        if self.steps is not None:
            scenario = replace(scenario, steps=self.steps)
        if self.relays and not scenario.relays:
            scenario = with_relays(scenario)
        if self.shadow:
            scenario = with_shadow(scenario)
        elif self.transfers:
            scenario = with_transfers(scenario)
        if self.faults is not None:
            scenario = replace(scenario, faults=(parse_faults(self.faults, seed, scenario.hosts),))
        return scenario


def play(wish: Wish, seed: int, *, keep_trace: bool = False) -> Result:
    """Simulate the job of one seed. An error during the run is not raised but returned as ``Result.problem``."""
    simulation = Simulation(wish.scenario(seed), keep_trace=keep_trace)
    try:
        with no_collections():
            return simulation.run()
    except Exception as problem:
        text = str(problem) if isinstance(problem, AssertionError) else f"{type(problem).__name__}: {problem}"
        return replace(simulation.so_far(), problem=text)


def play_many(wish: Wish, seeds: range, jobs: int) -> Iterator[Result]:
    """Simulate one job per seed and yield the results in the order of the seeds.

    Args:
        wish: the options of the jobs.
        seeds: the seeds.
        jobs: number of worker processes; 1 simulates in this process.

    Raises:
        TtpError: a worker process was killed.
    """
    parts = [(wish, seeds[i : i + SEEDS_AT_ONCE]) for i in range(0, len(seeds), SEEDS_AT_ONCE)]
    if jobs == 1 or len(parts) == 1:
        for part in parts:
            yield from _play_part(part)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_process)
    try:
        for results in pool.map(_play_part, parts):
            yield from results
    except BrokenProcessPool:
        raise TtpError("a worker process was killed, perhaps for lack of memory: try fewer --jobs") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _play_part(part: tuple[Wish, range]) -> list[Result]:
    wish, seeds = part
    with no_collections():
        results = [play(wish, seed) for seed in seeds]
    gc.collect()
    return results


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection: in a simulation of many ranks it takes half of the time and frees nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ------------------------------------------------------------------------------------------------------ faults as text
# The syntax of faults on the command line, KIND:TARGET@WHEN+LASTS, by example:
#
# ``kill:3@0.2``: rank 3 is killed 0.2 s after the launch
# ``kill:1%@0.2``: one rank in a hundred, drawn from the seed, is killed then; ``*`` means every rank
# ``stop:2@0.2+1.5``: rank 2 is stopped for 1.5 s; ``+ever`` means for good
# ``kill:0@in_update#2``: rank 0 is killed when it is in the middle of an update for the second time
# ``raise:1@forward#3``: the third forward pass of rank 1 raises
# ``partition:h1@0.25``: host h1 is cut off, for a time drawn from the seed
# ``controller@0.3``: the controller is killed
# ``kill=2``: two kills, drawn from the seed
#
# Parts that are left out are drawn from the seed. Faults are separated by commas and strike the first incarnation.


_ITEM = re.compile(r"(?P<kind>[a-z_]+)(?::(?P<target>[^@+=]+))?(?:@(?P<when>[^@+=]+))?(?:\+(?P<lasts>[^@+=]+))?")
_COUNT = re.compile(r"(?P<kind>[a-z_]+)=(?P<count>\d{1,9})")
COUNT_MAX = 1000
_RAISES = ("forward", "update", "refused")
_OF_NOBODY = ("controller", "controller_restart", "controller_twice", "controller_stop", "split", "sigterm", "save")
_ALL_THE_TIME = ("write", "commit", "sync", "slow", "transfer")


def parse_faults(text: str, seed: int, hosts: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults that ``text`` names.

    Args:
        text: faults in the syntax of the comment above; empty or ``none`` for no faults.
        seed: determines the parts that the text leaves out.
        hosts: name of the host of each rank.

    Raises:
        UsageError: the text cannot be parsed; the message says what would be right.
    """
    rng = random.Random(f"faults {seed}")
    items = [item.strip() for item in text.split(",") if item.strip()]
    if items == ["none"]:
        return ()
    return tuple(fault for item in items for fault in _faults(item, rng, hosts))


def _faults(item: str, rng: random.Random, hosts: Sequence[str]) -> Iterable[Fault]:
    counted = _COUNT.fullmatch(item)
    if counted is not None:
        kind = _kind(counted["kind"], item)
        if int(counted["count"]) > COUNT_MAX:  # the job would seem never to end
            raise UsageError(f"{item!r}: at most {COUNT_MAX} faults of a kind")
        return [random_fault(rng, len(hosts), kind) for _ in range(int(counted["count"]))]
    match = _ITEM.fullmatch(item)
    if match is None:
        raise UsageError(f"{item!r} is not a fault: write KIND:RANK@SECONDS+SECONDS, such as kill:3@0.2, or KIND=COUNT")
    kind = _kind(match["kind"], item)
    ranks = _ranks(kind, match["target"], item, rng, hosts)
    drawn = random_fault(rng, len(hosts), kind)
    at, point = _when(kind, match["when"], item, drawn)
    lasts_s = drawn.lasts_s if match["lasts"] is None else _lasts_s(kind, match["lasts"], item)
    return [Fault(kind, at, rank, point, lasts_s) for rank in ranks]


def _kind(name: str, item: str) -> str:
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known kinds: {', '.join(KINDS)}"
        raise UsageError(f"{item!r}: there is no kind of fault {name!r}; {hint}")
    return name


def _ranks(kind: str, target: str | None, item: str, rng: random.Random, hosts: Sequence[str]) -> list[Rank]:
    world = len(hosts)
    if target is None:
        return [Rank(rng.randrange(world))]
    if kind in _OF_NOBODY:
        raise UsageError(f"{item!r}: {kind} takes no rank or host; leave out {target!r}")
    if target == "*":
        return [Rank(r) for r in range(world)]
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", target)
    if share is not None and float(share[1]) <= 100:
        return [Rank(r) for r in sorted(rng.sample(range(world), max(1, round(world * float(share[1]) / 100))))]
    if target in hosts:
        of_host = [Rank(r) for r in range(world) if hosts[r] == target]
        return of_host[:1] if kind in ("host", "power", "partition", "silence", "relay") else of_host
    if target.isdecimal() and int(target) < world:
        return [Rank(int(target))]
    raise UsageError(
        f"{item!r}: {target!r} is neither a rank from 0 to {world - 1}, a host from {hosts[0]} to {hosts[-1]}, "
        "a share such as 1%, nor *"
    )


def _when(kind: str, when: str | None, item: str, drawn: Fault) -> tuple[float, str]:
    if when is None:
        return drawn.at, drawn.point
    if kind in _ALL_THE_TIME:
        raise UsageError(f"{item!r}: {kind} applies during the whole run; leave out {when!r}")
    name, _, times = when.partition("#")
    point = name.replace("_", " ")
    known = _RAISES if kind == "raise" else (*POINTS, *TRANSFER_POINTS)
    match = next((p for p in known if p.lower() == point.lower()), None)
    if match is not None and (times == "" or times.isdecimal()):
        return float(times or 1), match
    try:
        seconds = float(when)
    except ValueError:
        seconds = -1.0
    if kind == "raise" or not 0 <= seconds < 1e6:
        points = ", ".join(p.replace(" ", "_") for p in known)
        number = "not " if kind == "raise" else "neither a number of seconds nor "
        raise UsageError(f"{item!r}: {when!r} is {number}one of the points {points}")
    return seconds, ""


def _lasts_s(kind: str, lasts: str, item: str) -> float:
    if kind not in LASTS:
        raise UsageError(f"{item!r}: {kind} has no duration; leave out +{lasts}. Kinds with one: {', '.join(LASTS)}")
    if lasts == "ever":
        return float("inf")
    try:
        seconds = float(lasts)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{item!r}: {lasts!r} is not a number of seconds; write +ever for a fault without an end")
    return seconds
