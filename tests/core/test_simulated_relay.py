"""Simulated jobs whose ranks speak to the controller through the relay of their host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.core.seeds import seeds
from ttp.core.layout import Rank
from ttp.testing.campaign import Wish, play
from ttp.testing.scenario import POINTS, Fault, Scenario, grid
from ttp.testing.simulation import Simulation

HOSTS = ("h0", "h0", "h1", "h1")


def run(*faults: Fault, seed: int = 1, **more: Any) -> tuple[Sequence[Sequence[int | None]], str]:
    """Return the exit codes of every incarnation, and the trace."""
    scenario = Scenario(seed, grid(1, 4), HOSTS, 4, delay_s=0.0005, repeats=0.0, faults=(faults,), relays=True, **more)
    result = Simulation(scenario, keep_trace=True).run()
    return result.exits, result.trace


def test_a_rank_that_dies_is_saved_around_as_without() -> None:
    exits, trace = run(Fault("kill", 2, Rank(2), "in forward"))
    assert exits == [[75, 75, None, 75], [0, 0, 0, 0]]
    assert trace.count("] committed") == 1


@pytest.mark.parametrize("host", [0, 2])
def test_a_relay_that_dies_in_training_costs_nothing(host: int) -> None:
    exits, trace = run(Fault("relay", 2, Rank(host), "in forward"))
    assert "is killed" in trace
    assert exits == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    "point", [p for p in POINTS if p.startswith(("before ", "in ", "after ")) and p != "in restore"]
)
def test_a_relay_that_dies_at_any_point_of_a_rescue_costs_no_step(point: str) -> None:
    killed = Fault("kill", 3, Rank(1), "in forward")
    for seed, host in enumerate((0, 2, 0, 2)):
        exits, trace = run(killed, Fault("relay", 1, Rank(host), point), seed=seed)
        assert exits[-1] == [0, 0, 0, 0]
        assert 70 not in exits[0], trace[-3000:]


def test_all_relays_may_die_at_once_with_a_rank() -> None:
    faults = [Fault("relay", 0.1, Rank(rank)) for rank in (0, 2)]
    exits, _ = run(Fault("kill", 0.1002, Rank(3)), *faults)
    assert exits[-1] == [0, 0, 0, 0]
    assert 70 not in exits[0]


@seeds(50, 9000)
def test_many_seeds(seeds: range) -> None:
    broken = [o for o in (play(Wish(relays=True), seed) for seed in seeds) if o.problem]
    assert not broken, broken[0].problem
