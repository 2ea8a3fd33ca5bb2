"""How ranks that go on get their state: kept, received, or read; see ``ttp.testing.sim_transfers``.

Whatever goes wrong, each rank makes an update from the committed state, or has left within its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ttp.core.layout import Rank
from ttp.testing import sim_transfers
from ttp.testing.campaign import Wish, play
from ttp.testing.scenario import TRANSFER_POINTS, Fault, Scenario, grid
from ttp.testing.simulation import Result, Simulation
from ttp.testing.toy import InvariantBroken

EVER = float("inf")
WISH = Wish(transfers=True)
KILL = Fault("kill", 3, Rank(2), "in forward")


def run(*faults: Fault, seed: int = 1, shards: int = 1, replicas: int = 3) -> tuple[Result, str]:
    """Play a job whose rank 2 dies, with further ``faults`` while the others go on."""
    layout = grid(shards, replicas)
    hosts = ("h0",) * layout.world_size
    scenario = Scenario(seed, layout, hosts, 5, 0.0005, 0.0, ((KILL,), faults), keep=True, transfers=True)
    result = Simulation(scenario, keep_trace=True).run()
    assert result.exits[0].count(75) == layout.world_size - 1
    return result, result.trace


def test_many_seeds() -> None:
    points: Counter[str] = Counter()
    for seed in range(50):
        simulation = Simulation(WISH.scenario(seed))
        points += simulation.run().points
    assert min(points[point] for point in TRANSFER_POINTS) > 60


def test_the_newcomer_gets_its_state_from_another_rank() -> None:
    result, _ = run(shards=2)
    assert result.exits[1:] == [[0] * 6] and result.points["sending"] == result.points["receiving"] > 0


@pytest.mark.parametrize(("rank", "point"), [(0, "sending"), (2, "receiving"), (1, "verified"), (1, "received")])
def test_a_death_in_it_costs_no_step(rank: int, point: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        result, trace = run(
            Fault("kill", 1 + seed % 3 * (point in ("sending", "receiving")), Rank(rank), point), seed=seed
        )
        assert result.exits[-1] == [0, 0, 0] and result.saved[0] == 2
        seen["error"] += "has met an error on its way" in trace
        seen["killed"] += "is on its way, and all are started anew" in trace
    assert seen["killed"], seen


@pytest.mark.parametrize(
    "fault", [Fault("transfer", 0, Rank(2), lasts_s=EVER), Fault("stop", 1, Rank(2), "receiving", EVER)]
)
def test_one_that_hangs_is_over_in_time(fault: Fault) -> None:
    result, trace = run(fault)
    assert result.exits[1] != [0, 0, 0] and result.exits[-1] == [0, 0, 0]
    assert fault.kind == "stop" or "did not go on within 30 s" in trace  # a process that is stopped is missed sooner


def test_one_that_is_slow_is_waited_for() -> None:
    result, _ = run(Fault("transfer", 0, Rank(2), lasts_s=2.0))
    assert result.exits[1:] == [[0, 0, 0]] and result.virtual_s > 8


@pytest.mark.parametrize("name", ["why_not_kept", "why_not_adopted"])
def test_a_state_of_which_nobody_asks_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sim_transfers, name, lambda *_: "")
    found = (play(WISH, seed).problem for seed in range(60))
    assert next(filter(None, found), "").split(": ")[1:2] == ["I9"]


def test_who_is_killed_on_its_way_must_have_nothing_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the loss when ranks keep the mark that they go on until they begin an update after the barrier."""
    stock: Callable[..., Any] = sim_transfers.Transfers.reached

    def reached(self: Any, point: str, rank: Any) -> None:
        late = {"in barrier": "", "before update": "", "update begun": "before update"}
        stock(self, late.get(point, point), rank)
        if point == "update ended" and self._marked:
            self._start_anew(self._world.ranks)

    monkeypatch.setattr(sim_transfers.Transfers, "reached", reached)
    with pytest.raises(InvariantBroken, match=r"I9: rank . is killed before its first update; others finished 3"):
        for seed in range(10):
            run(shards=2, seed=seed)
