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
MANY = 2_000_000


def explore(
    shards: int,
    replicas: int,
    kills: int,
    hanging: frozenset[int] = frozenset(),
    *,
    states_max: int = 30_000,
    **more: Any,
) -> Model:
    model = Model(grid(shards, replicas), kills, hanging, **more)
    states = model.explore(states_max)
    words = f"{shards} x {replicas}, {kills} kills, {set(hanging) or 'nobody'} hangs in the barrier, {more or ''}"
    print(f"{words}: {states} states, exits {sorted(model.outcomes, key=str)[:4]}")
    return model


def subsets(world: int) -> list[frozenset[int]]:
    """Return sets of ranks that hang in the barrier. An atomic barrier releases all or none, a real one any of them."""
    return [frozenset(c) for n in range(world + 1) for c in itertools.combinations(range(world), n)]


def always_saved(model: Model) -> bool:
    return not any(70 in exits for exits in model.outcomes)


@pytest.mark.parametrize("hanging", subsets(2), ids=str)
def test_two_replicas_one_kill(hanging: frozenset[int]) -> None:
    model = explore(1, 2, 1, hanging)
    assert model.outcomes == {(LOST, 75), (75, LOST)}


def test_two_replicas_two_kills() -> None:
    assert explore(1, 2, 2).outcomes == {(LOST, 75), (75, LOST), (LOST, LOST)}


def test_without_replicas_a_kill_is_the_end() -> None:
    assert explore(2, 1, 1).outcomes == {(LOST, 70), (70, LOST)}


@pytest.mark.parametrize("hanging", subsets(3), ids=str)
def test_three_replicas_one_kill(hanging: frozenset[int]) -> None:
    assert always_saved(explore(1, 3, 1, hanging))


def test_without_replicas_copies_are_the_way_back() -> None:
    model = explore(2, 1, 1, kept=True)
    assert model.outcomes == {(LOST, 75), (75, LOST)}
    assert "kept" in model.hows
    assert explore(2, 1, 0, breaks=1, kept=True).outcomes == {(None, None)}
    assert explore(2, 1, 1, frozenset({0}), kept=True, takeovers=1).outcomes == {(LOST, 75), (75, LOST)}


def test_three_replicas_two_kills() -> None:
    assert always_saved(explore(1, 3, 2, eager=True))


@pytest.mark.parametrize(
    "hanging",
    [frozenset({0, 1, 2, 3}), frozenset({0, 1}), frozenset({0})],
    ids=str,
)
def test_two_shards_of_two_replicas(hanging: frozenset[int]) -> None:
    model = explore(2, 2, 1, hanging, eager=True)
    assert always_saved(model) == (len(hanging) == 4)  # versions that mix can leave no common one without redo


def test_a_stream_that_breaks_hurts_nobody() -> None:
    assert explore(1, 2, 0, breaks=1).outcomes == {(None, None)}
    assert explore(2, 1, 0, breaks=1).outcomes == {(None, None)}


def test_who_comes_back_too_late_is_fenced() -> None:
    assert explore(1, 2, 0, breaks=1, late=True).outcomes == {(None, None), (70, 75), (75, 70)}


def test_a_stream_breaks_and_a_rank_is_killed() -> None:
    assert explore(1, 2, 1, breaks=1).outcomes == {(LOST, 75), (75, LOST)}


def test_the_controller_dies_and_nothing_else() -> None:
    assert explore(1, 2, 0, takeovers=2).outcomes == {(None, None)}


def test_the_controller_dies_and_a_rank_is_killed() -> None:
    assert explore(1, 2, 1, takeovers=1).outcomes == {(LOST, 75), (75, LOST)}
    assert always_saved(explore(1, 2, 2, takeovers=1))


def test_replicas_write_parts_side_by_side() -> None:
    assert explore(1, 2, 1, stripes=2).outcomes == {(LOST, 75), (75, LOST)}
    assert always_saved(explore(1, 3, 1, stripes=2, eager=True))
    assert always_saved(explore(1, 3, 2, frozenset({0, 1, 2}), stripes=2, eager=True))


def test_parts_that_do_not_fit_together_are_not_committed() -> None:
    assert always_saved(explore(1, 3, 1, stripes=2, uneven=2, eager=True))


# ------------------------------------------------------------------------------------- two controllers, repeats, redo


def test_a_rank_goes_over_to_the_rival() -> None:
    assert always_saved(explore(1, 2, 0, rival=True, breaks=1))
    assert always_saved(explore(1, 3, 0, rival=True, breaks=1, eager=True))


def test_a_rank_goes_over_to_the_rival_and_one_is_killed() -> None:
    assert always_saved(explore(1, 2, 1, rival=True, breaks=1))


def test_one_of_two_controllers_dies() -> None:
    assert explore(1, 2, 0, rival=True, takeovers=1).outcomes == {(None, None)}
    assert explore(1, 2, 1, rival=True, takeovers=1).outcomes == {(LOST, 75), (75, LOST)}


def test_messages_arrive_twice() -> None:
    assert explore(1, 2, 1, repeats=2).outcomes == {(LOST, 75), (75, LOST)}
    assert always_saved(explore(1, 3, 1, repeats=1, eager=True))
    assert explore(1, 2, 1, takeovers=1, repeats=1).outcomes == {(LOST, 75), (75, LOST)}
    assert always_saved(explore(1, 2, 1, rival=True, breaks=1, repeats=1, eager=True))


@pytest.mark.parametrize(
    "hanging", [pytest.param(frozenset({0, 2}), marks=pytest.mark.slow), frozenset({0, 1, 2})], ids=str
)
def test_updates_made_on_request(hanging: frozenset[int]) -> None:
    """Ranks left in the barrier make the update that released ranks have made, so no state is lost."""
    model = explore(2, 2, 1, hanging, gradients=True, eager=True)
    assert always_saved(model)
    assert model.hows == {"redo"}


@pytest.mark.slow
@pytest.mark.parametrize("hanging", subsets(4), ids=str)
def test_updates_made_on_request_every_barrier(hanging: frozenset[int]) -> None:
    assert always_saved(explore(2, 2, 1, hanging, gradients=True, eager=True, states_max=MANY))


@pytest.mark.parametrize(
    "hanging",
    [frozenset({0, 1}), frozenset({0}), pytest.param(frozenset({0, 2}), marks=pytest.mark.slow)],
    ids=str,
)
def test_updates_unmade(hanging: frozenset[int]) -> None:
    model = explore(2, 2, 1, hanging, preimages=True, eager=True)
    assert always_saved(model)
    assert "undo" in model.hows


def test_what_others_can_make_is_not_unmade() -> None:
    """A rank in the barrier is waited for, so no finished step of a living rank is lost."""
    model = explore(2, 2, 1, frozenset({0, 1, 2}), gradients=True, preimages=True, eager=True)
    assert always_saved(model)
    assert model.hows == {"redo"}


# ---------------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("hanging", subsets(4), ids=str)
def test_two_shards_every_barrier(hanging: frozenset[int]) -> None:
    explore(2, 2, 1, hanging, eager=True, states_max=MANY)


@pytest.mark.slow
@pytest.mark.parametrize("hanging", subsets(3), ids=str)
def test_three_replicas_two_kills_every_barrier(hanging: frozenset[int]) -> None:
    assert always_saved(explore(1, 3, 2, hanging, states_max=MANY))


@pytest.mark.slow
def test_three_shards_of_two_replicas() -> None:
    assert always_saved(explore(3, 2, 1, frozenset(range(6)), eager=True, states_max=MANY))


@pytest.mark.slow
def test_two_shards_and_a_broken_stream() -> None:
    assert explore(2, 2, 0, breaks=1, eager=True, states_max=MANY).outcomes == {(None,) * 4}


LARGE: list[tuple[int, int, int, frozenset[int], dict[str, Any]]] = [
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 2}),
    (1, 2, 0, frozenset(), {"rival": True, "breaks": 2, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "repeats": 1}),
    (1, 3, 1, frozenset(), {"rival": True, "takeovers": 1}),
    (1, 3, 0, frozenset(), {"rival": True, "breaks": 1}),
    (2, 2, 0, frozenset(), {"rival": True, "breaks": 1, "eager": True}),
    (1, 2, 2, frozenset(), {"breaks": 1, "takeovers": 1}),
    (1, 3, 2, frozenset(), {"repeats": 1, "eager": True}),
    (1, 3, 1, frozenset(), {"breaks": 1, "eager": True}),
    (2, 2, 1, frozenset(), {"gradients": True, "preimages": True, "repeats": 1, "eager": True}),
    (2, 2, 1, frozenset({0}), {"gradients": True, "takeovers": 1, "eager": True}),
    (2, 2, 2, frozenset({0}), {"gradients": True, "preimages": True, "eager": True}),
    (3, 2, 1, frozenset({0, 1, 2, 3}), {"gradients": True, "preimages": True, "eager": True}),
]
"""Shards, replicas, kills, who hangs, and the rest, as ``Model`` says."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", LARGE, ids=str)
def test_large_worlds(world: tuple[int, int, int, frozenset[int], dict[str, Any]]) -> None:
    shards, replicas, kills, hanging, more = world
    explore(shards, replicas, kills, hanging, states_max=8_000_000, **more)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_broken_stream_and_a_dead_controller() -> None:
    assert explore(1, 2, 0, breaks=1, takeovers=1, states_max=MANY).outcomes == {(None, None)}
    assert always_saved(explore(1, 2, 1, breaks=1, takeovers=1, eager=True, states_max=MANY))


def test_the_model_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(
        layout: Layout, said: Iterable[Answer], written: Mapping[Shard, Version], uncut: Collection[Shard]
    ) -> Plan | NoPlan:
        listed = list(said)
        return decide(layout, [a for a in listed if a.version == min(b.version for b in listed)], written, uncut)

    monkeypatch.setattr(planning, "decide", oldest)
    with pytest.raises(Broken, match=r"I2: .* while 2 was possible after: "):
        explore(1, 3, 1)
