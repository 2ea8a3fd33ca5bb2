"""Whole jobs in virtual time, drawn from seeds. A failure names its seed.

``ttp simulate --seed 1234 --trace`` shows the events of that job one by one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
from collections import Counter

import pytest

from ttp.errors import TtpError
from ttp.testing import simulation
from ttp.testing.campaign import Wish, play, play_many
from ttp.testing.scenario import POINTS, random_scenario
from ttp.testing.simulation import Result, Simulation
from ttp.testing.toy import InvariantBroken


def run_seed(seed: int, shards: int | None = None, replicas: int | None = None) -> Result:
    """Simulate the random scenario of ``seed``; unlike ``play``, this raises."""
    return Simulation(random_scenario(seed, shards, replicas)).run()


def test_random_jobs_reach_every_point() -> None:
    points: Counter[str] = Counter()
    for seed in range(250):
        points += run_seed(seed).points
    assert not [p for p in POINTS if not points[p]]


@pytest.mark.parametrize("seed", [20118517, 20425252, 21066156])
def test_what_broke_once(seed: int) -> None:
    """Seeds that once found errors: an older answer that a rank repeated (two), and a fault of the simulation.

    They name other jobs as soon as jobs are drawn, or played, in another way. The errors have tests of their own:
    ``test_false_alarms.py`` has the older answer.
    """
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 140))
def test_many_random_jobs(block: int) -> None:
    for seed in range(block * 1000, (block + 1) * 1000):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "replicas"), [(1, 8), (4, 2), (2, 5), (8, 1)])
def test_larger_jobs(shards: int, replicas: int) -> None:
    for seed in range(400):
        run_seed(seed, shards, replicas)


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(15):
        assert run_seed(seed).digest == run_seed(seed).digest
    assert run_seed(1).digest != run_seed(2).digest


def test_a_seed_can_be_repeated_in_another_process() -> None:
    code = "from ttp.testing.campaign import Wish, play; print(play(Wish(), 11, keep_trace=True).trace)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert hashlib.sha256(runs[0][:-1].encode()).hexdigest() == run_seed(11).digest


def test_a_broken_promise_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "EVENTS_MAX", 20)
    monkeypatch.setattr(simulation, "EVENTS_PER_RANK_MAX", 0)
    with pytest.raises(InvariantBroken, match=r"seed 5 at .* s: I6: it never ends"):
        run_seed(5)


BURST = "controller_restart@0.2,flap:*@0.3+0,kill:1%@0.36"
"""Every rank connects again, twice, and then one in a hundred dies at once."""


def test_a_large_world_survives_a_burst() -> None:
    result = play(Wish(shards=8, replicas=50, hosts=50, steps=4, faults=BURST), seed=1)
    assert result.problem == ""
    first, *later = map(Counter, result.exits)
    assert first.pop(None) == 4
    assert first.pop(75) > 380  # who connects too late is fenced
    assert set(first) <= {70}
    assert later == [{0: 400}]
    assert result.events < 200 * 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_ranks_survive_a_burst() -> None:
    result = play(Wish(shards=100, replicas=1000, hosts=12_500, steps=4, faults=BURST), seed=1)
    assert result.problem == ""
    assert result.exits[0].count(None) == 1000
    assert result.exits[-1] == [0] * 100_000
    assert result.events < 200 * 100_000


def test_the_scenario_follows_from_the_seed() -> None:
    assert random_scenario(3) == random_scenario(3)
    assert random_scenario(3) != random_scenario(4)


def test_a_process_that_is_killed_ends_the_campaign_with_a_word() -> None:
    others = set(multiprocessing.active_children())  # of other tests, which need them later
    results = play_many(Wish(faults="none"), range(5000), jobs=2)
    assert next(results).problem == ""
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
    with pytest.raises(TtpError, match="fewer --jobs"):
        list(results)
