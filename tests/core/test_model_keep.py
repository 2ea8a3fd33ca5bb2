"""Survivors that go on in their processes, explored exhaustively; see ``tests.core.model_keep``.

From every state each rank ends with 75 or makes a further update; the outcomes show that.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.core.model_keep import KeepModel
from tests.core.model_state import Broken
from ttp.core.controller import continuing, restore_agreement
from ttp.core.layout import Version
from ttp.core.restore_messages import Candidate
from ttp.testing.scenario import grid

LOST, ON = -9, "on"  # killed; trains as a rank of the next launch
BOTH = {(ON, ON)}
FALLS_BACK = {(LOST, 75), (75, LOST)}
MANY = 3_000_000


def explore(kills: int = 1, *, shards: int = 1, replicas: int = 2, states_max: int = 60_000, **more: Any) -> set[Any]:
    model = KeepModel(grid(shards, replicas), kills, **more)
    states = model.explore(states_max)
    print(f"{shards} x {replicas}, {kills} kills, {more}: {states} states, {sorted(map(str, model.outcomes))}")
    return model.outcomes


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_survivor_of_a_death_goes_on(hosts: int) -> None:
    assert explore(hosts=hosts) == BOTH


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_launcher_is_lost_at_any_point(hosts: int) -> None:
    assert explore(launchers=1, hosts=hosts, eager=True) == BOTH | FALLS_BACK


def test_the_controller_is_lost_at_any_point() -> None:
    assert explore(takeovers=1, eager=True) == BOTH | FALLS_BACK


def test_who_is_taken_for_dead_takes_nobodys_seat() -> None:
    assert explore(0, slander=1) == {(70, 75), (75, 70)}


def test_messages_arrive_twice() -> None:
    assert explore(repeats=1, eager=True) == BOTH


@pytest.mark.parametrize(
    ("more", "outcomes"),
    [
        ({"kills": 2, "hosts": 2}, FALLS_BACK | {(LOST, LOST)}),
        ({"quits": 1}, BOTH | FALLS_BACK | {(75, 75)}),
        ({"quits": 1, "hosts": 2}, BOTH | {(LOST, 75), (75, 75)}),
        ({"takeovers": 1, "launchers": 1, "hosts": 2}, BOTH | {(LOST, 75)}),
        ({"replicas": 3}, {(ON, ON, ON)}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # workers order sets differently
)
def test_a_second_fault_while_they_go_on(more: dict[str, Any], outcomes: set[Any]) -> None:
    assert explore(released=True, **more) == outcomes


@pytest.mark.parametrize(
    ("module", "name", "wrong", "text"),
    [
        (continuing, "judge", lambda *_: (True, {}), "K1: rank 1 leaves its loop before a commit"),
        (restore_agreement, "agree", lambda _: Candidate(Version(0), "", ""), "K2: rank . restores"),
    ],
)
def test_the_model_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: Any, text: str
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(Broken, match=text):
        explore(shards=2 if name == "judge" else 1, replicas=1 if name == "judge" else 2)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "more",
    [
        {"kills": 2, "released": True},
        {"kills": 2},
        {"kills": 2, "hosts": 2, "eager": True},
        {"quits": 1},
        {"kills": 2, "quits": 1, "released": True},
        {"quits": 1, "takeovers": 1, "released": True},
        {"breaks": 1, "released": True},
        {"breaks": 1, "eager": True},
        {"takeovers": 1, "hosts": 2},
        {"launchers": 1, "takeovers": 1},
        {"slander": 1},
        {"shards": 2, "released": True, "hosts": 2},
    ],
    ids=str,
)
def test_larger_worlds(more: dict[str, Any]) -> None:
    """Survivors go on or exit with 75. A living rank that was reported as dead exits alone."""
    outcomes = explore(states_max=MANY, **more)
    allowed = [{ON}, {LOST}, *([{LOST, 70}] if "slander" in more else [])]
    assert all(75 in o or set(o) in allowed for o in outcomes), outcomes
