"""A host is drained and its ranks move to one that stands by, with faults at every point."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mindio.handler_world import FOUR, HandlerWorld, Kind, Trouble
from tests.mindio.test_switching import MOVED
from ttp.core.layout import Rank
from ttp.errors import EXIT_SAVED
from ttp.mindio.protocol import switching
from ttp.mindio.protocol.manager_messages import Notice, Noticed, NoticeKind, PlaceOffered, TakePlace


def drained(trouble: Trouble | None = None, *, offers: bool = True, knocks: bool = True, **more: Any) -> HandlerWorld:
    """Drain host b, which has ranks 2 and 3, while a launcher on another host offers itself."""
    this = HandlerWorld(FOUR, trouble, "aabb", **{"recover": True, **more})
    if offers:
        assert offer(this) == ()
    this.event(Noticed(Notice(NoticeKind.MOVE, params="b")))
    for rank in (2, 3) if knocks else ():
        this.knock(rank)
    return this


def offer(this: HandlerWorld, host: str = "other", store: str = "there:1") -> tuple[Rank, ...]:
    this.event(PlaceOffered(host, store))
    taken = [action.ranks for action in this.said if isinstance(action, TakePlace)]
    return taken[0]


def test_the_ranks_of_a_host_that_is_drained_are_moved_to_one_that_has_offered_its_place() -> None:
    this = drained(knocks=False)
    assert this.answer == "" and this.machine.drained_hosts == ["b"]
    assert (offer(this), offer(this, "third")) == ((2, 3), ())
    assert this.kinds() == [] and this.machine.stage == "training"
    this.knock(2)
    this.knock(3)
    assert this.kinds() == MOVED and this.machine.stage == "training" and this.released == set(), this.story()
    assert this.named == [7] and {act.store for act in this.acted(Kind.REBUILD).values()} == {"there:1"}
    assert this.machine.job.hosts() == {"a": [0, 1], "other": [2, 3]} and offer(this) == ()


@pytest.mark.parametrize(
    ("host", "why", "settings"),
    [
        ("b", "no standby host has offered to take its ranks", {"offers": False}),
        ("b", "no enable_arf, or no handlers to rebuild", {"recover": False}),
        ("a", "rank 0 runs there, and the other ranks need its host", {}),
        ("c", "no rank was given", {}),
    ],
)
def test_a_host_whose_ranks_cannot_be_moved(host: str, why: str, settings: dict[str, Any]) -> None:
    this = HandlerWorld(FOUR, None, "aabb", recover=settings.get("recover", True))
    if settings.get("offers", True):
        offer(this)
    this.event(Noticed(Notice(NoticeKind.MOVE, params=host)))
    assert why in this.answer and not this.machine.job.moving and this.machine.drained_hosts == []


def test_an_offer_does_not_hold_for_ever() -> None:
    this = HandlerWorld(FOUR, None, "aabb", recover=True)
    offer(this)
    this.after(switching.OFFER_S + 1)
    this.event(Noticed(Notice(NoticeKind.MOVE, params="b")))
    assert this.answer == "no standby host has offered to take its ranks"


@pytest.mark.parametrize(
    "how",
    ["nobody comes", "the save fails", "somebody does not stand still", "a repair fails", "one dies meanwhile"],
)
def test_a_host_that_is_drained_is_left_whatever_goes_wrong(how: str) -> None:
    """Then all ranks restart from the first checkpoint, like jobs whose ranks cannot be moved."""
    troubles: dict[str, Trouble] = {
        "the save fails": {(Kind.RENAME, rank): "fail" for rank in range(4)},
        "somebody does not stand still": {(Kind.PAUSE, 1): "fail"},
        "a repair fails": {(Kind.REPAIR, 0): "fail"},
    }
    this = drained(troubles.get(how), knocks=how not in ("nobody comes", "one dies meanwhile"))
    if how == "one dies meanwhile":
        this.kill(1)
    if how == "nobody comes":
        this.after(switching.START_S - 1)
        assert this.machine.incident is None
        this.after(2)
    this.settle()
    assert this.released == {EXIT_SAVED} and this.machine.drained_hosts == ["b"], this.story()
    assert not this.guests and not this.machine.job.moving
