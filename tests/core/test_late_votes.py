"""Votes that come after the plan: with ranks at two versions a plan need not wait for all answers; a commit does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Shard
from ttp.testing.scenario import grid


def digest(text: str) -> dict[str, Any]:
    return {"digests": (m.ShardDigest(Shard("s0"), text),)}


def skewed(ranks: int = 5, *, hosts: bool = False, **first: Any) -> Talk:
    """Return a job whose rank 2 saves version 8 at once, because rank 1 is at 7, so that no version can be newer.

    ``hosts``: each rank has a host of its own.
    """
    talk = Talk(grid(1, ranks), joined=0)
    for rank in range(ranks):
        talk.hello(rank, host=f"h{rank}" if hosts else "h")
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(1, 7, **digest("older"))
    saves = "Save:1,2" if hosts else "Save:2"
    assert saves in talk.frozen(2, 8, **{**digest("flipped"), **first})
    if hosts:
        talk.saved(1)  # the pages of its host
    return talk


@pytest.mark.parametrize("late", [False, True])
def test_a_saver_that_is_outvoted_after_the_plan_is_replaced(late: bool) -> None:
    talk = skewed()
    talk.frozen(3, 8, **digest("good"))
    if late:
        assert talk.saved(2) == "[saved]", "it is known that a vote is missing"
        said = talk.frozen(4, 8, **digest("good"))
    else:
        talk.frozen(4, 8, **digest("good"))
        said = talk.saved(2)
    assert said.endswith("[outvoted] [plan] Save:3")
    assert talk.facts("plan")["odd"] == [2] and "the copies of rank 2 differ" in talk.facts("plan")["reason"]
    assert talk.saved(3, 1) == "[saved] [commit] Commit:3"
    (commit,) = talk.orders(m.Commit)
    assert [piece.writer for piece in commit.pieces] == [3] and commit.disputed == ()
    assert talk.committed(3, 1).endswith("Release(75):1,2,3,4")


@pytest.mark.parametrize("late", [False, True])
def test_a_saver_that_is_outvoted_and_dies_before_the_commit_is_replaced(late: bool) -> None:
    talk = skewed()
    talk.saved(2)
    if late:
        talk.lost(2)
    talk.frozen(3, 8, **digest("good"))
    said = talk.frozen(4, 8, **digest("good"))
    if not late:
        talk.lost(2)
    assert said.endswith("[outvoted] [plan] Save:3")
    assert talk.saved(3, 1).endswith("[commit] Commit:3")
    (commit,) = talk.orders(m.Commit)
    assert [piece.writer for piece in commit.pieces] == [3] and commit.disputed == ()


def test_the_vote_of_a_rank_that_died_before_it_wrote_anything_counts() -> None:
    talk = skewed()
    talk.frozen(3, 8, **digest("good"))
    talk.lost(3)
    talk.saved(2)
    assert talk.frozen(4, 8, **digest("good")).endswith("[outvoted] [plan] Save:4")
    assert talk.saved(4, 1).endswith("[commit] Commit:4")
    assert talk.orders(m.Commit)[0].disputed == ()


def test_the_votes_of_the_dead_are_compared_although_no_digest_of_the_living_is_known() -> None:
    talk = Talk(Layout(5, {Shard("s0"): tuple(map(Rank, range(4))), Shard("s1"): (Rank(4),)}))
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(4, 8)
    talk.frozen(1, 7, **digest("older"))
    assert "Save:2,4" in talk.frozen(2, 8, **digest("a"))
    talk.frozen(3, 8, **digest("b"))
    talk.saved(2)
    for rank in (1, 2, 3):
        talk.lost(rank)
    assert talk.saved(4).endswith("[commit] Commit:4")
    assert talk.orders(m.Commit)[0].disputed == ("s0",)


def test_votes_of_the_dead_about_another_version_say_nothing_of_this_one() -> None:
    talk = Talk(grid(1, 5))
    talk.accuse(0, m.FaultKind.EXITED)
    for rank, copy in (1, "a"), (2, "b"):
        talk.frozen(rank, 8, **digest(copy))
    for rank in (1, 2):
        talk.accuse(rank, m.FaultKind.EXITED)
    talk.frozen(3, 7, **digest("good"))
    assert "Save:3" in talk.frozen(4, 7, **digest("good"))
    talk.saved(3)
    assert talk.orders(m.Commit)[0].disputed == ()


def test_a_rank_that_has_answered_again_has_one_vote_and_can_save() -> None:
    talk = skewed()
    talk.frozen(3, 8, **digest("good"))
    talk.lost(3)
    talk.back(3, incident=talk.id)
    talk.frozen(3, 8, **digest("good"))
    assert "Save:3" in talk.lost(2)


def test_a_dispute_lasts_when_the_saver_dies_before_the_commit() -> None:
    talk = Talk(grid(1, 3))
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(1, 8, **digest("a"))
    assert "Save:1" in talk.frozen(2, 8, **digest("b"))
    assert talk.facts("plan")["disputed"] == ["s0"]
    assert talk.saved(1) == "[saved] [commit] Commit:1"
    assert talk.lost(1).endswith("[commit] Commit:2")
    assert talk.orders(m.Commit)[0].disputed == ("s0",)


def test_a_saver_that_nobody_can_replace_is_disputed() -> None:
    """The copies that are right are on ranks that cannot write."""
    talk = skewed()
    talk.frozen(3, 8, **digest("good"))
    talk.frozen(4, 8, **digest("good"))
    for rank in (3, 4):
        talk.incident.ranks.fail(Rank(rank), "disk full")
    assert talk.saved(2) == "[saved] [commit] Commit:2"
    (commit,) = talk.orders(m.Commit)
    assert commit.disputed == ("s0",) and "the copies of rank 2 differ from most others" in commit.reason


def test_a_late_copy_that_differs_is_a_dispute_in_plain_words() -> None:
    talk = skewed(4)
    talk.frozen(3, 8, **digest("good"))
    assert talk.saved(2) == "[saved] [commit] Commit:2"
    assert talk.orders(m.Commit)[0].disputed == ("s0",)
    talk.committed(2)
    said = "saved version 8; replicas of s0 differ, and the saved copy may be the wrong one; a restart goes on with"
    assert talk.orders(m.Release)[0].text.startswith(said)


def test_a_late_odd_copy_that_does_not_save_is_named() -> None:
    talk = skewed(6)
    for rank, text in ((3, "flipped"), (4, "good"), (5, "flipped")):
        talk.frozen(rank, 8, **digest(text))
    assert talk.saved(2) == "[saved] [commit] Commit:2"
    (commit,) = talk.orders(m.Commit)
    assert commit.disputed == () and commit.reason.endswith("the copies of rank 4 differ from most others")


def test_missing_votes_delay_a_commit_for_a_second_at_most() -> None:
    talk = skewed()
    assert talk.saved(2) == "[saved]"
    assert talk.after(0.9) == ""
    assert talk.after(0.1) == "[commit] Commit:2"


def test_pages_and_votes_are_awaited_at_the_same_time() -> None:
    talk = skewed(hosts=True)
    assert talk.saved(2) == "[saved]"
    assert talk.after(0.9) == ""
    assert talk.after(0.1) == "[commit] Commit:1"


def test_the_pages_of_ranks_that_answer_one_by_one_are_ordered_together() -> None:
    """To look for such pages takes time for each rank of the job, so it is not done for each answer."""
    talk = skewed(hosts=True)
    talk.saved(2)
    assert talk.frozen(3, 8, **digest("flipped")) == "[answer]"
    assert talk.frozen(4, 8, **digest("flipped")) == "[answer] Save:3,4"


@pytest.mark.parametrize("kind", [m.FaultKind.COLLECTIVE, m.FaultKind.PREEMPTED])
def test_votes_are_awaited_of_ranks_that_only_see_the_fault_of_another(kind: m.FaultKind) -> None:
    """All peers of a dead rank report a failed collective, and SIGTERM goes to all ranks."""
    talk = skewed()
    for rank in (3, 4):
        talk.fault(rank, kind)
    assert talk.saved(2) == "[saved]"
    for rank in (3, 4):
        said = talk.frozen(rank, 8, **digest("good"))
    assert said.endswith("[outvoted] [plan] Save:3")


def test_no_vote_is_awaited_of_ranks_at_fault_or_without_digests() -> None:
    talk = skewed()
    for rank in (3, 4):
        talk.accuse(rank, m.FaultKind.OUTSIDE)
    assert talk.saved(2) == "[saved] [commit] Commit:2"
    off = Talk(grid(1, 4))
    off.accuse(0, m.FaultKind.EXITED)
    off.frozen(1, 7)
    off.frozen(2, 8)
    assert off.saved(2) == "[saved] [commit] Commit:2"


COPIES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(7, 8)), min_size=2, max_size=6)


@given(COPIES, st.booleans())
def test_whatever_comes_before_the_pieces_is_counted(copies: list[tuple[str, int]], dies: bool) -> None:
    """Also if the first saver dies once its piece is durable."""
    talk = Talk(grid(1, len(copies) + 1))
    talk.accuse(len(copies), m.FaultKind.EXITED)
    ordered: list[m.Save] = []
    for rank, (text, version) in enumerate(copies):
        talk.frozen(rank, version, **digest(text))
        ordered += talk.orders(m.Save)
    while ordered:
        order = ordered.pop(0)
        talk.saved(order.rank, order.generation)
        ordered += talk.orders(m.Save)
        if dies:
            talk.lost(order.rank)
            ordered += talk.orders(m.Save)
            dies = False
    (commit,) = talk.orders(m.Commit)
    newest = max(version for _, version in copies)
    votes = Counter(text for text, version in copies if version == newest)
    right = [text for text, votes_for in votes.items() if votes_for == max(votes.values())]
    (piece,) = commit.pieces
    assert commit.version == newest and copies[piece.writer] in [(text, newest) for text in right]
    assert bool(commit.disputed) == (len(right) > 1)


def test_a_finished_version_with_nan_is_named_where_an_older_one_is_saved() -> None:
    talk = Talk(grid(1, 4))
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(1, 8, bad=("w",))
    talk.frozen(2, 8, bad=("w",))
    assert "Save:0" in talk.frozen(0, 7)
    talk.write()
    text = talk.orders(m.Release)[0].text
    assert text.startswith("saved version 7; 1 finished step is lost: NaN or Inf on ranks 1-2; a restart goes on with")


def two_shards(first: str, second: str) -> Talk:
    """Return a job whose ranks 2 and 3 save a shard each; their copies of s0, and 4's, which is late, are compared."""
    talk = Talk(Layout(5, dict.fromkeys((Shard("s0"), Shard("s1")), tuple(map(Rank, range(5))))))
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(2, 8, **digest(first))
    talk.frozen(3, 8, **digest(second))
    assert "Save:2,3" in talk.frozen(1, 7, **digest("older"))
    return talk


def test_a_lost_saver_of_two_orders_has_one_vote() -> None:
    talk = two_shards("a", "")
    talk.saved(2)
    assert "Save:2" in talk.lost(3)
    talk.saved(2, 1)
    talk.lost(2)
    assert "[commit]" in talk.frozen(4, 8, **digest("b"))
    assert talk.orders(m.Commit)[0].disputed == ("s0",)


def test_a_saver_that_is_outvoted_with_the_vote_of_a_lost_one_is_not_ordered_again() -> None:
    talk = two_shards("flipped", "good")
    talk.saved(3)
    talk.saved(2)
    talk.lost(3)
    assert talk.frozen(4, 8, **digest("good")).endswith("[outvoted] [plan] Save:4")
    assert talk.saved(4, 1).endswith("[commit] Commit:4")
    assert talk.orders(m.Commit)[0].disputed == ()
