"""Shards that are cut into parts: names, number of parts, their writers, and the loss of a writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import best
from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.answer import Answer
from ttp.core.controller import saving
from ttp.core.decide import How, NoPlan, Plan, decide
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.stripes import AUTO, PART_BYTES_MIN, PARTS_MAX, Part
from ttp.errors import ConfigError
from ttp.testing.scenario import grid

LARGE = 100 * PART_BYTES_MIN

ddp = Layout.data_parallel(4)
hsdp = Layout(4, {Shard("a"): (Rank(0), Rank(2)), Shard("b"): (Rank(1), Rank(3))})


def o(rank: int, host: str | None = None, stripes: int = AUTO, size: int = LARGE, **more: Any) -> Answer:
    sizes = {Shard(s): size for s in ("model", "a", "b", "c", "s0", "s1", "s2", "s3")}
    answer = Answer(Rank(rank), Version(7), host=f"h{rank}" if host is None else host, stripes=stripes, sizes=sizes)
    return replace(answer, **more)


def shown(verdict: Plan | NoPlan) -> str:
    assert isinstance(verdict, Plan)
    sign = {How.AS_IS: "", How.REDO: "+", How.UNDO: "-", How.KEPT: "="}
    return " ".join(f"{a.shard}:{sign[a.how]}{a.rank}" for a in verdict.assignments)


# ---------------------------------------------------------------------------------------------------------------- names


def test_a_part_is_called_like_its_shard() -> None:
    assert stripes.split(Shard("model"), 3) == ("model#1/3", "model#2/3", "model#3/3")
    assert stripes.split(Shard("model"), 1) == ("model",)
    assert stripes.parse(Shard("model#2/3")) == Part(Shard("model"), 2, 3)


@pytest.mark.parametrize("name", ["model", "stage#1", "a#0/2", "a#3/2", "a#x/2", "#", "a#1/99999"])
def test_other_names_are_whole_shards(name: str) -> None:
    assert stripes.parse(Shard(name)) == Part(Shard(name), 1, 1)
    assert stripes.base_of(Shard(name)) == name


@given(st.text(min_size=1), st.integers(1, 99))
def test_every_part_knows_where_it_belongs(name: str, count: int) -> None:
    parts = stripes.split(Shard(name), count)
    if count > 1:
        assert [stripes.parse(part) for part in parts] == [Part(Shard(name), i + 1, count) for i in range(count)]
    assert {stripes.base_of(part) for part in parts} == {name} or count == 1


def test_a_layout_has_no_parts() -> None:
    with pytest.raises(ConfigError, match="'stage#1/2' names a part of a shard in ttp"):
        Layout(1, {Shard("stage#1/2"): (Rank(0),)})
    assert Layout(1, {Shard("stage#1"): (Rank(0),)}).groups


def test_the_shards_of_a_layout_have_names() -> None:
    numbered: Any = {0: (0,), 1: (1,)}
    with pytest.raises(ConfigError, match="have names, and 0 is not a str"):
        Layout(2, numbered)


def test_a_shard_is_there_with_all_its_parts() -> None:
    written = {Shard(s): Version(7) for s in ("a", "b#1/2", "b#2/2", "c#2/3")}
    assert stripes.covered(written) == {"a": 7, "b": 7}
    assert stripes.started(written) == {"c": (7, ("c#1/3", "c#3/3"))}
    assert stripes.lacking([Shard(s) for s in "abcd"], written) == ["c#1/3", "c#3/3", "d"]


# ----------------------------------------------------------------------------------------------------- how many and who

# shards  hosts  parts of each
# fmt: off
NUMBERS = [
    (1, 1, 1), (1, 4, 4), (1, 8, 8), (1, 9, 8), (2, 4, 2), (3, 4, 4), (4, 4, 1), (4, 8, 2), (8, 4, 1), (64, 16, 1),
]
# fmt: on


@pytest.mark.parametrize(("shards", "hosts", "parts"), NUMBERS)
def test_shards_are_cut_where_more_can_write_than_there_are_shards(shards: int, hosts: int, parts: int) -> None:
    assert stripes.parts_wanted(LARGE, shards * LARGE, hosts, PARTS_MAX) == parts


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_cutting_never_makes_the_busiest_writer_slower(shards: int, slots: int, most: int) -> None:
    parts = stripes.parts_wanted(LARGE, shards * LARGE, slots, most)
    assert 1 <= parts <= most
    assert -(-parts * shards // slots) / parts <= -(-shards // slots)


@pytest.mark.parametrize(
    ("layout", "said", "text"),
    [
        (ddp, [o(0), o(1), o(2), o(3)], "model#1/4:0 model#2/4:1 model#3/4:2 model#4/4:3"),
        (ddp, [o(1), o(3)], "model#1/2:1 model#2/2:3"),
        (ddp, [o(1)], "model:1"),
        (ddp, [o(0, "x"), o(1, "x"), o(2, "y"), o(3, "y")], "model#1/2:0 model#2/2:2"),
        (ddp, [o(0, "x"), o(1, "x")], "model:0"),
        (ddp, [o(0, "x", 3), o(1, "x", 3), o(2, "y", 3), o(3, "y", 3)], "model#1/3:0 model#2/3:2 model#3/3:1"),
        (ddp, [o(0, stripes=2, size=0), o(1, stripes=2, size=0)], "model#1/2:0 model#2/2:1"),
        (ddp, [o(0, size=0), o(1, size=0)], "model:0"),
        (ddp, [o(0, size=2 * PART_BYTES_MIN - 1), o(1, size=2 * PART_BYTES_MIN - 1)], "model:0"),
        (ddp, [o(0, stripes=0), o(1), o(2)], "model:0"),
        (ddp, [o(0), o(1, stripes=0), o(2)], "model#1/2:0 model#2/2:2"),
        (hsdp, [o(0, "x"), o(1, "x"), o(2, "y"), o(3, "y")], "a:0 b:3"),
        (hsdp, [o(0), o(1), o(2), o(3)], "a#1/2:0 a#2/2:2 b#1/2:1 b#2/2:3"),
        (hsdp, [o(0), o(1), o(2)], "a:0 b:1"),  # b is not written any sooner
    ],
)  # fmt: skip
def test_who_writes_which_part(layout: Layout, said: list[Answer], text: str) -> None:
    assert shown(decide(layout, said)) == text


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            [o(0, main_thread_blocked=True), o(1, main_thread_blocked=True)],
            "model#1/2:0 model#2/2:1",
        ),  # all hang in a collective: as good as any
        ([o(0), o(1, post_step_done=False)], "model:0"),
        ([o(0, torn=True, has_preimage=True), o(1, torn=True, has_preimage=True)], "model:-0"),
        ([o(0, digests={Shard("model"): "x"}), o(1, digests={Shard("model"): "y"})], "model:0"),
        ([o(r, digests={Shard("model"): "y" if r == 2 else "x"}) for r in (0, 1, 2)], "model:0"),
        ([o(0, digests={Shard("model"): "x"}), o(1)], "model:0"),
        ([o(0), o(1, size=LARGE + 4)], "model:0"),
        ([o(0, bad=True), o(1, bad=True)], "model#1/2:0 model#2/2:1"),
        ([o(0, can_save=False), o(1), o(2)], "model#1/2:1 model#2/2:2"),
    ],
)
def test_only_replicas_that_are_alike_share_the_work(said: list[Answer], text: str) -> None:
    assert shown(decide(ddp, said)) == text


def test_a_shard_that_must_not_be_cut_is_not() -> None:
    assert shown(decide(ddp, [o(0), o(1)], uncut={Shard("model")})) == "model:0"


def test_the_reason_says_so() -> None:
    verdict = decide(ddp, [o(0), o(1)])
    assert isinstance(verdict, Plan)
    assert verdict.reason == "version 7 is the newest that is whole in every shard (ranks 0-1 at 7; model in 2 parts)"


# ------------------------------------------------------------------------------------------------------------ once more


@pytest.mark.parametrize(
    ("written", "said", "text"),
    [
        (["model#1/4", "model#2/4"], [o(0), o(1), o(2)], "model#3/4:0 model#4/4:1"),
        (["model#1/4"], [o(0, busy=True), o(2)], "model#2/4:2 model#3/4:0 model#4/4:2"),
        (["model#1/2"], [o(0, busy=True), o(1, "h0")], "model#2/2:1"),
        (["model#1/2"], [o(0, stripes=0)], "model#2/2:0"),
        (["model#1/2"], [o(0, torn=True, has_preimage=True)], "model#2/2:-0"),
        (["model#1/2", "model#2/2"], [o(0)], ""),
        (["model#1/2"], [o(r, digests={Shard("model"): "xy"[r]}) for r in (0, 1)], "model:0"),
    ],
)
def test_what_lacks_of_a_shard_that_is_cut(written: list[str], said: list[Answer], text: str) -> None:
    assert shown(decide(ddp, said, {Shard(s): Version(7) for s in written})) == text


def test_parts_of_another_version_are_worth_nothing() -> None:
    said = [o(0, version=Version(8)), o(1, version=Version(8))]
    assert shown(decide(ddp, said, {Shard("model#1/3"): Version(7)})) == "model#1/2:0 model#2/2:1"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, list[Answer], dict[Shard, Version]]:
    shards, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layout = grid(shards, replicas)
    hosts = draw(st.integers(1, layout.world_size))
    policy = draw(st.sampled_from([0, AUTO, 2, 3, 5]))
    readable = draw(st.sets(st.integers(0, layout.world_size - 1)))
    said = [
        o(
            r,
            f"h{r % hosts}",
            policy,
            draw(st.sampled_from([LARGE, LARGE, LARGE, 0])),
            version=Version(draw(st.sampled_from([7, 7, 7, 8]))),
            main_thread_blocked=draw(st.booleans()),
            busy=draw(st.booleans()),
            bad=draw(st.sampled_from([False, False, True])),
            has_gradient=draw(st.booleans()),
            digests={Shard(f"s{r % shards}"): draw(st.sampled_from(["x", "x", "x", "y", ""]))},
        )
        for r in sorted(readable)
    ]
    cut = [name for s in layout.groups for name in stripes.split(s, draw(st.integers(1, 3)))]
    written = draw(st.lists(st.sampled_from(cut), unique=True))
    return layout, said, {name: Version(7) for name in written}


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_parts_cover_every_shard_exactly_once(job: tuple[Layout, list[Answer], dict[Shard, Version]]) -> None:
    layout, said, written = job
    verdict = decide(layout, said, written)
    there = {stripes.base_of(s) for s in written if stripes.base_of(s) in stripes.covered(written)}
    if not there:  # what is written of others changes who, not whether
        assert isinstance(verdict, Plan) == (best(layout, said) is not None)
    if isinstance(verdict, NoPlan):
        return
    able = {a.rank: a for a in said}
    for shard, group in layout.groups.items():
        mine = [a for a in verdict.assignments if stripes.base_of(a.shard) == shard]
        counts = {stripes.parse(a.shard).count for a in mine}
        assert len(counts) <= 1
        kept = [s for s in written if stripes.base_of(s) == shard and stripes.parse(s).count in (counts or {0})]
        if verdict.version != 7 or counts == {1}:
            kept = []
        names = [a.shard for a in mine] + kept
        assert sorted(names) == sorted(stripes.split(shard, counts.pop())) if mine else shard in there
        assert all(a.rank in group for a in mine)
        writers = [able[a.rank] for a in mine]
        assert len({(a.bad, a.digests[shard], a.sizes[shard]) for a in writers}) <= 1  # nobody mixes what differs
        if len(mine) > 1:
            assert Counter(a.rank for a in mine).most_common(1)[0][1] == 1 or kept


# ------------------------------------------------------------------------------------------------------- the controller


@pytest.fixture(autouse=True)
def no_launcher_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has one rank. A commit would wait for the pages of those that are lost."""
    monkeypatch.setattr(saving, "LATE_S", 0.0)


def cut_job(replicas: int = 4, parts: int = 4) -> Talk:
    """Return a job at version 7 whose rank 0 is lost and whose other ranks have answered."""
    talk = Talk(grid(1, replicas), joined=0)
    for rank in range(replicas):
        talk.hello(rank, host=f"h{rank}", stripes=parts)
    talk.lost(0)
    for rank in range(1, replicas):
        talk.frozen(rank, 7)
    return talk


def saved(talk: Talk, rank: int, parts: list[str], generation: int = 0, cut: str = "c") -> str:
    pieces = [m.Piece(f"{p}_{generation}", 1, "d", "shard", p, Rank(rank), cut=cut) for p in parts]
    return talk.report(rank, m.Saved(Rank(rank), talk.id, generation, tuple(pieces)))


def ordered(talk: Talk) -> dict[int, tuple[str, ...]]:
    return {order.rank: order.order.shards for order in talk.orders(m.Save)}


def test_only_the_part_of_a_lost_saver_is_written_again() -> None:
    talk = cut_job()
    assert ordered(talk) == {1: ("s0#1/3",), 2: ("s0#2/3",), 3: ("s0#3/3",)}
    saved(talk, 3, ["s0#3/3"])
    assert talk.lost(2) == "[evidence] [replan] [plan] Save:3"  # rank 1 still writes
    assert ordered(talk) == {3: ("s0#2/3",)}
    assert saved(talk, 1, ["s0#1/3"]) == "[saved]"
    assert saved(talk, 3, ["s0#2/3"], 1) == "[saved] [commit] Commit:1"
    assert [p.shard for p in talk.orders(m.Commit)[0].pieces] == ["s0#1/3", "s0#3/3", "s0#2/3"]


def test_whoever_still_writes_gets_more_only_if_nobody_else_is_left() -> None:
    talk = cut_job()
    assert talk.save_failed(2) == "[save_failed] [replan] [plan] Save:1"
    assert ordered(talk) == {1: ("s0#1/3", "s0#2/3")}  # begins anew with both
    assert saved(talk, 1, ["s0#1/3"]) == ""
    saved(talk, 3, ["s0#3/3"])
    assert saved(talk, 1, ["s0#1/3", "s0#2/3"], 1) == "[saved] [commit] Commit:1"


def test_all_but_one_saver_are_lost() -> None:
    talk = cut_job()
    saved(talk, 3, ["s0#3/3"])
    talk.lost(1)
    talk.lost(2)
    assert ordered(talk) == {3: ("s0#1/3", "s0#2/3")}
    assert saved(talk, 3, ["s0#1/3", "s0#2/3"], 2) == "[saved] [commit] Commit:3"


def test_a_part_that_is_durable_outlives_its_writer() -> None:
    talk = cut_job()
    saved(talk, 1, ["s0#1/3"])
    assert talk.lost(1) == "[evidence]"
    saved(talk, 2, ["s0#2/3"])
    assert saved(talk, 3, ["s0#3/3"]) == "[saved] [commit] Commit:2"


def test_replicas_that_do_not_cut_alike_write_whole_shards() -> None:
    talk = cut_job()
    saved(talk, 1, ["s0#1/3"])
    assert saved(talk, 2, ["s0#2/3"], cut="other") == "[saved] [misfit] [plan] Save:1"
    assert ordered(talk) == {1: ("s0",)}
    assert saved(talk, 3, ["s0#3/3"]) == "[saved]"  # it was asked for a page too
    assert saved(talk, 1, ["s0"], 1, "") == "[saved] [commit] Commit:1"
    assert [p.shard for p in talk.orders(m.Commit)[0].pieces] == ["s0"]


def test_parts_that_came_to_nothing_are_not_committed_with_pages() -> None:
    """Rank 1 writes a part and pages. The part is dropped, the pages are not."""
    talk = cut_job(3, 2)
    orders = {order.rank: order.order for order in talk.orders(m.Save)}
    assert orders[1].pages
    page = m.Piece("pages", 1, "d", "rank_local", "", Rank(1))
    part = m.Piece("part", 1, "d", "shard", "s0#1/2", Rank(1), cut="c")
    talk.report(1, m.Saved(Rank(1), talk.id, 0, (part, page)))
    saved(talk, 2, ["s0#2/2"], cut="other")
    (whole,) = ordered(talk)
    saved(talk, whole, ["s0"], 1, "")
    assert [p.file for p in talk.orders(m.Commit)[0].pieces] == ["pages", "s0_1"]


def test_parts_of_one_cut_may_come_from_several_generations() -> None:
    talk = cut_job()
    saved(talk, 1, ["s0#1/3"])
    talk.lost(2)
    assert saved(talk, 1, ["s0#2/3"], 1, cut="other") == "[saved] [misfit] [plan] Save:1"
