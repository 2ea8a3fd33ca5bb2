"""Exhaustive exploration of the real machines; see ``tests.core.model``. Each test prints how many states it saw."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from tests.core.model import Model
from tests.core.model_state import Broken
from ttp.core.answer import Answer
from ttp.core.controller import planning
from ttp.core.decide import NoPlan, Plan, decide
from ttp.core.layout import Layout, Shard, Version
from ttp.testing.scenario import grid

LOST = -9  # the exit code of who was killed
ON = {(None, None)}
UNHURT = {(None, None, None)}
KILLED = {(LOST, 75), (75, LOST)}
SAVED: set[Any] = set()
"""Stands for any outcomes in which no rank exits with 70."""
LARGE = 8_000_000


def explore(
    shards: int, replicas: int, kills: int, hanging: Collection[int] = (), states_max: int = 30_000, **more: Any
) -> Model:
    model = Model(grid(shards, replicas), kills, frozenset(hanging), **more)
    states = model.explore(states_max)
    words = f"{shards} x {replicas}, {kills} kills, {set(hanging) or 'nobody'} hangs in the barrier, {more or ''}"
    print(f"{words}: {states} states, exits {sorted(model.outcomes, key=str)[:4]}")
    return model


def subsets(world: int) -> list[frozenset[int]]:
    """Return sets of ranks that hang in the barrier. An atomic barrier releases all or none, a real one any of them."""
    return [frozenset(c) for n in range(world + 1) for c in itertools.combinations(range(world), n)]


def always_saved(model: Model) -> bool:
    return not any(70 in exits for exits in model.outcomes)


def worlds(*cases: tuple[str, tuple[int, int, int], Any, Any]) -> pytest.MarkDecorator:
    """Parametrize a test with worlds: a name, (shards, replicas, kills), what else ``explore`` takes, and outcomes."""
    return pytest.mark.parametrize(("size", "more", "outcomes"), [c[1:] for c in cases], ids=[c[0] for c in cases])


@worlds(
    ("without replicas a kill is the end", (2, 1, 1), {}, {(LOST, 70), (70, LOST)}),
    ("without replicas a copy survives a break", (2, 1, 0), {"breaks": 1, "kept": True}, ON),
    ("and a takeover", (2, 1, 1), {"hanging": {0}, "kept": True, "takeovers": 1}, KILLED),
    ("three replicas, two kills", (1, 3, 2), {"eager": True}, SAVED),
    ("a stream that breaks hurts nobody", (1, 2, 0), {"breaks": 1}, ON),
    ("whether replicated or not", (2, 1, 0), {"breaks": 1}, ON),
    ("hellos overtake each other", (1, 2, 0), {"hanging": {0, 1}, "breaks": 2, "eager": True}, ON),
    ("who comes back too late is fenced", (1, 2, 0), {"breaks": 1, "late": True}, ON | {(70, 75), (75, 70)}),
    ("a stream breaks and a rank is killed", (1, 2, 1), {"breaks": 1, "states_max": 50_000}, KILLED),
    ("controllers die and nothing else", (1, 2, 0), {"takeovers": 2}, ON),
    ("the controller dies and both ranks are killed", (1, 2, 2), {"takeovers": 1}, KILLED | {(LOST, LOST)}),
    ("replicas write parts side by side", (1, 2, 1), {"stripes": 2}, KILLED),
    ("two of three", (1, 3, 1), {"stripes": 2, "eager": True}, SAVED),
    ("one writes both", (1, 3, 2), {"hanging": {0, 1, 2}, "stripes": 2, "eager": True}, SAVED),
    ("parts that do not fit are not committed", (1, 3, 1), {"stripes": 2, "uneven": 2, "eager": True}, SAVED),
    ("a rank goes over to the rival", (1, 3, 0), {"rival": True, "breaks": 1, "eager": True}, SAVED),
    (
        "and is sent back within the grace",
        (1, 3, 0),
        {"rival": True, "breaks": 1, "eager": True, "gather_s": 1.2},
        UNHURT,
    ),
    ("and one is killed", (1, 2, 1), {"rival": True, "breaks": 1}, SAVED),
    ("one of two controllers dies", (1, 2, 0), {"rival": True, "takeovers": 1}, ON),
    ("one of two controllers and a rank", (1, 2, 1), {"rival": True, "takeovers": 1}, KILLED),
    ("messages arrive twice", (1, 2, 1), {"repeats": 2}, KILLED),
    ("of three ranks", (1, 3, 1), {"repeats": 1, "eager": True}, SAVED),
    ("beside a takeover", (1, 2, 1), {"takeovers": 1, "repeats": 1}, KILLED),
)
def test_small_worlds(size: tuple[int, int, int], more: dict[str, Any], outcomes: Any) -> None:
    model = explore(*size, **more)
    assert always_saved(model) if outcomes is SAVED else model.outcomes == outcomes


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_kill_of_replicas(replicas: int) -> None:
    for hanging in subsets(replicas):
        model = explore(1, replicas, 1, hanging)
        assert always_saved(model) and (replicas > 2 or model.outcomes == KILLED)


def test_without_replicas_copies_are_the_way_back() -> None:
    model = explore(2, 1, 1, kept=True)
    assert model.outcomes == KILLED and "kept" in model.hows


@pytest.mark.parametrize("hanging", [{0, 1, 2, 3}, {0, 1}, {0}], ids=len)
def test_two_shards_of_two_replicas(hanging: set[int]) -> None:
    model = explore(2, 2, 1, hanging, eager=True)
    assert always_saved(model) == (len(hanging) == 4)  # versions that mix can leave no common one without redo


@pytest.mark.parametrize(
    ("hanging", "more", "hows"),
    [
        pytest.param({0, 2}, {"gradients": True}, {"redo"}, marks=pytest.mark.slow),
        ({0, 1}, {"preimages": True}, {"undo"}),
        ({0}, {"preimages": True}, {"undo"}),
        pytest.param({0, 2}, {"preimages": True}, {"undo"}, marks=pytest.mark.slow),
        ({0, 1, 2}, {"gradients": True, "preimages": True}, {"redo"}),
    ],
    ids=str,
)
def test_updates_that_are_made_or_unmade_on_request(hanging: set[int], more: dict[str, Any], hows: set[str]) -> None:
    """Ranks left in the barrier make the update that released ranks have made, or that is unmade: no state is lost.

    A rank in the barrier is waited for: what others can make is not unmade.
    """
    model = explore(2, 2, 1, hanging, eager=True, **more)
    assert always_saved(model)
    assert model.hows == hows


@pytest.mark.parametrize(
    ("hanging", "saved"),
    [({0, 1, 2}, True), *(pytest.param(h, s, marks=pytest.mark.slow) for h, s in [({0, 1}, True), ({0}, False)])],
    ids=str,
)
def test_an_update_that_cannot_be_made_after_all(hanging: set[int], saved: bool) -> None:
    """Another rank makes it, or the version before is saved, which the rank still holds, if its other shard is left.

    Nobody has to leave, so these worlds contain those in which every update that is ordered is made.
    """
    model = explore(2, 2, 1, hanging, 80_000, eager=True, gradients=True, leaves=1)
    assert model.not_redone and always_saved(model) == saved
    assert model.hows == {"redo"} or len(hanging) < 3


# ---------------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("hanging", subsets(4), ids=str)
def test_two_shards_every_barrier(hanging: frozenset[int]) -> None:
    explore(2, 2, 1, hanging, LARGE, eager=True)
    assert always_saved(explore(2, 2, 1, hanging, LARGE, gradients=True, eager=True))


@pytest.mark.slow
@pytest.mark.parametrize("hanging", subsets(3), ids=str)
def test_three_replicas_two_kills_every_barrier(hanging: frozenset[int]) -> None:
    assert always_saved(explore(1, 3, 2, hanging, LARGE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@worlds(
    ("three shards of two replicas", (3, 2, 1), {"hanging": range(6), "eager": True}, SAVED),
    ("two shards and a broken stream", (2, 2, 0), {"breaks": 1, "eager": True}, {(None,) * 4}),
    ("and a rival", (2, 2, 0), {"rival": True, "breaks": 1, "eager": True, "gather_s": 1.2}, {(None,) * 4}),
    ("a broken stream and a dead controller", (1, 2, 0), {"breaks": 1, "takeovers": 1}, ON),
    ("and a kill", (1, 2, 1), {"breaks": 1, "takeovers": 1, "eager": True}, SAVED),
    *(
        (f"large {size} {more}", size, more, None)
        for size, more in [
            ((1, 2, 1), {"rival": True, "breaks": 1, "takeovers": 1}),
            ((1, 2, 1), {"rival": True, "breaks": 2}),
            ((1, 2, 0), {"rival": True, "breaks": 2, "takeovers": 1}),
            ((1, 2, 1), {"rival": True, "breaks": 1, "repeats": 1}),
            ((1, 3, 1), {"rival": True, "takeovers": 1}),
            ((1, 3, 0), {"rival": True, "breaks": 1}),
            ((1, 2, 2), {"breaks": 1, "takeovers": 1}),
            ((1, 3, 2), {"repeats": 1, "eager": True}),
            ((1, 3, 1), {"breaks": 1, "eager": True}),
            ((2, 2, 1), {"gradients": True, "preimages": True, "repeats": 1, "eager": True}),
            ((2, 2, 1), {"hanging": {0}, "gradients": True, "takeovers": 1, "eager": True}),
            ((2, 2, 2), {"hanging": {0}, "gradients": True, "preimages": True, "eager": True}),
            ((3, 2, 1), {"hanging": range(4), "gradients": True, "preimages": True, "eager": True}),
        ]
    ),
)
def test_large_worlds(size: tuple[int, int, int], more: dict[str, Any], outcomes: Any) -> None:
    model = explore(*size, states_max=LARGE, **more)
    if outcomes is not None:
        assert always_saved(model) if outcomes is SAVED else model.outcomes == outcomes


def test_the_model_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(
        layout: Layout, said: Iterable[Answer], written: Mapping[Shard, Version], uncut: Collection[Shard]
    ) -> Plan | NoPlan:
        listed = list(said)
        return decide(layout, [a for a in listed if a.version == min(b.version for b in listed)], written, uncut)

    monkeypatch.setattr(planning, "decide", oldest)
    with pytest.raises(Broken, match=r"I2: .* while 2 was possible after: "):
        explore(1, 3, 1)
