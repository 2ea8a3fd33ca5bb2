"""Whole jobs in virtual time, seeded. A failure names its seed:

``ttp simulate --seed 1234 --trace`` shows what happened in it, event by event.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest

from ttp.core.layout import Layout, Rank
from ttp.testing import simulation
from ttp.testing.scenario import POINTS, Fault, Scenario, grid, random_scenario
from ttp.testing.simulation import Simulation, run_seed
from ttp.testing.toy import InvariantBroken

BLOCK = 250


@pytest.mark.parametrize("block", range(14))
def test_random_jobs(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
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
        run_seed(seed, shards=shards, replicas=replicas)


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(40):
        assert run_seed(seed).digest == run_seed(seed).digest
    assert run_seed(1).digest != run_seed(2).digest


def test_a_seed_can_be_repeated_in_another_process() -> None:
    code = "from ttp.testing.simulation import run_seed; print(run_seed(11, keep_trace=True).trace)"
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


def test_every_point_is_reached() -> None:
    points: Counter[str] = Counter()
    for seed in range(150):
        points += run_seed(seed).points
    assert not [p for p in POINTS if not points[p]]


def test_a_broken_promise_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "EVENTS_MAX", 20)
    monkeypatch.setattr(simulation, "EVENTS_PER_RANK_MAX", 0)
    with pytest.raises(InvariantBroken, match=r"seed 5 at .* s: I6: it never ends"):
        run_seed(5)


# ----------------------------------------------------------------------------------------- single runs, read as a story


def run(
    layout: Layout, *faults: Fault, steps: int = 4, hosts: tuple[str, ...] = (), seed: int = 1, **more: bool
) -> tuple[list[list[int | None]], str]:
    """Exit codes of every incarnation, and the trace."""
    hosts = hosts or ("h",) * layout.world_size
    scenario = Scenario(seed, layout, hosts, steps, delay_s=0.0005, repeats=0.0, faults=(faults,), **more)
    result = Simulation(scenario, keep_trace=True).run()
    return result.exits, result.trace


def kill(rank: int, point: str, times: int = 1) -> Fault:
    return Fault("kill", times, Rank(rank), point)


def test_without_faults_nothing_happens() -> None:
    exits, trace = run(grid(1, 3))
    assert exits == [[0, 0, 0]]
    assert "opened" not in trace


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", [p for p in POINTS[1:10] if p != "parked"])  # that is a point of an incident
def test_a_rank_killed_at_any_point_of_a_step_costs_nothing(rank: int, point: str) -> None:
    exits, trace = run(grid(1, 3), kill(rank, point, times=4 if point == "in update" else 2))
    assert [code for code in exits[0] if code is not None] == [75, 75]
    assert exits[1] == [0, 0, 0]
    assert trace.count("] committed") == 1


@pytest.mark.parametrize("point", ["before save", "in save", "after save", "before Saved", "after Saved", "in commit"])
def test_another_one_saves_when_the_saver_dies(point: str) -> None:
    first = kill(2, "in forward", times=3)
    _, trace = run(grid(1, 3), first)
    saver = int(trace.split("'savers': {'s0': ")[1][0])
    exits, trace = run(grid(1, 3), first, kill(saver, point))
    assert exits[0][saver] is None
    assert sorted(map(str, exits[0])) == ["75", "None", "None"]
    assert trace.count("] committed") == 1


def test_a_checkpoint_on_request_and_the_training_goes_on() -> None:
    exits, trace = run(grid(2, 2), Fault("save", 0.1, Rank(0)))
    assert exits == [[0, 0, 0, 0]]
    assert "the checkpoint is written" in trace or "could not be written" in trace


def test_sigterm_to_all_saves_once() -> None:
    exits, trace = run(grid(1, 3), Fault("sigterm", 0.11, Rank(0)))
    assert exits == [[75, 75, 75], [0, 0, 0]]
    assert trace.count("] committed") == 1


def test_a_short_flap_is_a_false_alarm() -> None:
    exits, trace = run(grid(1, 3), Fault("flap", 0.11, Rank(1), lasts_s=0.05))
    assert exits == [[0, 0, 0]]
    assert "nothing is broken after all" in trace


def test_a_long_flap_is_a_loss() -> None:
    exits, trace = run(grid(1, 3), Fault("flap", 0.11, Rank(1), lasts_s=2.0))
    assert exits == [[75, 70, 75], [0, 0, 0]]
    assert "fenced" in trace


def test_the_controller_and_a_rank_die_together() -> None:
    exits, trace = run(grid(1, 3), Fault("controller", 0.12, Rank(0)), Fault("kill", 0.1201, Rank(2)), steps=5, seed=2)
    assert exits[0] == [75, 75, None]
    assert "did not come back to the new controller" in trace
    assert trace.count("] committed") == 1


def test_shards_without_a_copy_end_with_70() -> None:
    exits, trace = run(grid(2, 1), kill(1, "in forward", times=2))
    assert exits[0] == [70, None]
    assert "shard 's1' has no whole copy left" in trace


def test_the_scenario_follows_from_the_seed() -> None:
    assert random_scenario(3) == random_scenario(3)
    assert random_scenario(3) != random_scenario(4)
