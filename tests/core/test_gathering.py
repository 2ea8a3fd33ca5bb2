"""After a takeover no rank is accused because it waited in a queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.talk import PATIENCE, Talk
from ttp.core import messages as m
from ttp.core.controller.events import Action, ConnectionId, Received, Record, Tick
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Rank, Version
from ttp.testing.toy import hello

RANKS = 4000
LAYOUT = Layout.data_parallel(RANKS)
COMES_BACK = {"incarnation": 2, "resume": True, "term_seen": 1, "version": Version(7)}


class Takeover:
    """A new controller, and the ranks of a job that trains, which connect one after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = ControllerMachine(PATIENCE, str, 0.0)
        self.machine.job.learn(LAYOUT)
        self.said: list[Action] = []

    def passes(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline."""
        end = self.now + seconds
        while (due := self.machine.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.said += self.machine.on_event(Tick(), self.now)
        self.now = end

    def stands_still(self, seconds: float) -> None:
        """Stop the controller for a time. When it runs again, deadlines come before the messages that arrived."""
        self.now += seconds
        self.said += self.machine.on_event(Tick(), self.now)

    def comes(self, rank: int, **more: object) -> None:
        greeting = hello(rank, LAYOUT, **{**COMES_BACK, **more})
        self.said += self.machine.on_event(Received(ConnectionId(rank + 1), greeting), self.now)

    def kinds(self) -> set[str]:
        return {a.kind for a in self.said if isinstance(a, Record)}


def test_four_thousand_ranks_at_a_millisecond_each() -> None:
    """The wait once ended after a fixed time, and the ranks from about the three thousandth on were accused."""
    takeover = Takeover()
    for rank in range(RANKS):
        takeover.passes(0.001 * PATIENCE.gather_s / 3)  # as with the three seconds that a real controller waits
        takeover.comes(rank)
    assert takeover.now > PATIENCE.gather_s
    assert takeover.machine.stage == "training"
    assert "opened" not in takeover.kinds()


def late_at_the_end(takeover: Takeover) -> None:
    takeover.passes(PATIENCE.gather_s / 2)
    takeover.stands_still(PATIENCE.gather_s)


def late_twice(takeover: Takeover) -> None:
    takeover.stands_still(0.9 * PATIENCE.gather_s)
    takeover.passes(0.2)
    takeover.stands_still(PATIENCE.gather_s)


@pytest.mark.parametrize("stands", [late_at_the_end, late_twice])
def test_time_in_which_the_controller_did_not_run_is_not_counted(stands: Callable[[Takeover], None]) -> None:
    takeover = Takeover()
    for rank in range(RANKS // 2 + 1):
        takeover.comes(rank)
    stands(takeover)
    assert "opened" not in takeover.kinds()
    for rank in range(RANKS // 2 + 1, RANKS):
        takeover.comes(rank)
    assert takeover.machine.stage == "training"


def test_a_rank_that_comes_again_and_again_does_not_keep_the_dead_from_being_missed() -> None:
    takeover = Takeover()
    for rank in range(RANKS - 1):
        takeover.comes(rank)
    for _ in range(20):
        takeover.passes(PATIENCE.gather_s / 10)
        takeover.comes(0)
    assert "opened" in takeover.kinds()
    evidence = [a.facts["rank"] for a in takeover.said if isinstance(a, Record) and a.kind == "evidence"]
    assert evidence[0] == RANKS - 1


def test_frozen_ranks_wait_for_the_last_of_the_queue() -> None:
    """The open incident is decided after all ranks have come back. They are thawed, because nothing is broken."""
    talk = Talk(joined=0)
    for rank in range(3):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
        talk.frozen(rank, 7)
        if rank < 2:
            assert talk.after(0.9 * PATIENCE.gather_s) == ""
    assert talk.machine.incident is None
    assert m.Phase.IDLE is talk.machine.job.members[Rank(2)].phase


def test_ranks_that_start_only_now_are_waited_for_while_they_come() -> None:
    """Some ranks had joined before the controller was lost, and others are only starting."""
    takeover = Takeover()
    for rank in range(RANKS // 2 + 1):
        takeover.comes(rank, version=Version(0))
    late = iter(range(RANKS // 2 + 1, RANKS))
    while takeover.now < 2 * PATIENCE.forming_s:
        takeover.passes(0.9 * PATIENCE.gather_s)
        takeover.comes(next(late), incarnation=0, resume=False, term_seen=0, version=Version(0))
    assert "opened" not in takeover.kinds()
    takeover.passes(2 * PATIENCE.forming_s)
    assert "opened" in takeover.kinds(), "none has come for long"
