"""The plans of ``decide``: tables to read, and properties against an oracle.

Notation of an answer: ``o(rank, version)`` is whole, ``x(rank, version)`` torn after that version. Letters behind it:
``g`` holds the gradient of the next version, ``p`` a pre-image of the last, ``s`` its main thread hangs, ``u`` the
post-step is not done. A rank that gives no answer is dead.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import best
from ttp.core.answer import Answer
from ttp.core.decide import How, NoPlan, Plan, decide, materialisable
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import ConfigError


def o(rank: int, version: int, marks: str = "", host: str = "", *, torn: bool = False) -> Answer:
    return Answer(
        Rank(rank),
        Version(version),
        torn=torn,
        has_gradient="g" in marks,
        has_preimage="p" in marks,
        main_thread_blocked="s" in marks,
        post_step_done="u" not in marks,
        host=host,
    )


def x(rank: int, version: int, marks: str = "") -> Answer:
    return o(rank, version, marks, torn=True)


def layout(**groups: list[int]) -> Layout:
    world = 1 + max(r for ranks in groups.values() for r in ranks)
    return Layout(world, {Shard(s): tuple(Rank(r) for r in ranks) for s, ranks in groups.items()})


ddp = layout(m=[0, 1, 2])
hsdp = layout(a=[0, 2], b=[1, 3])
zero = layout(a=[0], b=[1])
moe = layout(dense=[0, 1, 2, 3], e0=[0, 1], e1=[2, 3])

# fmt: off
TABLE: list[tuple[str, Layout, list[Answer], int | None, str]] = [
    # what                         replicas  answers                                  saved  by (+ redo, - undo) or why
    ("all at one version",          ddp,     [o(0, 7), o(1, 7), o(2, 7)],             7,    "m:0"),
    ("the newest wins",             ddp,     [o(0, 7), o(1, 8), o(2, 7)],             8,    "m:1"),
    ("one is dead",                 ddp,     [o(1, 7), o(2, 7)],                      7,    "m:1"),
    ("the only newer one is torn",  ddp,     [x(0, 7), o(1, 7), o(2, 7)],             7,    "m:1"),
    ("all but one are dead",        ddp,     [o(2, 7)],                               7,    "m:2"),
    ("a torn one is all there is",  ddp,     [x(0, 7)],                               None, "'m' has no whole copy"),
    ("torn, but kept a pre-image",  ddp,     [x(0, 7, "p")],                          7,    "m:-0"),
    ("torn with a gradient",        ddp,     [x(0, 7, "g")],                          None, "'m' has no whole copy"),
    ("nobody answers",              ddp,     [],                                      None, "ranks 0-2 gave no answer"),
    ("nothing was trained",         ddp,     [o(0, 0), o(1, 0)],                      0,    "m:0"),
    ("stuck saves only if it must", ddp,     [o(0, 7, "s"), o(1, 7, "s"), o(2, 7)],   7,    "m:2"),
    ("all stuck",                   ddp,     [o(0, 7, "s"), o(1, 7, "s")],            7,    "m:0"),
    ("unsettled only if it must",   ddp,     [o(0, 7, "u"), o(1, 7)],                 7,    "m:1"),
    ("newer beats settled",         ddp,     [o(0, 8, "su"), o(1, 7)],                8,    "m:0"),
    ("whole beats undo",            ddp,     [x(0, 7, "p"), o(1, 7, "su")],           7,    "m:1"),
    ("redo makes a newer one",      ddp,     [o(0, 7, "g"), o(1, 7)],                 8,    "m:+0"),
    ("from different columns",      hsdp,    [o(0, 7), o(3, 7)],                      7,    "a:0 b:3"),
    ("one group is gone",           hsdp,    [o(0, 7), o(2, 7)],                      None, "'b' has no whole copy"),
    ("no common version",           hsdp,    [o(0, 8), o(1, 7), o(2, 8), o(3, 7)],    None, "a has [8]; b has [7]"),
    ("older, but common",           hsdp,    [o(0, 8), o(1, 7), o(2, 7), o(3, 7)],    7,    "a:2 b:1"),
    ("the ones ahead undo",         hsdp,    [o(0, 8, "p"), o(1, 7), o(2, 8, "p")],   7,    "a:-0 b:1"),
    ("the ones behind redo",        hsdp,    [o(0, 8), o(1, 7, "g"), o(2, 8)],        8,    "a:0 b:+1"),
    ("redo is preferred to undo",   hsdp,    [o(0, 8, "p"), o(1, 7, "g")],            8,    "a:0 b:+1"),
    ("no replicas, all there",      zero,    [o(0, 7), o(1, 7)],                      7,    "a:0 b:1"),
    ("no replicas, one gone",       zero,    [o(1, 7)],                               None, "'a' has no whole copy"),
    ("dense and expert differ",     moe,     [o(1, 7), o(2, 7)],                      7,    "dense:1 e0:1 e1:2"),
    ("work is spread over ranks",   moe,     [o(0, 7), o(1, 7), o(2, 7), o(3, 7)],    7,    "dense:1 e0:0 e1:2"),
    ("an expert is gone",           moe,     [o(0, 7), o(1, 7)],                      None, "'e1' has no whole copy"),
]
# fmt: on


def shown(plan: Plan) -> str:
    sign = {How.AS_IS: "", How.REDO: "+", How.UNDO: "-", How.KEPT: "="}
    return " ".join(f"{a.shard}:{sign[a.how]}{a.rank}" for a in plan.assignments)


@pytest.mark.parametrize(("job", "said", "version", "text"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(job: Layout, said: list[Answer], version: int | None, text: str) -> None:
    verdict = decide(job, said)
    if version is None:
        assert isinstance(verdict, NoPlan)
        assert text in verdict.reason
    else:
        assert isinstance(verdict, Plan)
        assert (verdict.version, shown(verdict)) == (version, text)


def test_work_is_spread_over_hosts() -> None:
    job = Layout(8, {Shard(f"s{i}"): (Rank(i), Rank(4 + i)) for i in range(4)})
    said = [o(r, 3, host="a" if r < 4 else "b") for r in range(8)]
    verdict = decide(job, said)
    assert isinstance(verdict, Plan)
    assert Counter("a" if a.rank < 4 else "b" for a in verdict.assignments) == {"a": 2, "b": 2}


def test_the_last_of_several_answers_of_a_rank_counts() -> None:
    verdict = decide(ddp, [o(0, 7), o(0, 8)])
    assert isinstance(verdict, Plan)
    assert verdict.version == 8


@pytest.mark.parametrize(
    ("written", "version", "text"),
    [
        ({"a": 7}, 7, "b:1"),
        ({"a": 7, "b": 7}, 7, ""),
        ({"a": 6}, 7, None),  # of a version that b cannot make any more
    ],
)
def test_what_is_written_needs_nobody(written: dict[str, int], version: int, text: str | None) -> None:
    verdict = decide(hsdp, [o(1, 7)], {Shard(s): Version(v) for s, v in written.items()})
    if text is None:
        assert isinstance(verdict, NoPlan)
        assert "a has [6]; b has [7]" in verdict.reason
    else:
        assert isinstance(verdict, Plan)
        assert (verdict.version, shown(verdict)) == (version, text)


def test_a_newer_version_beats_what_is_written() -> None:
    verdict = decide(hsdp, [o(0, 8), o(1, 8)], {Shard("a"): Version(7)})
    assert isinstance(verdict, Plan)
    assert (verdict.version, shown(verdict)) == (8, "a:0 b:1")


def test_reasons_are_for_people() -> None:
    plan = decide(hsdp, [o(0, 8, "p"), o(1, 7), x(2, 7)])
    assert isinstance(plan, Plan)
    assert plan.reason == (
        "version 7 is the newest that is whole in every shard "
        "(rank 1 at 7; rank 0 at 8; rank 2 torn after 7; rank 0 must undo)"
    )
    nothing = decide(hsdp, [o(1, 7), x(2, 7)])
    assert isinstance(nothing, NoPlan)
    assert nothing.reason == (
        "shard 'a' has no whole copy left: rank 0 gave no answer, rank 2 stopped in mid-update "
        "(before step_done(), if the loop calls it) or with other weights in the model"
    )


def test_a_reason_does_not_grow_with_the_job() -> None:
    job = Layout(2000, {Shard(f"s{i}"): (Rank(i),) for i in range(2000)})
    verdict = decide(job, [o(r, r % 2) for r in range(2000)])
    assert isinstance(verdict, NoPlan)
    assert "and 1984 more shards" in verdict.reason
    assert len(verdict.reason) < 1000


# ---------------------------------------------------------------------------------------------------------- kept copies


def k(answer: Answer, *kept: tuple[str, int]) -> Answer:
    """Return an answer of a rank that can read kept copies of these shards and versions."""
    return replace(answer, kept=tuple((Shard(s), Version(v)) for s, v in kept))


# fmt: off
KEPT: list[tuple[str, Layout, list[Answer], int | None, str]] = [
    ("the live state comes first",  zero, [k(o(0, 17), ("a", 10), ("b", 10)), o(1, 17)], 17, "a:0 b:1"),
    ("a rank is lost",              zero, [k(o(1, 17), ("a", 10), ("b", 10))], 10, "a:=1 b:=1"),
    ("lost right after a copy",     zero, [k(o(1, 10), ("a", 10), ("b", 10))], 10, "a:=1 b:1"),
    ("the newest common copies",    zero, [k(o(1, 27), ("a", 10), ("a", 20), ("b", 10), ("b", 20))], 20, "a:=1 b:=1"),
    ("one copy was under way",      zero, [k(o(1, 27), ("a", 10), ("b", 10), ("b", 20))], 10, "a:=1 b:=1"),
    ("copies of no common version", zero, [k(o(1, 27), ("a", 10), ("b", 20))], None, "kept copies"),
    ("half of it has no copy",      zero, [k(o(1, 17), ("b", 10))], None, "'a' has no"),
    ("a torn rank can read",        zero, [k(x(1, 17), ("a", 10), ("b", 10))], 10, "a:=1 b:=1"),
    ("a copy that is ahead",        hsdp, [k(o(0, 7), ("b", 8)), o(1, 7), o(2, 8)], 8, "a:2 b:=0"),
    ("undo is better than copies",  hsdp, [k(o(0, 8, "p"), ("a", 5), ("b", 5)), o(1, 7)], 7, "a:-0 b:1"),
    ("the dead were one ahead",     zero, [k(o(1, 16), ("a", 17), ("b", 17))], 17, "a:=1 b:=1"),
    ("left by an earlier start",    zero, [k(o(1, 7), ("a", 200), ("b", 200), ("a", 6), ("b", 6))], 6, "a:=1 b:=1"),
    ("work is spread",              zero, [k(o(r, 17), ("a", 10), ("b", 10)) for r in (2, 3)], 10, "a:=2 b:=3"),
]
# fmt: on


@pytest.mark.parametrize(("job", "said", "version", "text"), [row[1:] for row in KEPT], ids=[row[0] for row in KEPT])
def test_kept_copies(job: Layout, said: list[Answer], version: int | None, text: str) -> None:
    test_table(job, said, version, text)


def test_the_reason_says_how_many_steps_are_lost() -> None:
    plan = decide(zero, [k(o(1, 17), ("a", 10), ("b", 10))])
    assert isinstance(plan, Plan)
    assert plan.lost == 7
    assert plan.reason == (
        "version 10 is the newest that is whole in every shard (rank 1 at 17); from kept copies of a, b: "
        "7 finished steps are lost"
    )
    level = decide(zero, [k(o(1, 10), ("a", 10))])
    assert isinstance(level, Plan)
    assert level.reason.endswith("from kept copies of a: no step is lost")


def test_who_cannot_write_cannot_bring_a_copy() -> None:
    there = k(o(1, 17), ("a", 10), ("b", 10))
    assert isinstance(decide(zero, [replace(there, can_save=False)]), NoPlan)


def test_what_was_brought_is_not_brought_again() -> None:
    verdict = decide(zero, [k(o(1, 17), ("b", 10))], {Shard("a"): Version(10)})
    assert isinstance(verdict, Plan)
    assert (verdict.version, shown(verdict)) == (10, "b:=1")


# ----------------------------------------------------------------------------------------------------------- properties


@st.composite
def jobs(draw: st.DrawFn, *, copies: bool = False) -> tuple[Layout, list[Answer]]:
    world = draw(st.integers(1, 6))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    groups = {f"s{i}": draw(ranks) for i in range(draw(st.integers(1, 4)))}
    alone = set(range(world)) - {r for g in groups.values() for r in g}
    if alone:
        groups["rest"] = sorted(alone)
    job = Layout(world, {Shard(s): tuple(Rank(r) for r in g) for s, g in groups.items()})
    readable = draw(st.lists(st.integers(0, world - 1), unique=True))
    mark = st.sampled_from(["", "g", "p", "gp", "s", "u", "sug", "ps"])
    said = [o(r, draw(st.integers(0, 3)), draw(mark), draw(st.sampled_from("ab"))) for r in readable]
    if copies:
        shards = st.tuples(st.sampled_from(sorted(job.groups)), st.integers(0, 3).map(Version))
        said = [replace(a, kept=tuple(draw(st.lists(shards, max_size=5)))) for a in said]
    torn = draw(st.sets(st.sampled_from(readable))) if readable else set()
    return job, [
        replace(a, torn=True, main_thread_blocked=False, post_step_done=True) if a.rank in torn else a for a in said
    ]


@given(jobs(copies=True), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_decides_what_statement_1_allows(job: tuple[Layout, list[Answer]], random: Random) -> None:
    replicas, said = job
    verdict, wanted = decide(replicas, said), best(replicas, said)
    assert (verdict.version if isinstance(verdict, Plan) else None) == wanted
    if isinstance(verdict, Plan):
        check_assignments(verdict, replicas, said)
    else:
        assert any(shard in verdict.reason for shard in replicas.groups)
    shuffled = list(said)
    random.shuffle(shuffled)
    assert decide(replicas, shuffled) == verdict


def check_assignments(verdict: Plan, replicas: Layout, said: list[Answer]) -> None:
    """Check that every shard is saved once, by somebody who can and whom it burdens least."""
    able = {a.rank: a for a in said}
    assert [a.shard for a in verdict.assignments] == sorted(replicas.groups)
    for assignment in verdict.assignments:
        chosen = able[assignment.rank]
        if assignment.how is How.KEPT:
            assert (assignment.shard, verdict.version) in chosen.kept
            live = [able[r] for r in replicas.groups[assignment.shard] if r in able]
            assert not any(verdict.version in materialisable(a) for a in live)
            continue
        rivals = [able[r] for r in replicas.groups[assignment.shard] if r in able]
        rivals = [a for a in rivals if verdict.version in materialisable(a)]
        assert chosen in rivals
        assert assignment.how is materialisable(chosen)[verdict.version]

        def burden(answer: Answer) -> tuple[bool, bool, bool]:
            return (
                materialisable(answer)[verdict.version] is not How.AS_IS,
                answer.main_thread_blocked,
                not answer.post_step_done,
            )

        assert burden(chosen) == min(burden(a) for a in rivals)


@pytest.mark.parametrize("shards", [1, 25_000])
def test_a_hundred_thousand_ranks(shards: int) -> None:
    world = 100_000
    job = Layout(world, {Shard(f"s{s}"): tuple(Rank(r) for r in range(s, world, shards)) for s in range(shards)})
    said = [o(r, 7 if r % 3 else 8, host=f"h{r // 8}") for r in range(world) if r % 97]  # 1 % dead at once
    began = time.perf_counter()
    verdict = decide(job, said)
    print(f"decide, {world} ranks, {shards} shards: {time.perf_counter() - began:.3f} s")
    assert isinstance(verdict, Plan)
    assert verdict.version == best(job, said)
    assert len(verdict.assignments) == shards
    load = Counter(a.rank for a in verdict.assignments)
    assert max(load.values()) == 1


# --------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("world", "groups", "text"),
    [
        (0, {"m": (0,)}, "world size 0"),
        (2, {}, "at least one shard"),
        (2, {"m": ()}, "empty replica group"),
        (2, {"m": (0, 0, 1)}, "names a rank twice"),
        (2, {"m": (0, 1, 2)}, "outside 0..1"),
        (2, {"m": (-1, 0, 1)}, "outside 0..1"),
        (3, {"m": (0, 2)}, "no shard is held by rank 1"),
    ],
)
def test_an_impossible_layout_is_refused_in_words(world: int, groups: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Layout(world, {Shard(s): tuple(Rank(r) for r in ranks) for s, ranks in groups.items()})


@pytest.mark.parametrize(("world", "ranks"), [("2", (0, 1)), (2, (0, 1.0)), (2, (0, "1")), (2, 1)])
def test_ranks_that_are_no_numbers_are_refused_in_words(world: Any, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="ranks of a layout are whole numbers, and"):
        Layout(world, {"m": ranks})


def test_a_layout_of_numbers_of_numpy_is_like_any_other() -> None:
    numpy = pytest.importorskip("numpy", reason="ttp.core works without numpy")
    of_numpy = Layout(numpy.int64(2), {"m": numpy.arange(2)})
    assert of_numpy.digest == Layout(2, {"m": [False, True]}).digest == Layout(2, {"m": (0, 1)}).digest


def test_a_layout_knows_who_holds_what() -> None:
    assert moe.shards_of(Rank(2)) == ("dense", "e1")
    assert moe.shards_of(Rank(9)) == ()
    assert zero.unreplicated() == ("a", "b")
    assert Layout.data_parallel(4).groups == {"model": (0, 1, 2, 3)}
    assert moe.digest != hsdp.digest


def test_a_rank_that_will_never_make_its_post_step_is_chosen_last() -> None:
    """Its loop was left between optimizer.step() and scheduler.step(). The other one is about to make that step."""
    raised = Answer(Rank(0), Version(8), main_thread_blocked=True, post_step_done=False, unfinished=True)
    running = Answer(Rank(1), Version(8), main_thread_blocked=True, post_step_done=False)
    plan = decide(Layout.data_parallel(2), [raised, running])
    assert isinstance(plan, Plan)
    assert plan.savers == (1,)
    finished = replace(raised, post_step_done=True, unfinished=False)
    plan = decide(Layout.data_parallel(2), [finished, running])
    assert isinstance(plan, Plan)
    assert plan.savers == (0,)
