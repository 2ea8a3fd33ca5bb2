"""Which controller a rank connects to: the present one again, or the next one of the ring."""

from __future__ import annotations

from ttp.core.rank.failover import HOME, Route


def route(*standbys: str) -> Route:
    made = Route(failover_s=0.5)
    made.standbys = standbys
    return made


def go(made: Route, for_s: float) -> tuple[str, bool]:
    made.lost(for_s)
    return made.address, made.takeover


def test_without_standbys_the_home_is_tried_for_ever() -> None:
    made = route()
    assert [go(made, s) for s in (0, 1, 1000)] == [(HOME, False)] * 3
    assert made.went_round


def test_a_flap_goes_back_to_where_it_was() -> None:
    made = route("a:1", "b:1")
    assert [go(made, s) for s in (0, 0.2, 0.49)] == [(HOME, False)] * 3
    made.connected()
    assert go(made, 0) == (HOME, False)


def test_a_lost_controller_is_followed_by_the_next_of_the_ring_and_the_home_is_last() -> None:
    made = route("a:1", "b:1")
    assert not made.went_round
    assert [go(made, 1) for _ in range(4)] == [("a:1", True), ("b:1", True), (HOME, True), ("a:1", True)]
    assert made.went_round and made.rounds == 1
    for _ in range(20):
        go(made, 1)
    assert made.rounds == 4, "the time for an attempt doubles with each"


def test_from_a_standby_the_ring_goes_on_behind_it() -> None:
    made = route("a:1", "b:1")
    go(made, 1)
    made.connected()
    assert go(made, 0.1) == ("a:1", False)
    assert [go(made, 1) for _ in range(3)] == [("b:1", True), (HOME, True), ("a:1", True)]


def test_a_standby_that_became_the_controller_stays_in_the_ring() -> None:
    made = route("a:1")
    go(made, 1)
    made.connected()
    made.standbys = ("c:1",)  # it has others standing by for it
    assert [go(made, 1) for _ in range(3)] == [(HOME, True), ("c:1", True), ("a:1", True)]


def test_all_ranks_arrive_at_the_same_successor() -> None:
    slow, quick = route("a:1", "b:1"), route("a:1", "b:1")
    for s in (0, 0.1, 0.2, 0.3):
        go(slow, s)
    assert go(slow, 2) == go(quick, 0.6) == ("a:1", True)


def test_sent_on_it_does_not_wait_and_begins_anew() -> None:
    made = route("a:1", "b:1")
    made.moved()
    assert go(made, 0) == ("a:1", True)
    assert go(made, 0) == ("b:1", True)
    made.moved()  # b leads only a few
    assert go(made, 0) == ("a:1", True)


def test_a_standby_of_ones_own_needs_no_announcement() -> None:
    made = route()
    made.knows("")
    assert go(made, 9) == (HOME, False)
    made.knows("me:1")
    made.knows("me:1")
    assert made.standbys == ("me:1",)
    assert [go(made, 9) for _ in range(2)] == [("me:1", True), (HOME, True)]
    made.standbys = ("a:1",)
    assert made.standbys == ("a:1",)
