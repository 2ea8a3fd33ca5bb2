"""Plays many simulated jobs, one for each seed, on several processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from ttp.core.layout import Version
from ttp.errors import TtpError, UsageError
from ttp.testing import fault_words
from ttp.testing.scenario import Scenario, grid, random_scenario, with_relays
from ttp.testing.simulation import Simulation

SEEDS_AT_ONCE = 100
"""Runs between two collections of garbage; what a process is given at a time."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of the jobs to play. What is ``None`` is drawn by the seed.

    Args:
        shards: distinct pieces of state.
        replicas: ranks that hold each of them.
        hosts: machines; ranks are spread evenly.
        steps: updates until the training is over.
        faults: see ``fault_words``.
        relays: every job has relays; else the seed says.
    """

    shards: int | None = None
    replicas: int | None = None
    hosts: int | None = None
    steps: int | None = None
    faults: str | None = None
    relays: bool = False

    def scenario(self, seed: int) -> Scenario:
        """The job of one seed.

        Raises:
            UsageError: the faults make no sense.
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
        if self.faults is not None:
            scenario = replace(scenario, faults=(fault_words.parse(self.faults, seed, scenario.hosts),))
        return scenario


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended.

    Args:
        seed: of the run.
        problem: what was broken, in words; empty: nothing.
        exits: for every incarnation, how many ranks ended with which code; ``None``: killed.
        saved: versions of the checkpoints.
        events: what happened, in calls.
        virtual_s: how long it took in virtual time.
        digest: of the trace.
        trace: what happened, if it was kept.
    """

    seed: int
    problem: str
    exits: tuple[dict[int | None, int], ...] = ()
    saved: tuple[Version, ...] = ()
    events: int = 0
    virtual_s: float = 0.0
    digest: str = ""
    trace: str = ""


def play(wish: Wish, seed: int, *, keep_trace: bool = False) -> Outcome:
    """Play one run. An error in it is part of the outcome, and not raised."""
    simulation = Simulation(wish.scenario(seed), keep_trace=keep_trace)
    try:
        with no_collections():
            result = simulation.run()
    except Exception as problem:
        text = str(problem) if isinstance(problem, AssertionError) else f"{type(problem).__name__}: {problem}"
        digest = simulation.digest()
        return Outcome(seed, text, (), (), simulation.events, simulation.now, digest, simulation.text())
    exits = tuple(dict(Counter(codes)) for codes in result.exits)
    saved = tuple(result.saved)
    return Outcome(seed, "", exits, saved, result.events, result.virtual_s, result.digest, result.trace)


def play_many(wish: Wish, seeds: range, jobs: int) -> Iterator[Outcome]:
    """Play one run for each seed, in order.

    Args:
        wish: what is played.
        seeds: which.
        jobs: processes; with one it is this process.

    Raises:
        TtpError: one of the processes was killed.
    """
    parts = [(wish, seeds[i : i + SEEDS_AT_ONCE]) for i in range(0, len(seeds), SEEDS_AT_ONCE)]
    if jobs == 1 or len(parts) == 1:
        for part in parts:
            yield from _play_part(part)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_process)
    try:
        for outcomes in pool.map(_play_part, parts):
            yield from outcomes
    except BrokenProcessPool:
        raise TtpError("a process that played was killed, perhaps for its memory: try fewer --jobs") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _play_part(part: tuple[Wish, range]) -> list[Outcome]:
    wish, seeds = part
    with no_collections():
        outcomes = [play(wish, seed) for seed in seeds]
    gc.collect()
    return outcomes


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears of it


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Switch the collection of cycles off: it takes half the time of a large world and frees nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
