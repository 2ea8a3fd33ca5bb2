"""A checkpoint that is only held in memory never counts as saved; explored exhaustively, see
``tests.core.model_shadow``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.model_shadow import ShadowModel
from tests.core.model_state import Broken
from ttp.core.controller.shadow import Shadow
from ttp.testing.scenario import grid

LOST, ON = -9, "on"  # killed; trains as a rank of the next launch
BOTH = {(ON, ON)}
FALLS_BACK = {(LOST, 75), (75, LOST)}
MANY = 3_000_000


def explore(kills: int = 1, *, shards: int = 1, replicas: int = 2, states_max: int = 80_000, **more: Any) -> set[Any]:
    model = ShadowModel(grid(shards, replicas), kills, **more)
    states = model.explore(states_max)
    print(f"{shards} x {replicas}, {kills} kills, {more}: {states} states, {sorted(map(str, model.outcomes))}")
    assert model.went_on_from_memory or more.get("released")
    return model.outcomes


def test_the_survivor_of_a_death_goes_on_from_memory() -> None:
    assert explore() == BOTH


def test_a_launcher_is_lost_at_any_point() -> None:
    assert explore(launchers=1, eager=True) == BOTH | FALLS_BACK


def test_memory_or_storage_refuses_at_any_point() -> None:
    assert explore(refusals=1, eager=True) == BOTH


def test_a_rank_gives_up_before_it_is_durable() -> None:
    assert explore(quits=1, released=True) == BOTH | FALLS_BACK | {(75, 75)}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("is_durable", lambda *_: True),
        ("awaits", lambda *_: False),
    ],
)
def test_the_model_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(Shadow, name, wrong)
    with pytest.raises(Broken, match="K6"):
        explore(2, launchers=1, eager=name == "is_durable", released=name == "awaits")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "more",
    [
        {"takeovers": 1, "eager": True},
        {"kills": 2},
        {"kills": 2, "released": True},
        {"kills": 2, "quits": 1, "released": True},
        {"refusals": 2, "eager": True},
        {"launchers": 1, "refusals": 1, "eager": True},
        {"takeovers": 1, "refusals": 1, "eager": True},
        {"breaks": 1, "eager": True},
        {"kills": 2, "takeovers": 1, "released": True, "eager": True},
        {"shards": 2, "eager": True},
    ],
    ids=str,
)
def test_larger_worlds(more: dict[str, Any]) -> None:
    outcomes = explore(states_max=MANY, **more)
    assert all(75 in o or set(o) in [{ON}, {LOST}] for o in outcomes), outcomes
