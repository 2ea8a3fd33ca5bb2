"""How a controller learns the layout of a digest, and that the size of a hello does not depend on the layout."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.talk import PATIENCE, Talk, answers
from ttp.core import layout_messages
from ttp.core import messages as m
from ttp.core.controller import layout_exchange, membership
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.controller.layout_exchange import ANSWER_S, TELLERS_MAX
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Rank, Shard, describe_copies, difference
from ttp.core.layout_messages import LayoutPart, ShardGroup, TellLayout, in_parts
from ttp.testing.scenario import grid
from ttp.testing.toy import hello
from ttp.wire.convert import parse_report, report_to_wire

LAYOUT = grid(1, 3)


class Asked(Talk):
    """A controller that knows no layout at first."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        super().__init__(layout, joined=0)

    def greets(self, rank: int, layout: Layout | None = None, **more: Any) -> str:
        return self.report(rank, hello(rank, layout or self.layout, **more))

    def tells(self, rank: int, layout: Layout | None = None, digest: str = "") -> str:
        layout = layout or self.layout
        for part in answers(TellLayout(Rank(rank), digest or layout.digest), layout):
            said = self.report(rank, part)
        return said


def test_one_rank_is_asked_and_all_wait() -> None:
    talk = Asked()
    assert talk.greets(1) == "TellLayout:1"
    assert talk.greets(0) == ""
    assert talk.tells(1) == "[incarnation] Welcome:1 [joined] Welcome:0 [joined]"
    assert talk.facts("incarnation")["groups"] == {"s0": "0-2"}
    assert talk.greets(2) == "Welcome:2 [joined] [formed]", "it is known now"


def test_the_layout_is_known_to_the_next_incarnation() -> None:
    talk = Asked()
    talk.greets(0)
    talk.tells(0)
    talk.lost(0)
    assert talk.greets(0, nonce="again", launch=1).startswith("[incarnation] Welcome:0")


def test_another_is_asked_when_that_one_dies() -> None:
    talk = Asked()
    talk.greets(1)
    talk.greets(0)
    assert talk.lost(1) == "TellLayout:0"
    assert talk.tells(1) == "", "it does not wait any more"
    assert talk.tells(0) == "[incarnation] Welcome:0 [joined]"


def test_another_is_asked_when_that_one_does_not_answer() -> None:
    talk = Asked()
    talk.greets(1)
    talk.greets(0)
    assert talk.machine.deadline() == ANSWER_S
    assert talk.after(ANSWER_S) == "TellLayout:0"
    assert talk.after(2 * ANSWER_S) == "TellLayout:1", "nobody else is left"
    assert talk.tells(0).startswith("[incarnation]"), "a slow answer counts"
    assert talk.machine.deadline() is None or talk.machine.deadline() != talk.now


def test_the_parts_of_few_ranks_are_kept() -> None:
    """Each rank that is asked might send a large layout and never finish it."""
    talk = Asked(grid(1, TELLERS_MAX + 1))
    for rank in range(TELLERS_MAX + 1):
        talk.greets(rank)
    for _ in range(TELLERS_MAX):
        talk.after(60)
    assert talk.tells(0) == "", "it was asked first"
    assert talk.tells(1).startswith("[incarnation]")


def test_as_long_as_parts_come_nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_messages, "PART_RANKS_MAX", 1)
    talk = Asked()
    talk.greets(1)
    talk.greets(0)
    for part in answers(TellLayout(Rank(1), LAYOUT.digest), LAYOUT)[:-1]:
        talk.now += 0.9 * ANSWER_S
        assert talk.report(1, part) == talk.report(1, part) == "", "a part may come twice"
        assert talk.after(0.0) == ""
    assert talk.tells(1).startswith("[incarnation]")


def test_nobody_is_left_to_ask() -> None:
    talk = Asked()
    talk.greets(1)
    talk.lost(1)
    assert talk.machine.deadline() == PATIENCE.abandoned_s
    assert talk.greets(1) == "TellLayout:1"


wrong: list[tuple[list[LayoutPart], str]] = [
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1, (ShardGroup(Shard("s"), ()),))], "empty replica group"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1, ())], "at least one shard"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 1, 1, ())], "part 1 of 1 is not a valid part"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1 << 30, ())], "not a valid part of a layout"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, n, ()) for n in (2, 3)], "not a valid part of a layout"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1, in_parts(LAYOUT)[0] * 2)], "shard 's0' is listed twice"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1, (ShardGroup(Shard("s"), (Rank(5),)),))], "a rank outside 0..2: 5"),
    ([LayoutPart(Rank(1), LAYOUT.digest, 0, 1, in_parts(grid(3, 1))[0])], "layout and digest do not match"),
]


@pytest.mark.parametrize(("parts", "text"), wrong, ids=[w[1] for w in wrong])
def test_who_tells_nonsense_is_refused_and_the_next_one_is_asked(parts: list[LayoutPart], text: str) -> None:
    talk = Asked()
    talk.greets(1)
    talk.greets(0)
    said = [talk.report(1, part) for part in parts]
    assert said[-1] == "Refused(malformed):1 [refused] TellLayout:0"
    assert text in talk.facts("refused")["text"]
    assert talk.tells(0) == "[incarnation] Welcome:0 [joined]"


def test_too_many_ranks_are_refused_before_they_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_exchange, "RANKS_MAX", 2)
    talk = Asked()
    talk.greets(0)
    assert talk.tells(0).startswith("Refused(malformed)")


def test_who_disagrees_is_told_what_differs() -> None:
    """By then both layouts are known."""
    talk = Asked()
    talk.greets(0)
    talk.tells(0)
    theirs = Layout(3, {Shard("s0"): (Rank(0), Rank(1)), Shard("s1"): (Rank(2),)})
    assert talk.greets(2, theirs) == "TellLayout:2"
    assert talk.tells(2, theirs) == "Refused(mismatch):2 [refused]"
    text = talk.facts("refused")["text"]
    assert "shard 's1' only in the first; shard 's0' is held by ranks 0-1 in the first and by 0-2 in the second" in text
    assert talk.greets(1, theirs) == "Refused(mismatch):1 [refused]", "nobody is asked twice"


def test_strangers_are_refused_without_a_question() -> None:
    talk = Talk()
    other = grid(3, 1)
    for change in ({"run_id": "b"}, {"nonce": "b"}, {"incarnation": -1}):
        stranger = replace(hello(1, other), **change)
        assert talk.event(Received(ConnectionId(50), stranger)).startswith("Refused(")


def test_a_job_in_which_every_rank_has_another_layout() -> None:
    """A few ranks at a time are asked. A rank that does not answer does not block the others."""
    world = 12
    own = [Layout(world, {Shard(f"of {r}"): tuple(Rank(x) for x in range(world))}) for r in range(world)]
    talk = Asked(own[0])
    said = [talk.greets(r, own[r]) for r in range(world)]
    assert [s for s in said if s] == [f"TellLayout:{r}" for r in range(layout_exchange.INQUIRIES_MAX)]
    heard: set[int] = set()
    for _ in range(world):
        talk.after(ANSWER_S)
        heard |= {order.rank for order in talk.orders(TellLayout)}
    assert heard >= set(range(layout_exchange.INQUIRIES_MAX, world)), "the first ones do not answer"
    for _rank in range(world):
        talk.after(100.0)
        for order in talk.orders(TellLayout):
            talk.tells(order.rank, own[order.rank])
    assert len(talk.machine.job.layouts) <= membership.LAYOUTS_MAX + 1


def test_the_end_of_many_streams_costs_constant_time_each() -> None:
    """Nothing is kept for ended streams."""
    talk = Asked(Layout.data_parallel(2000))
    for rank in range(2000):
        talk.greets(rank)
    book = talk.machine._parts.layouts
    for rank in range(2000):
        talk.event(StreamEnded(ConnectionId(rank + 1)))
    assert not book._open and not book._by_connection


LAYOUTS = st.integers(1, 6).flatmap(
    lambda world: st.lists(st.sets(st.integers(0, world - 1), min_size=1), min_size=1, max_size=7).map(
        lambda sets: Layout(
            world, {Shard(f"s{n}"): tuple(map(Rank, ranks)) for n, ranks in enumerate([*sets, set(range(world))])}
        )
    )
)


@given(LAYOUTS, st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_parts_make_the_layout_again(layout: Layout, groups: int, ranks: int, chance: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_messages, "PART_GROUPS_MAX", groups)
        patch.setattr(layout_messages, "PART_RANKS_MAX", ranks)
        parts = answers(TellLayout(Rank(0), layout.digest), layout)
    assert all(len(p.groups) <= groups and sum(len(g.ranks) for g in p.groups) <= ranks for p in parts)
    chance.shuffle(parts)
    machine = ControllerMachine(PATIENCE, str, 0.0)
    machine.on_event(Received(ConnectionId(1), hello(0, layout)), 0.0)
    for part in parts:
        machine.on_event(Received(ConnectionId(1), part), 0.0)
    assert machine.job.layout is not None
    assert (machine.job.layout.groups, machine.job.layout.digest) == (layout.groups, layout.digest)


@given(LAYOUTS, LAYOUTS)
def test_layouts_that_differ_have_a_difference(one: Layout, other: Layout) -> None:
    if one.world_size == other.world_size:
        assert bool(difference(one, other)) == (one.digest != other.digest)


def test_a_hundred_thousand_shards_can_be_told() -> None:
    """They would not fit into a hello."""
    layout = Layout(8, {Shard(f"layer.{n}.weight"): (Rank(n % 8),) for n in range(100_000)})
    assert len(report_to_wire(hello(0, layout)).SerializeToString()) < 200
    machine = ControllerMachine(PATIENCE, str, 0.0)
    machine.on_event(Received(ConnectionId(1), hello(0, layout)), 0.0)
    for part in answers(TellLayout(Rank(0), layout.digest), layout):
        data = report_to_wire(part).SerializeToString()
        assert len(data) < 1 << 20
        machine.on_event(Received(ConnectionId(1), parse_report(data)), 0.0)
    assert machine.job.layout is not None and machine.job.layout.digest == layout.digest


def test_members_keep_nothing_that_grows_with_the_layout() -> None:
    import sys

    sizes = []
    for shards in (1, 64):
        layout = grid(shards, 64 // shards)
        talk = Talk(layout)
        member = talk.machine.job.members[Rank(5)]
        sizes.append(sum(sys.getsizeof(getattr(member.hello, name)) for name in m.Hello.__slots__))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout.data_parallel(4), "4 ranks, 1 shard on 4 ranks each"),
        (grid(4, 2), "8 ranks, 4 shards on 2 ranks each"),
        (
            Layout(3, {Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2),)}),
            "3 ranks, 2 shards, 1 of them on one rank only",
        ),
        (
            Layout(5, {Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2), Rank(3), Rank(4))}),
            "5 ranks, 2 shards on 2 to 3 ranks each",
        ),
    ],
)
def test_who_can_stand_in_for_whom(layout: Layout, text: str) -> None:
    assert describe_copies(layout) == text
