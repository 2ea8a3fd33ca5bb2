"""Controllers that stand by on other hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.rank_talk import ME, Rank1
from tests.core.talk import PATIENCE, Wide
from ttp.core import messages as m
from ttp.core.controller.events import LedElsewhere
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.standby import UNABLE_MAX
from ttp.core.layout import Rank
from ttp.core.rank import events as ev
from ttp.testing.scenario import grid


def test_other_hosts_are_asked_to_stand_by_and_everybody_is_told() -> None:
    talk = Wide()
    asked = [line for line in talk.lines if "StandBy" in line]
    assert asked == [f"Welcome:{r} StandBy:{r} [joined]" for r in (2, 4)], "as soon as they come"
    assert not talk.machine.standbys
    assert talk.report(4, m.StandbyUp(Rank(4), "10.0.0.2:9")) == "[standby] Standbys:0,1,2,3,4,5"
    talk.report(2, m.StandbyUp(Rank(2), "10.0.0.1:9"))
    assert talk.orders(m.Standbys)[0].addresses == ("10.0.0.1:9", "10.0.0.2:9")
    assert talk.machine.standbys == ("10.0.0.1:9", "10.0.0.2:9")
    talk.lost(1)
    assert "Standbys:1" in talk.back(1)


def test_who_is_asked_is_announced_before_it_is_there() -> None:
    talk = Wide()
    talk.machine = ControllerMachine(PATIENCE, lambda n: f"i{n}", 0.0, host="h0", port=77)
    assert talk.hello(0) == "[incarnation] Welcome:0 [joined]"
    assert talk.hello(2) == "Welcome:2 StandBy:2 Standbys:0,2 [joined]"
    assert talk.orders(m.Standbys)[0].addresses == ("10.0.0.1:77",)
    assert talk.hello(4, address="fe80::1") == "Welcome:4 Standbys:4 StandBy:4 Standbys:0,2,4 [joined]"
    assert talk.orders(m.Standbys)[-1].addresses == ("10.0.0.1:77", "[fe80::1]:77")
    assert talk.report(2, m.StandbyUp(Rank(2), "")) == "[no_standby] Standbys:0,2,4"
    assert talk.orders(m.Standbys)[-1].addresses == ("[fe80::1]:77",)


def test_an_order_that_was_lost_with_its_stream_is_repeated() -> None:
    talk = Wide()
    talk.lost(2)
    assert "StandBy:2" in talk.back(2)
    assert "StandBy" not in talk.back(3), "one rank of a host is enough"
    talk.report(2, m.StandbyUp(Rank(2), "10.0.0.1:9"))
    assert "StandBy:2" in talk.back(2), "a new process in place of the one whose end is that of its standby"
    assert talk.report(2, m.StandbyUp(Rank(2), "10.0.0.1:9")) == ""


def test_a_host_that_cannot_is_replaced_by_another() -> None:
    talk = Wide(grid(1, 8), standbys=1)
    assert "StandBy:2" in talk.lines[2]
    assert talk.report(2, m.StandbyUp(Rank(2), "")) == "[no_standby] StandBy:4"
    assert talk.report(4, m.StandbyUp(Rank(4), "")) == "[no_standby] StandBy:6"
    assert talk.report(6, m.StandbyUp(Rank(6), "")) == "[no_standby]"


def test_one_that_ends_counts_no_more_until_it_runs_again() -> None:
    talk = Wide(grid(1, 4), standbys=1)
    talk.report(2, m.StandbyUp(Rank(2), "x:1"))
    assert talk.report(3, m.StandbyUp(Rank(3), "")) == "", "an answer to an earlier controller"
    assert talk.report(2, m.StandbyUp(Rank(2), "")) == "[no_standby]"
    assert not talk.machine.standbys
    assert "[standby]" in talk.report(2, m.StandbyUp(Rank(2), "x:2")) and talk.machine.standbys == ("x:2",)


def test_if_many_hosts_cannot_no_more_are_asked() -> None:
    """Each refusal is told to every rank, so to ask all hosts of a large job would be quadratic."""
    talk = Wide(grid(1, 80), standbys=1)
    asked = 0
    for host in range(1, 40):
        asked += f"StandBy:{2 * host + 2}" in talk.report(2 * host, m.StandbyUp(Rank(2 * host), ""))
    assert asked == UNABLE_MAX - 1


def test_nobody_stands_by_where_that_was_not_asked_for() -> None:
    assert "StandBy" not in "".join(Wide(standbys=0).lines)
    unasked = Wide(standbys=0)
    assert unasked.report(2, m.StandbyUp(Rank(2), "x:1")) == ""


class Successor(Wide):
    """A new controller of a job that runs."""

    def __init__(self, **patience: Any) -> None:
        super().__init__(**patience)
        self.machine = ControllerMachine(replace(PATIENCE, **patience), lambda n: f"j{n}", 0.0, host="h1")

    def comes(self, rank: int, **more: Any) -> str:
        known = {"incarnation": 1, "resume": True, "term_seen": 1, "standbys": ("10.0.0.1:9",), "takeover": True}
        self.streams[rank] += 100
        return self.hello(rank, **{**known, "version": 3, **more})


def test_a_controller_that_was_just_started_sends_ranks_to_those_who_stand_by() -> None:
    talk = Successor()
    assert talk.comes(0, takeover=False) == "Refused(moved):0 [refused]"
    assert "10.0.0.1:9 stands by" in talk.orders(m.Refused)[0].text
    assert talk.comes(0, takeover=False, standbys=()).startswith("[incarnation] Welcome:0")


def test_one_who_stands_by_takes_over() -> None:
    talk = Successor()
    assert talk.comes(0) == "[incarnation] Welcome:0 StandBy:0 [reconnected]"
    assert talk.orders(m.Welcome)[0].term == 2
    for rank in range(1, 5):
        talk.comes(rank)
    assert talk.comes(5) == "Welcome:5 [reconnected] [formed]"


def test_a_minority_is_sent_on_once_and_then_it_is_believed() -> None:
    talk = Successor()
    talk.comes(4)
    talk.comes(5)
    assert talk.after(3) == "", "ranks see the loss of a controller seconds apart"
    assert talk.after(0.5) == "[abdicated] Refused(moved):-1,-1", "while a majority elsewhere still waits for them"
    talk.comes(4)
    talk.comes(5)
    assert "Freeze:4,5" in talk.after(5)


@pytest.mark.parametrize(("version", "again"), [(4, False), (5, True)])
def test_a_minority_is_sent_on_again_if_the_job_has_trained_meanwhile(version: int, again: bool) -> None:
    """A link that fails for the second time is another fault. One update more can have been under way."""
    talk = Successor()
    talk.comes(4)
    talk.comes(5, version=2)  # an update behind
    assert "[abdicated]" in talk.after(3.5)
    talk.comes(4, version=version)
    assert ("[abdicated]" in talk.after(5)) == again


def test_who_has_sent_all_on_stays_for_those_who_come_back() -> None:
    talk = Successor(abandoned_s=120)
    talk.now += 119  # it was made long ago
    talk.comes(4)
    assert talk.after(3.5) == "[abdicated] Refused(moved):-1", "and does not end by that"
    assert talk.after(119) == ""
    assert talk.after(1) == "[stopped] stop"


def test_of_a_job_that_never_trained_the_others_are_looked_for_again_and_again() -> None:
    """A host was cut off while the job formed and found a controller of its own; the other ranks wait at theirs."""
    talk = Successor(forming_s=20, abandoned_s=1e6)
    talk.now += 19  # it stands by for long

    def half_of_them_come() -> None:
        for rank in (3, 4, 5):
            talk.comes(rank, version=0)

    half_of_them_come()
    assert talk.after(3.5) == "[abdicated] Refused(moved):-1,-1,-1", "they lose nothing by it"
    half_of_them_come()
    assert talk.after(5) == "", "who comes back is not sent on at once"
    assert talk.after(3.5) == "[abdicated] Refused(moved):-1,-1,-1"
    half_of_them_come()
    assert talk.after(5) == ""
    talk.after(3.5)
    half_of_them_come()
    assert "[opened]" in talk.after(5), "not for ever: then only a restart brings them together"


def test_who_was_sent_on_long_ago_is_not_held_against_who_comes_now() -> None:
    talk = Successor(forming_s=20, abandoned_s=1e6)
    talk.comes(4, version=0)
    assert "[abdicated]" in talk.after(3.5)
    talk.now += 41
    talk.comes(4, version=0)
    assert "[abdicated]" in talk.after(3.5), "this one has not been looked for elsewhere yet"


def test_a_job_that_is_forming_takes_in_who_was_elsewhere() -> None:
    """This controller knows nothing that could be outdated, so the rank can stay, though few are here as yet."""
    talk = Wide()
    talk.machine = ControllerMachine(PATIENCE, lambda n: f"j{n}", 0.0, host="h1")
    talk.hello(0)
    assert talk.hello(5, incarnation=1, resume=True, term_seen=7, takeover=True).startswith("Welcome:5")
    for rank in range(1, 5):
        talk.hello(rank)
    assert (talk.machine.job.term, talk.machine.stage) == (8, "training")


def test_a_frozen_minority_is_not_sent_away() -> None:
    talk = Successor()
    talk.comes(4, incident="i1")
    assert "abdicated" not in talk.after(5)
    assert talk.machine.incident is not None


def test_two_controllers_with_one_incident_have_drafts_of_their_own() -> None:
    first, second = Successor(), Successor()
    second.machine.rescue._new_id = lambda n: f"k{n}"  # every process makes its own
    drafts = []
    for talk in (first, second):
        for rank in range(5):
            talk.comes(rank, incident="i1")
        talk.fault(0)
        talk.comes(5, incident="i1")
        talk.frozen_all()
        drafts.append(talk.incident.draft.name)
    assert drafts == [".draft-step_7-i1-j1", ".draft-step_7-i1-k1"]


def test_who_was_passed_over_forgets_what_it_knew() -> None:
    talk = Wide()
    for rank in range(6):
        talk.lost(rank)
    talk.after(2)
    talk.streams[0] += 100
    said = talk.hello(0, incarnation=1, resume=True, term_seen=5, takeover=True, version=3)
    assert said.startswith("[abdicated]")
    assert "Welcome:0" in said
    assert talk.machine.job.term == 6


@pytest.mark.parametrize(
    ("still_here", "run_id", "incarnation", "term", "forgets"),
    [
        ((), "job", 1, 2, True),
        ((), "job", 2, 3, True),
        ((3,), "job", 1, 2, False),
        (tuple(range(6)), "job", 1, 2, False),
        ((), "other", 1, 2, False),
        ((), "job", 0, 2, False),
        ((), "job", 1, 1, False),
    ],
)
def test_who_stood_still_and_has_lost_all_ranks_to_another_does_not_call_them_dead(
    still_here: tuple[int, ...], run_id: str, incarnation: int, term: int, *, forgets: bool
) -> None:
    talk = Wide()
    assert (talk.machine.job.run_id, talk.machine.job.incarnation) == ("job", 1)
    for rank in {*range(6)} - {*still_here}:
        talk.lost(rank)
    said = talk.event(LedElsewhere(run_id, incarnation, term))
    assert said == ("[retracted] " * 6 + "[abdicated]" if forgets else "")
    assert "[released]" not in talk.after(100) or not forgets


@pytest.mark.parametrize(("cut_off", "stays"), [((5,), True), ((4, 5), True), ((3, 4, 5), False), ((3, 4), False)])
def test_one_that_still_leads_most_ranks_takes_in_who_was_cut_off_from_it(
    cut_off: tuple[int, ...], stays: bool
) -> None:
    """The network between the controller and one host failed, and the host's ranks went round all controllers.

    The controller may not have noticed yet that it has lost the rank that comes.
    """
    talk = Wide()
    for rank in cut_off:
        talk.lost(rank)
    said = talk.hello(5, incarnation=1, resume=True, term_seen=5, takeover=True, version=3)
    assert said.startswith("Welcome:5") == stays
    assert said.startswith("[abdicated]") != stays
    assert talk.orders(m.Welcome)[-1].term == 6


def test_one_that_runs_is_announced_by_whoever_takes_over() -> None:
    """Its rank reports it after each welcome, also where enough others were ordered before."""
    talk = Successor(standbys=1)
    assert "StandBy:0" in talk.comes(0)
    talk.comes(4)
    there = m.StandbyUp(Rank(4), "10.0.0.2:9")
    assert talk.report(4, there) == "[standby] Standbys:0,4"
    assert talk.report(4, there) == "", "that is known"
    assert talk.report(4, m.StandbyUp(Rank(4), "")) == ""
    assert talk.machine.standbys == ("10.0.0.2:9",)
    talk.comes(2)
    assert talk.report(2, m.StandbyUp(Rank(2), "10.0.0.1:9")) == "", "this is the one that takes over"


def test_an_answer_that_the_controller_missed_is_repeated() -> None:
    rank = Rank1()
    rank.order(m.StandBy(ME, 1))
    rank.event(ev.StreamDown("broken"))
    assert ">StandbyUp" not in rank.event(ev.StandbyStarted("10.0.0.1:9"))
    rank.event(ev.StreamUp())
    assert ">StandbyUp" in rank.order(m.Welcome(ME, 1, 1, "1"))
    assert rank.sent(m.StandbyUp).address == "10.0.0.1:9"
