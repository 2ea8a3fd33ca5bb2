"""Hosts that lose their power or their network, with the timeouts of real jobs, in virtual time."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.core.seeds import seeds
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.layout import Rank
from ttp.core.rank.events import RankTimeouts
from ttp.testing.scenario import Fault, Scenario, grid
from ttp.testing.simulation import Simulation

KEEPALIVE_S = 10.0
"""See ``ttp.wire.channel``."""
BUDGET_S = 3.0
"""From the loss of a host to a checkpoint that is durable; see ``docs/performance.md``."""
HOSTS = ("h0", "h0", "h1", "h1", "h2", "h2")


@dataclass(frozen=True)
class Played:
    """A simulated job: the exit codes of every launch, and the trace."""

    exits: Sequence[Sequence[int | None]]
    trace: str

    def when(self, pattern: str) -> list[float]:
        """Return the times, in seconds, of the trace's lines that match."""
        found = re.findall(rf"^ *([\d.]+) .*{pattern}", self.trace, flags=re.MULTILINE)
        return [float(seconds) for seconds in found]


def play(seed: int, *faults: Fault, steps: int = 80, shards: int = 1, relays: bool = False) -> Played:
    """Play a job of three hosts, whose training takes about four seconds."""
    layout = grid(shards, len(HOSTS) // shards)
    scenario = Scenario(seed, layout, HOSTS, steps, delay_s=0.0005, repeats=0.0, faults=(faults,), relays=relays)
    patience, timeouts = ControllerTimeouts(), RankTimeouts()
    simulation = Simulation(scenario, keep_trace=True, patience=patience, timeouts=timeouts, keepalive_s=KEEPALIVE_S)
    result = simulation.run()
    return Played(result.exits, result.trace)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["power", "silence"])
def test_a_host_that_falls_silent_is_saved_around_within_the_budget(kind: str, shards: int) -> None:
    took: list[float] = []
    for seed in range(8):
        rank, at = Rank(2 + seed % 4), 0.5 + 0.13 * seed
        played = play(seed, Fault(kind, at, rank, lasts_s=15), shards=shards)
        took.append(played.when(r"\] committed")[0] - at)
        assert played.exits[-1] == [0] * 6
        released = min(played.when(r"\] released"), default=float("inf"))  # never, if a witness reaches the host
        assert released >= at + KEEPALIVE_S - 1, "nobody is released before it is sure"
    assert max(took) <= BUDGET_S, took


def test_a_host_that_is_cut_off_for_a_moment_while_a_rank_dies_keeps_its_rank_local_state() -> None:
    """Whether the checkpoint is made before the host is in doubt or after it: its ranks live, and may not forget."""
    for seed in range(6):
        played = play(seed, Fault("silence", 0.5, Rank(2), lasts_s=4.0), Fault("kill", 0.5 + 0.01 * seed, Rank(4)))
        assert played.exits[-1] == [0] * 6
        (released,) = played.when(r"\] released")
        assert any(4.5 < at < released for at in played.when(r"'pages_[23]_")), f"seed {seed}"


def harmless(chance: random.Random) -> Fault:
    """Return a fault that a healthy job has to survive."""
    kind = chance.choice(("silence", "silence", "controller_stop", "stop", "silent"))
    rank, at = Rank(chance.randrange(len(HOSTS))), chance.uniform(0.3, 2.5)
    return Fault(kind, at, rank, lasts_s=chance.uniform(0.2, 2.0))


def soak(seeds: range) -> Counter[str]:
    """Count freezes, thaws and launches of healthy jobs with several such faults."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(f"soak {seed}")
        played = play(seed, *(harmless(chance) for _ in range(chance.randint(1, 4))), shards=chance.choice((1, 2, 3)))
        if played.when(r"\] finished") and 0 in played.exits[0] and played.exits[1:] == [[0] * 6]:
            continue  # the end of the job was not heard of on some hosts: they cannot know that the others are not dead
        assert played.exits == [[0] * 6], f"seed {seed}: a healthy job was restarted"
        freezes, thaws = (len(played.when(rf"\] {what}")) for what in ("opened", "thawed"))
        assert freezes - thaws in (0, 1), f"seed {seed}"  # the job may be over before the last one ends
        seen += Counter({"jobs": 1, "freezes": freezes, "thaws": thaws})
        assert not played.when(r"\] released"), f"seed {seed}"
    return seen


@seeds(20, 6000)
def test_flaps_and_processes_that_stop_cost_no_job(seeds: range) -> None:
    seen = soak(seeds)
    print(dict(seen))
    assert seen["thaws"] > 0, "some freeze, or nothing was tried"
