"""Which rank saves and which rank repairs which, against an oracle that walks through the places one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.core.layout import Rank
from ttp.errors import ConfigError
from ttp.mindio.protocol.messages import ReplicaSet
from ttp.mindio.protocol.replica_lists import check_set, choose, gather, holders, pieces, renamer, sources


def job(*types: list[tuple[list[int], int, int]]) -> Any:
    """Return the replicas of a job: for each type its sets as ``(ranks, copies, shift)``."""
    size = 1 + max(r for ranks, _, _ in types[0] for r in ranks)
    said = {
        Rank(rank): [ReplicaSet(tuple(map(Rank, g)), c, s) for kind in types for g, c, s in kind if rank in g]
        for rank in range(size)
    }
    return gather(size, said)


def chosen(replicas: Any, usable: set[int]) -> dict[int, list[tuple[int, tuple[int, ...]]]] | None:
    told = choose(replicas, {Rank(r) for r in usable})
    return (
        None if told is None else {int(r): [(t.type, tuple(map(int, t.ranks))) for t in ts] for r, ts in told.items()}
    )


def test_types_have_lists_of_their_own() -> None:
    replicas = job([([0, 1, 2, 3], 2, 0)], [([0, 2], 2, 0), ([1, 3], 2, 0)])
    assert chosen(replicas, {1, 2, 3}) == {2: [(0, (2, 1)), (1, (2,))], 1: [(0, (2, 1)), (1, (1,))]}


def test_a_shift_says_how_many_pieces_there_are_and_the_last_copies_may_be_incomplete() -> None:
    replicas = job([([0, 1, 2, 3, 4], 2, 3)])
    (group,) = replicas.types[0]
    assert [holders(group, piece) for piece in range(pieces(group))] == [(0, 3), (1, 4), (2,)]
    assert chosen(replicas, {2, 3, 4}) == {r: [(0, (3, 4, 2))] for r in (3, 4, 2)}
    assert chosen(replicas, {0, 1, 3, 4}) is None
    assert sources(replicas, {Rank(4)}, {Rank(1)}) is not None and sources(replicas, {Rank(2)}, {Rank(1)}) is None


def test_who_should_not_is_asked_only_if_nobody_else_can() -> None:
    replicas = job([([0, 1, 2, 3], 2, 0)])
    told = choose(replicas, {Rank(r) for r in (0, 1, 2)}, {Rank(0), Rank(1)})
    assert told is not None and set(told) == {2, 1}


def test_the_first_saver_but_rank_zero_gives_the_name() -> None:
    assert [renamer(map(Rank, ranks)) for ranks in ([0, 5, 2], [3, 0], [0])] == [5, 3, 0]


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (ReplicaSet((), 1), "is empty"),
        (ReplicaSet((Rank(1), Rank(1)), 1), "names a rank twice"),
        (ReplicaSet((Rank(1), Rank(9)), 1), "outside 0..3"),
        (ReplicaSet((Rank(0), Rank(2)), 1), "does not contain the rank itself"),
        (ReplicaSet((Rank(0), Rank(1)), 3), "copies = 3: it has to be from 1 to 2"),
        (ReplicaSet((Rank(0), Rank(1)), 0), "copies = 0"),
        (ReplicaSet((Rank(0), Rank(1)), 2, 7), "shift = 7"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(group: ReplicaSet, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_set(group, Rank(1), 4)


def test_a_rank_that_was_lost_before_it_could_speak_is_in_the_sets_of_others() -> None:
    everybody = ReplicaSet((Rank(0), Rank(1), Rank(2), Rank(3)), 2)
    said = {Rank(rank): [everybody] for rank in (0, 2, 3)}
    assert gather(4, said) == gather(4, {**said, Rank(1): [everybody]})


def test_a_set_that_many_ranks_declare_is_read_a_few_times_only() -> None:
    """Else it would be quadratic in the number of ranks. The controller keeps one object for equal sets."""
    read: list[int] = []

    class Ranks(tuple[Rank, ...]):
        def __iter__(self) -> Iterator[Rank]:
            read.append(1)
            return super().__iter__()

    everybody = ReplicaSet(Ranks(map(Rank, range(100))), 2)
    for speak in (100, 99):
        gather(100, {Rank(rank): [everybody] for rank in range(speak)})
    assert len(read) < 10


def test_ranks_that_contradict_each_other_are_named() -> None:
    pair, other = ReplicaSet((Rank(0), Rank(1)), 2), ReplicaSet((Rank(1), Rank(2)), 2)
    alone = ReplicaSet((Rank(2),), 1)
    for said, text in (
        ({0: [pair], 1: [pair]}, "no replica sets were declared by rank 2"),
        ({0: [pair], 1: [pair, pair], 2: [alone]}, "rank 0 declares 1 types"),
        ({0: [pair], 1: [pair], 2: [other]}, "rank 2 declares a set with rank 1, and these declare others"),
        ({0: [pair], 1: [ReplicaSet(pair.ranks, 1)], 2: [alone]}, "rank 1 says that ranks 0-1 hold 1 copies"),
    ):
        with pytest.raises(ConfigError, match=text):
            gather(3, {Rank(r): sets for r, sets in said.items()})


# -------------------------------------------------------------------------------------------------------- the original


def oracle_choice(group: list[int], copies: int, usable: set[int]) -> list[int] | None:
    """Return the choice place by place, as the original's rule reads."""
    n = len(group)
    if copies == n:
        able = [rank for rank in group if rank in usable]
        return able[:1] or None
    found = []
    off = n // copies
    for i in range(off):
        place = i
        while place < n and group[place] not in usable:
            place += off
        if place >= n:
            return None
        found.append(group[place])
    return found


def oracle_source(group: list[int], copies: int, rank: int, usable: set[int]) -> int | None:
    n, place = len(group), group.index(rank)
    off = n // copies
    for step in range(1, copies):
        other = group[(place + step * off) % n]
        if other in usable and other != rank:
            return other
    return None


@st.composite
def regular_sets(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw sets of one size, in which each piece has as many copies as the others."""
    copies, off, count = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = copies * off
    order = draw(st.permutations(range(size * count)))
    return [sorted(order[i * size : (i + 1) * size]) for i in range(count)], copies


@settings(deadline=None, max_examples=60)
@given(regular_sets(), st.data())
def test_everybody_is_chosen_as_the_original_chooses(sets: tuple[list[list[int]], int], data: st.DataObject) -> None:
    groups, copies = sets
    everybody = {rank for group in groups for rank in group}
    usable = data.draw(st.sets(st.sampled_from(sorted(everybody))))
    said = -1 if copies == len(groups[0]) and data.draw(st.booleans()) else copies  # as many as ranks
    replicas = job([(group, said, 0) for group in groups])
    wanted = [oracle_choice(group, copies, usable) for group in groups]
    told = chosen(replicas, usable)
    if any(one is None for one in wanted):
        assert told is None
    else:
        assert told == {rank: [(0, tuple(one))] for one in wanted if one is not None for rank in one}
    for group in groups:
        for rank in set(group) - usable:
            source = oracle_source(group, copies, rank, usable)
            found = sources(replicas, {Rank(rank)}, {Rank(r) for r in usable})
            assert (None if found is None else [(t.src, t.dst) for t in found]) == (
                None if source is None else [(source, rank)]
            )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.data())
def test_irregular_sets_lose_no_piece(size: int, data: st.DataObject) -> None:
    """The layout that decides on the version and the choice of savers agree on what a piece is."""
    copies = data.draw(st.integers(1, size))
    usable = data.draw(st.sets(st.integers(0, size - 1)))
    replicas = job([(list(range(size)), copies, 0)])
    groups = sorted(replicas.layout().groups.values())
    assert sorted(r for group in groups for r in group) == list(range(size))
    told = chosen(replicas, usable)
    assert (told is not None) == all(usable & set(group) for group in groups)
    if told is not None:
        (ranks,) = {entries[0][1] for entries in told.values()}
        assert all(rank in group for rank, group in zip(ranks, groups, strict=True))
