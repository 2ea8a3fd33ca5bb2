"""Survivors that go on in their processes, explored exhaustively; see ``tests.core.model_keep``.

With ``tests.core.model_shadow`` the checkpoint is only held in memory at first; it never counts as saved. From every
state each rank ends with 75 or makes a further update; the outcomes show that.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.model_keep import KeepModel
from tests.core.model_shadow import ShadowModel
from tests.core.model_state import Broken
from ttp.core.controller import continuing, restore_agreement
from ttp.core.controller.shadow import Shadow
from ttp.core.layout import Version
from ttp.core.restore_messages import Candidate
from ttp.testing.scenario import grid

LOST, ON = -9, "on"  # killed; trains as a rank of the next launch
BOTH = {(ON, ON)}
FALLS_BACK = {(LOST, 75), (75, LOST)}
MANY = 3_000_000


def explore(
    kind: type[KeepModel], kills: int = 1, *, shards: int = 1, replicas: int = 2, states_max: int = 80_000, **more: Any
) -> set[Any]:
    model = kind(grid(shards, replicas), kills, **more)
    states = model.explore(states_max)
    words = f"{kind.__name__} {shards} x {replicas}, {kills} kills, {more}"
    print(f"{words}: {states} states, {sorted(map(str, model.outcomes))}")
    assert not isinstance(model, ShadowModel) or model.went_on_from_memory or more.get("released")
    return model.outcomes


@pytest.mark.parametrize(
    ("kind", "more", "outcomes"),
    [
        (KeepModel, {}, BOTH),
        (KeepModel, {"hosts": 2}, BOTH),
        (KeepModel, {"launchers": 1, "eager": True}, BOTH | FALLS_BACK),
        (KeepModel, {"launchers": 1, "hosts": 2, "eager": True}, BOTH | FALLS_BACK),
        (KeepModel, {"takeovers": 1, "eager": True}, BOTH | FALLS_BACK),
        (KeepModel, {"kills": 0, "slander": 1}, {(70, 75), (75, 70)}),  # who is taken for dead takes nobody's seat
        (KeepModel, {"repeats": 1, "eager": True}, BOTH),
        # a second fault while they go on
        (KeepModel, {"kills": 2, "hosts": 2, "released": True}, FALLS_BACK | {(LOST, LOST)}),
        (KeepModel, {"quits": 1, "released": True}, BOTH | FALLS_BACK | {(75, 75)}),
        (KeepModel, {"quits": 1, "hosts": 2, "released": True}, BOTH | {(LOST, 75), (75, 75)}),
        (KeepModel, {"takeovers": 1, "launchers": 1, "hosts": 2, "released": True}, BOTH | {(LOST, 75)}),
        (KeepModel, {"replicas": 3, "released": True}, {(ON, ON, ON)}),
        (ShadowModel, {}, BOTH),
        (ShadowModel, {"launchers": 1, "eager": True}, BOTH | FALLS_BACK),
        (ShadowModel, {"refusals": 1, "eager": True}, BOTH),
        (ShadowModel, {"quits": 1, "released": True}, BOTH | FALLS_BACK | {(75, 75)}),  # before it is durable
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value) if isinstance(value, dict) else "",
)
def test_small_worlds(kind: type[KeepModel], more: dict[str, Any], outcomes: set[Any]) -> None:
    assert explore(kind, **more) == outcomes


@pytest.mark.parametrize(
    ("place", "name", "wrong", "world", "text"),
    [
        (continuing, "judge", (True, {}), {"shards": 2, "replicas": 1}, "K1: rank 1 leaves its loop before a commit"),
        (restore_agreement, "agree", Candidate(Version(0), "", ""), {}, "K2: rank . restores"),
        (Shadow, "is_durable", True, {"kind": ShadowModel, "kills": 2, "launchers": 1, "eager": True}, "K6"),
        (Shadow, "awaits", False, {"kind": ShadowModel, "kills": 2, "launchers": 1, "released": True}, "K6"),
    ],
)
def test_the_model_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Any, world: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(place, name, lambda *_: wrong)
    with pytest.raises(Broken, match=text):
        explore(**{"kind": KeepModel, **world})


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (KeepModel, {"kills": 2, "released": True}),
        (KeepModel, {"kills": 2}),
        (KeepModel, {"kills": 2, "hosts": 2, "eager": True}),
        (KeepModel, {"quits": 1}),
        (KeepModel, {"kills": 2, "quits": 1, "released": True}),
        (KeepModel, {"quits": 1, "takeovers": 1, "released": True}),
        (KeepModel, {"breaks": 1, "released": True}),
        (KeepModel, {"breaks": 1, "eager": True}),
        (KeepModel, {"takeovers": 1, "hosts": 2}),
        (KeepModel, {"launchers": 1, "takeovers": 1}),
        (KeepModel, {"slander": 1}),
        (KeepModel, {"shards": 2, "released": True, "hosts": 2}),
        (ShadowModel, {"takeovers": 1, "eager": True}),
        (ShadowModel, {"kills": 2}),
        (ShadowModel, {"kills": 2, "released": True}),
        (ShadowModel, {"kills": 2, "quits": 1, "released": True}),
        (ShadowModel, {"refusals": 2, "eager": True}),
        (ShadowModel, {"launchers": 1, "refusals": 1, "eager": True}),
        (ShadowModel, {"takeovers": 1, "refusals": 1, "eager": True}),
        (ShadowModel, {"breaks": 1, "eager": True}),
        (ShadowModel, {"kills": 2, "takeovers": 1, "released": True, "eager": True}),
        (ShadowModel, {"shards": 2, "eager": True}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_larger_worlds(kind: type[KeepModel], more: dict[str, Any]) -> None:
    """Survivors go on or exit with 75. A living rank that was reported as dead exits alone."""
    outcomes = explore(kind, states_max=MANY, **more)
    allowed = [{ON}, {LOST}, *([{LOST, 70}] if "slander" in more else [])]
    assert all(75 in o or set(o) in allowed for o in outcomes), outcomes
