"""A rank's side of rounds: each act once, its answer repeated on request, and reported to every controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.rank.program import RankProgram
from ttp.mindio.protocol import messages as rm
from ttp.mindio.protocol.rank_side import NoHandlers, RankRounds, Said, StartAct
from ttp.testing.toy import hello

LAYOUT = Layout.data_parallel(2)
ACT = rm.Act(Rank(1), 1, 7, rm.RoundKind.SAVE, Version(5), 1000)
DONE = rm.Acted(Rank(1), 7, True, 0, Version(5), False, "")
KNOWN = rm.Handlers(Rank(1), (), True, False, False, 1, 1, False)
AILING = rm.Ailing(Rank(1), rm.Ailment.MEMORY, "", "it hurts")


class Rank1:
    def __init__(self, program: RankProgram | None = None) -> None:
        self.machine = ProcessorMachine(hello(1, LAYOUT), RankTimeouts(), 0.0)
        self.machine.state.program = program or RankRounds()
        self.welcome(1)

    def welcome(self, term: int) -> list[Any]:
        self.event(ev.StreamUp())
        return self.event(ev.OrderReceived(m.Welcome(Rank(1), term, 1, "1")))

    def event(self, event: ev.Event) -> list[Any]:
        actions = self.machine.on_event(event, 0.0)
        return [a.report if isinstance(a, act.Send) else a for a in actions if not isinstance(a, act.Connect)]

    def ordered(self, act: m.Order) -> list[Any]:
        return self.event(ev.OrderReceived(act))


def test_an_act_is_carried_out_once_and_its_answer_said_again() -> None:
    rank = Rank1()
    assert rank.ordered(ACT) == [StartAct(ACT)]
    assert rank.ordered(ACT) == []  # it runs
    assert rank.event(Said(DONE)) == [DONE]
    assert rank.event(Said(DONE)) == []
    assert rank.ordered(ACT) == [DONE]


def test_a_new_act_replaces_one_that_runs_and_an_old_one_is_nothing() -> None:
    rank = Rank1()
    rank.ordered(ACT)
    newer = replace(ACT, serial=8)
    assert rank.ordered(newer) == [StartAct(newer)]
    assert rank.event(Said(DONE)) == []
    assert rank.ordered(ACT) == []
    assert rank.ordered(replace(ACT, serial=9, term=0)) == []  # of a controller that was replaced


def test_a_new_controller_is_told_what_the_last_one_knew() -> None:
    rank = Rank1()
    assert rank.event(Said(KNOWN)) == [KNOWN]
    assert rank.event(Said(AILING)) == [AILING]
    rank.event(ev.StreamDown("gone"))
    assert rank.welcome(2)[-2:] == [KNOWN, AILING]
    resume = replace(ACT, kind=rm.RoundKind.RESUME, term=2)
    rank.ordered(resume)
    rank.event(Said(DONE))
    rank.event(ev.StreamDown("gone"))
    assert AILING not in rank.welcome(3)


def test_whoever_waits_for_a_repair_is_let_go_when_no_controller_comes() -> None:
    rank = Rank1()
    rank.event(Said(AILING))
    rank.event(ev.StreamDown("gone"))
    patience_s = rank.machine.timeouts.alone_s
    actions = rank.machine.on_event(ev.Observed(Version(5), m.Phase.IDLE), patience_s)
    assert act.LetGo(rescued=False) in actions


def test_a_snapshot_by_handlers_may_let_an_update_through() -> None:
    for program, may in ((RankRounds(), True), (NoHandlers(), False)):
        rank = Rank1(program)
        rank.ordered(m.Freeze(Rank(1), 1, "i", "asked", True))
        (answer,) = rank.event(ev.Quiet(Version(5), m.Phase.IDLE, True, True, has_gradient=True))
        assert answer.has_gradient is may


def test_a_rank_without_handlers_says_so() -> None:
    (answer,) = Rank1(NoHandlers()).ordered(ACT)
    assert not answer.ok and "has no handlers, and so none for save" in answer.text
