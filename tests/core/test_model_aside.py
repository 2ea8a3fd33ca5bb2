"""Second streams in every interleaving of a small world; see ``tests.core.model_aside``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests.core.model_aside import AsideModel
from tests.core.model_state import Broken
from ttp.core.controller.meanwhile import Meanwhile
from ttp.testing.scenario import grid

KILLED = {(-9, 75), (75, -9)}
MANY = 400_000


def explore(
    shards: int, replicas: int, kills: int, silent: Collection[int], *, states_max: int = 60_000, **more: Any
) -> AsideModel:
    model = AsideModel(grid(shards, replicas), kills, silent=silent, **more)
    states = model.explore(states_max)
    print(f"{shards} x {replicas}, {kills} kills, {silent} hear nothing, {more}: {states} states")
    assert "plan" in model.meanwhile
    return model


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_controllers_that_are_heard_again(eager: bool) -> None:
    assert explore(1, 2, 0, {0, 1}, eager=eager).outcomes == {(None, None)}


def test_a_rank_is_killed_while_the_other_one_hears_nothing() -> None:
    assert explore(1, 2, 1, {0}).outcomes == KILLED


def test_the_controller_is_lost_at_each_point_of_what_is_done_meanwhile() -> None:
    model = explore(1, 2, 1, {0}, takeovers=1, eager=True, hear=False)
    assert model.outcomes == KILLED
    assert model.deferred
    assert "nothing_new" in model.taken_over, "a takeover has found what was saved meanwhile"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_model_sees_a_checkpoint_that_is_believed_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Meanwhile.note

    def too_early(self: Meanwhile, job: Any, incident: Any, last: Any) -> None:
        if incident is not None and incident.draft.plan is not None:
            incident.saved, incident.path = incident.draft.plan.version, "planned"
            last = incident
        made(self, job, incident, last)

    monkeypatch.setattr(Meanwhile, "note", too_early)
    with pytest.raises(Broken, match="I4"):
        explore(1, 2, 1, {0}, takeovers=1, eager=True, hear=False)


# ---------------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_controller_is_lost_while_both_ranks_hear_nothing(shards: int) -> None:
    model = explore(shards, 2 // shards, 0, {0, 1}, takeovers=1, eager=True, hear=False, states_max=MANY)
    assert model.outcomes == {(None, None)}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_both_ranks_hear_nothing_and_one_is_killed() -> None:
    assert explore(1, 2, 1, {0, 1}, eager=True, states_max=MANY).outcomes == KILLED
