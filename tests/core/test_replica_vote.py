"""The vote between replicas that differ: the majority is saved, a tie is disputed, and copies with NaN come last."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.core.answer import Answer
from ttp.core.decide import How, NoPlan, Plan, decide
from ttp.core.layout import REPLICATED, Layout, Rank, Shard, Version
from ttp.core.replica_vote import judge
from ttp.testing.scenario import grid


def answer(rank: int, digest: str = "", version: int = 7, **more: Any) -> Answer:
    digests = {REPLICATED: digest} if digest else {}
    return Answer(Rank(rank), Version(version), digests=digests, **more)


def plan(layout: Layout, *answers: Answer) -> Plan:
    made = decide(layout, answers)
    assert isinstance(made, Plan), made
    return made


def ddp(size: int) -> Layout:
    return Layout.data_parallel(size)


def test_the_majority_is_right_and_the_odd_one_is_named() -> None:
    made = plan(ddp(3), answer(0, "x"), answer(1, "y"), answer(2, "y"))
    assert made.savers == (Rank(1),)
    assert made.odd == (Rank(0),)
    assert made.disputed == ()
    assert "the copies of rank 0 differ from most others" in made.reason


def test_two_that_differ_are_a_dispute_and_are_saved() -> None:
    made = plan(ddp(2), answer(0, "x"), answer(1, "y"))
    assert made.savers == (Rank(0),)
    assert made.disputed == (REPLICATED,)
    assert made.odd == ()
    assert "replicas of model differ, and the saved copy may be the wrong one" in made.reason


def test_one_who_cannot_write_is_a_witness_all_the_same() -> None:
    made = plan(ddp(3), answer(0, "x"), answer(1, "y"), answer(2, "y", can_save=False))
    assert made.savers == (Rank(1),)


def test_when_only_the_odd_one_is_able_it_is_saved_and_disputed() -> None:
    made = plan(ddp(3), answer(0, "x"), answer(1, "y", can_save=False), answer(2, "y", can_save=False))
    assert made.savers == (Rank(0),)
    assert made.disputed == (REPLICATED,)


def test_copies_of_different_versions_are_not_compared() -> None:
    made = plan(ddp(3), answer(0, "x", 8), answer(1, "y"), answer(2, "y"))
    assert (made.version, made.savers, made.odd) == (8, (Rank(0),), ())


def test_torn_copies_have_no_vote() -> None:
    made = plan(ddp(4), answer(0, "x", torn=True), answer(1, "x", torn=True), answer(2, "y"), answer(3, "y"))
    assert not made.odd
    assert not made.disputed


def test_a_clean_replica_is_taken() -> None:
    made = plan(ddp(3), answer(0, bad=True), answer(1, bad=True), answer(2))
    assert made.savers == (Rank(2),)
    assert "NaN or Inf on ranks 0-1, not used" in made.reason


def test_a_clean_version_is_taken_where_one_can_be_had() -> None:
    made = plan(ddp(2), answer(0, version=8, bad=True), answer(1, version=7))
    assert (made.version, made.savers) == (7, (Rank(1),))
    undone = plan(ddp(1), answer(0, version=8, bad=True, has_preimage=True))
    assert undone.assignments[0].how is How.AS_IS, "what was before may be as bad: it is not known"


def test_what_is_bad_everywhere_is_saved_and_said() -> None:
    made = plan(ddp(2), answer(0, bad=True), answer(1, bad=True))
    assert made.version == 7
    assert "NaN or Inf on ranks 0-1, saved as it is" in made.reason


def test_no_plan_says_who_could_not_write() -> None:
    verdict = decide(ddp(2), [answer(0, can_save=False)])
    assert isinstance(verdict, NoPlan)
    assert "rank 1 gave no answer, rank 0 could not write" in verdict.reason


ANSWERS = st.lists(st.tuples(st.sampled_from("abc "), st.integers(7, 8), st.booleans()), min_size=1, max_size=6)


@given(ANSWERS)
def test_against_counting_by_hand(seen: list[tuple[str, int, bool]]) -> None:
    layout = ddp(len(seen))
    verdict = judge(layout, [answer(r, d.strip(), v, torn=t) for r, (d, v, t) in enumerate(seen)])
    odd: set[int] = set()
    disputed = False
    for version in (7, 8):
        votes = [(r, d) for r, (d, v, t) in enumerate(seen) if d.strip() and v == version and not t]
        counts = Counter(d for _, d in votes)
        top = max(counts.values(), default=0)
        winners = [d for d, n in counts.items() if n == top]
        if len(winners) > 1:
            disputed = True
        elif len(counts) > 1:
            odd |= {r for r, d in votes if d != winners[0]}
    assert set(verdict.odd_ranks) == odd
    assert bool(verdict.disputed) == disputed


@pytest.mark.parametrize("liar", range(6))
def test_a_liar_in_one_shard_is_still_trusted_in_no_other(liar: int) -> None:
    layout = grid(2, 3)
    answers = [
        Answer(Rank(r), Version(7), digests=dict.fromkeys(layout.shards_of(Rank(r)), "lie" if r == liar else "truth"))
        for r in range(6)
    ]
    made = plan(layout, *answers)
    assert Rank(liar) not in made.savers
    assert made.odd == (Rank(liar),)
    assert {a.shard for a in made.assignments} == {Shard("s0"), Shard("s1")}
