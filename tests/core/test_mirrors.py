"""Pages that ranks of another host keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import Talk, Wide, page
from ttp.core import messages as m
from ttp.core.controller.events import Accused
from ttp.core.copy_messages import Keep, Mirror, MirrorTo
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid


class Mirrored(Wide):
    """Four ranks on two hosts, with TTP_MIRROR."""

    def __init__(self) -> None:
        super().__init__(grid(1, 4))

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"pages_at": f"10.0.0.{rank // 2}:{rank}", **more})


@pytest.mark.parametrize(
    ("lost", "collected"), [((2, 3), {0: (0, 1, 2), 1: (3,)}), ((0, 1), {2: (0, 2, 3), 3: (1,)})], ids=str
)
def test_each_rank_is_told_who_keeps_its_page_and_pages_are_used_when_a_host_is_lost(
    lost: tuple[int, int], collected: dict[int, tuple[int, ...]]
) -> None:
    talk = Mirrored()
    assert "MirrorTo:0,1,2,3" in talk.lines[-1]
    assert all("MirrorTo" not in said for said in talk.lines[:-1]), "not before all are there"
    for rank in lost:
        talk.accuse(rank, m.FaultKind.EXITED)
    talk.frozen_all()
    assert {order.rank: order.order.pages for order in talk.orders(m.Save)} == collected
    for rank in collected:
        talk.saved(rank)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_a_keeper_that_is_lost_too_is_asked_for_nothing() -> None:
    talk = Mirrored()
    for rank in (1, 2, 3):
        talk.accuse(rank, m.FaultKind.EXITED)
    assert "Save:0" in talk.frozen(0, 7) and [order.order.pages for order in talk.orders(m.Save)] == [(0, 1, 2)]
    talk.saved(0)
    assert talk.orders(m.Commit)[0].missing_pages == (3,)


def test_a_keeper_that_comes_back_is_where_it_says_it_is() -> None:
    """The mirrored rank is told the new address, by any controller."""
    talk = Mirrored()
    talk.back(1, pages_at="10.0.0.0:99")
    assert talk.orders(MirrorTo) == [
        MirrorTo(Rank(1), 1, Rank(3), "10.0.0.1:3"),
        MirrorTo(Rank(3), 1, Rank(1), "10.0.0.0:99"),
    ]


@pytest.mark.parametrize(("without", "told"), [(0, "MirrorTo:1,3"), (3, "MirrorTo:0,2")])
def test_a_rank_that_keeps_no_pages_does_not_keep_others_from_it(without: int, told: str) -> None:
    """It could not open a port, say. It may be the last one to join."""
    talk = Talk(grid(1, 4), joined=0)
    for rank in range(4):
        said = talk.hello(rank, host=f"h{rank // 2}", pages_at="" if rank == without else "h:1")
    assert told in said


def test_on_one_host_and_without_the_switch_nobody_is_told() -> None:
    assert not any("MirrorTo" in said for said in Wide(grid(1, 4)).lines)
    assert not any("MirrorTo" in said for said in Mirrored().lines[:1])
    alone = Wide(grid(1, 2))
    assert not any("MirrorTo" in alone.hello(rank, pages_at="h:1") for rank in range(2))


def test_what_a_dead_rank_has_left_on_its_host_goes_to_one_that_lives() -> None:
    """The launcher of that host sends the page together with the report of the death."""
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    said = talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(2), page(3))))
    assert said.endswith("Keep:0,0")
    assert talk.orders(Keep)[1] == Keep(Rank(0), 1, Rank(3), Version(7), True, 1, b"page")
    talk.frozen_all()
    assert {order.rank: order.order.pages for order in talk.orders(m.Save)} == {0: (0, 1, 2, 3)}
    talk.saved(0)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_it_comes_before_the_commit_though_after_the_plan() -> None:
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.lost(3)
    talk.frozen_all()
    talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(2), page(3))))
    talk.saved(0)
    (late,) = talk.orders(m.Save)
    assert late.order.pages == (2, 3)
    talk.saved(late.rank, late.generation)
    assert talk.orders(m.Commit)[0].missing_pages == ()


@pytest.mark.parametrize("comes", [True, False])
def test_a_commit_waits_a_moment_for_the_launcher_of_a_host_without_ranks(comes: bool) -> None:
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.lost(3)
    talk.frozen_all()
    assert "Commit" not in talk.saved(0)
    if comes:
        talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(2), page(3))))
        (late,) = talk.orders(m.Save)
        talk.saved(late.rank, late.generation)
    else:
        talk.after(1)
    (commit,) = talk.orders(m.Commit)
    assert commit.missing_pages == (() if comes else (2, 3))


@pytest.mark.parametrize("wrong", [page(1), page(2, incarnation=9), page(99)], ids=["lives", "incarnation", "nobody"])
def test_nobody_else_is_inherited_from(wrong: Mirror) -> None:
    talk = Wide(grid(1, 4))
    assert "Keep" not in talk.event(Accused((Rank(2),), m.FaultKind.EXITED, "seen", (102,), (wrong,)))


def test_what_a_launcher_hands_over_goes_to_who_has_the_earlier_pages() -> None:
    talk = Mirrored()
    assert talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(3),))).endswith("Keep:1")


def planned_before_all_have_answered() -> Wide:
    """Return a save that begins when rank 5 is dead and rank 4 of its host has not answered."""
    talk = Wide(grid(1, 6))
    talk.accuse(5, m.FaultKind.EXITED)
    talk.frozen(0, 7)
    assert "[plan] Save:" in talk.frozen(1, 8)
    saves = talk.orders(m.Save)
    talk.frozen_all(8, 2, 3)
    while saves:
        order = saves.pop()
        talk.saved(order.rank, order.generation)
        saves += talk.orders(m.Save)
    return talk


def test_pages_of_a_host_that_answers_late_are_collected_before_the_commit() -> None:
    talk = planned_before_all_have_answered()
    assert talk.incident.stage.value == "saving"
    talk.frozen(4, 8)
    (late,) = talk.orders(m.Save)
    assert (late.rank, late.order.pages) == (4, (4, 5))
    talk.saved(4, late.generation)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_a_commit_does_not_wait_for_long() -> None:
    talk = planned_before_all_have_answered()
    assert "Commit" in talk.after(1.0)
    assert talk.orders(m.Commit)[0].missing_pages == (4, 5)


def test_without_mirror_pages_of_a_lost_host_are_missing() -> None:
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen_all()
    talk.saved(0)
    assert talk.orders(m.Commit)[0].missing_pages == (2, 3)
