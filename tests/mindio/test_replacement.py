"""New processes in the seats of dead ranks: the order of actions, with failures at every point."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import PATIENCE
from tests.mindio.handler_world import FOUR, REPLACED, SEAT, HandlerWorld, Kind, Trouble
from tests.mindio.test_handler_recovery import check
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED
from ttp.mindio.protocol import messages as rm
from ttp.mindio.protocol.manager_messages import ManagerLeft, NoticeKind


def world(trouble: Trouble | None = None, sets: Any = FOUR, **handlers: Any) -> HandlerWorld:
    return HandlerWorld(sets, trouble, **{"recover": True, **handlers})


def ended_as_without(this: HandlerWorld) -> None:
    """Check that the job was saved and all ranks left, so that the whole job restarts."""
    assert this.named == [7] and this.released == {EXIT_SAVED}, this.story()
    assert not this.machine.job.seats


# -------------------------------------------------------------------------------------------------------- it goes well


def test_a_new_process_takes_the_seat_of_the_dead() -> None:
    this = world()
    this.dies(1)
    this.settle()
    assert this.kinds() == REPLACED and this.named == [7] and this.released == set()
    assert {r: a.way for r, a in this.acted(Kind.REPAIR).items()} == {1: rm.RepairWay.RECEIVE, 3: rm.RepairWay.SEND}
    assert {a.error_ranks for a in this.acted(Kind.REBUILD).values()} == {(1,)} and len(this.acted(Kind.REBUILD)) == 4
    assert {a.purpose for a in this.acts if a.kind is not Kind.SAVE and a.kind is not Kind.RENAME} == {"recover"}
    assert set(this.acted(Kind.STOP)) == set(this.acted(Kind.MAKE_WAY)) == {0, 2, 3}
    assert {one.version for one in this.ranks} == {7} and {one.life for one in this.ranks} == {1}
    assert this.machine.stage == "training" and this.machine.rescue.committing.last == (
        7,
        "where the save handlers wrote it",
    )
    assert this.machine.job.incarnation == 1 and this.machine.job.live == {0, 1, 2, 3}


def test_it_can_happen_again_and_a_version_that_is_saved_is_not_saved_twice() -> None:
    this = world()
    this.dies(1)
    this.settle()
    this.dies(0)
    this.settle()
    assert this.kinds() == [*REPLACED, *REPLACED[2:]] and this.released == set()
    assert {one.version for one in this.ranks} == {7}


def test_several_at_once_and_one_of_two_that_was_torn() -> None:
    this = world(sets=[[([0, 1, 2, 3], 4)]])
    this.ranks[0].whole = False
    this.dies(1, 2)
    this.settle()
    assert this.kinds() == REPLACED
    ways = {r: a.way.name for r, a in this.acted(Kind.REPAIR).items()}
    assert ways == {0: "RECEIVE", 1: "RECEIVE", 2: "RECEIVE", 3: "SEND"}


def test_a_newcomer_that_does_not_say_what_it_shares_holds_what_the_dead_held() -> None:
    """MindSpore's client declares its replicas only after a step."""
    this = world({(Kind.MAKE_WAY, 1 + SEAT): "hang"})
    this.starts = False
    this.dies(1)
    this.start(1)
    this.sit(1)
    this.report(1, replace(this.handlers(1), sets=()))
    this.report(1, rm.Ailing(Rank(1), rm.Ailment.JOINED, "", "here I am"))
    this.settle()
    assert this.kinds() == REPLACED and this.released == set()


def test_a_newcomer_is_told_that_it_joins_and_nobody_else() -> None:
    this = world({(Kind.MAKE_WAY, 1 + SEAT): "hang"})
    this.dies(1)
    this.start(1)  # does not come
    this.sit(1)
    assert [order.joins for order in this.orders(m.Welcome)] == [True]
    this.sit(1, save_dir="/1")  # the welcome was lost with its stream; handlers save where they like
    assert [order.joins for order in this.orders(m.Welcome)] == [True]
    this.streams[2] += 1000
    this.back(2, framework=rm.HANDLERS)
    assert [order.joins for order in this.orders(m.Welcome)] == [False]


def test_a_process_that_comes_too_early_or_too_late_is_none_of_this_incarnation() -> None:
    this = world({(Kind.SAVE, 3): "hang"})
    this.dies(1)
    assert "Refused(busy):1" in this.hello(1, framework=rm.HANDLERS, nonce="new", launch=1)
    this = world({(Kind.REBUILD, 0): "fail"})
    this.dies(1)
    this.settle()
    ended_as_without(this)
    assert "[incarnation]" in this.hello(1, framework=rm.HANDLERS, nonce="newer", launch=2)


def test_a_collective_tells_of_the_death_before_anybody_else_does() -> None:
    this = world()
    for rank in (0, 2):
        this.ails(rank, rm.Ailment.PEER)
    assert this.kinds() == [] or this.kinds() == ["save", "rename"]
    this.dies(1)
    this.settle()
    assert this.kinds() == REPLACED and this.released == set()


def test_a_collective_that_breaks_without_a_death_ends_as_without() -> None:
    this = world()
    this.ails(0, rm.Ailment.PEER)
    this.settle()
    assert this.kinds() == ["save", "rename"]
    ended_as_without(this)
    this = world(recover=False)
    this.ails(0, rm.Ailment.PEER)
    this.settle()
    assert this.kinds() == ["save", "rename"]


def test_a_rank_may_reach_the_gate_when_the_step_before_is_saved_already() -> None:
    """An update that only this rank could still make is not waited for: all continue from the step that was saved."""
    this = world()
    for rank in (2, 3):
        this.ranks[rank].version, this.ranks[rank].parked = 6, False
    this.dies(1, seat="")
    assert this.named == [6]
    this.ranks[3].parked = True
    this.report(3, this.standing(3, m.Phase.IDLE, this.incident.id))
    this.dies(1)
    this.settle()
    assert this.kinds() == REPLACED and this.named == [6] and this.released == set()
    assert {one.version for one in this.ranks} == {6}


def test_a_false_alarm_is_thawed() -> None:
    this = world()
    this.lost(1)
    this.back(1, framework=rm.HANDLERS)
    this.settle()
    assert this.kinds() == ["save", "rename"] and this.released == set() and this.machine.stage == "training"


# ------------------------------------------------------------------------------------------------------- it is not done


@pytest.mark.parametrize(
    ("handlers", "seat"),
    [({"recover": False}, "ready"), ({}, "the job has several hosts"), ({}, "")],
    ids=["not wanted", "no seat", "no launcher"],
)
def test_where_it_cannot_be_done_it_is_a_dump(handlers: dict[str, Any], seat: str) -> None:
    this = world(**handlers)
    this.dies(1, seat=seat)
    this.settle()
    assert this.kinds() == ["save", "rename"]
    ended_as_without(this)


def test_only_deaths_are_mended_so() -> None:
    this = world()
    this.report(2, m.Fault(Rank(2), Rank(2), m.FaultKind.EXCEPTION, "out of luck", "", "n2"))
    this.dies(1)
    this.settle()
    assert this.kinds() == ["save", "rename"]
    ended_as_without(this)


@pytest.mark.parametrize("recover", [True, False])
def test_what_no_other_rank_holds_is_lost(recover: bool) -> None:
    this = world(recover=recover)
    this.dies(1, 3)
    this.settle()
    assert this.released == {EXIT_NOT_SAVED} and this.kinds() == []


def test_before_the_first_step_there_is_nothing_to_go_on_from() -> None:
    this = world()
    for one in this.ranks:
        one.version = 0
    this.dies(1)
    this.settle()
    assert this.kinds() == [] and this.released == {EXIT_SAVED}  # as without


def test_without_a_checkpoint_nobody_is_replaced() -> None:
    this = world({(Kind.SAVE, 2): "fail"})
    this.dies(0)
    this.settle()
    assert this.released == {EXIT_NOT_SAVED} and "make_way" not in this.kinds()


# -------------------------------------------------------------------------------------------------- it goes wrong later

WRONG = [
    *itertools.product(
        [Kind.STOP, Kind.CLEAN, Kind.MAKE_WAY, Kind.REBUILD, Kind.REPAIR, Kind.ROLLBACK, Kind.RESUME],
        [0, 2, 3],
        ["fail", "die", "hang"],
    ),
    *itertools.product([Kind.REBUILD, Kind.REPAIR, Kind.ROLLBACK, Kind.RESUME], [1], ["fail", "die", "hang"]),
    *((Kind.MAKE_WAY, 1 + SEAT, what) for what in ("hang", "die")),
]
"""What may become of the survivors, of the newcomer, and of whoever was to come."""
SAVERS = list(itertools.product([Kind.SAVE, Kind.RENAME], [0, 2, 3], ["fail", "die", "hang"]))
PAIRS = list(itertools.combinations([*SAVERS, *WRONG], 2))


@pytest.mark.parametrize("sets", [FOUR, [[([0, 1, 2, 3], 4)]]], ids=["two pieces", "four copies"])
@pytest.mark.parametrize(
    "cases", [pytest.param([(t,) for t in WRONG], id="one"), pytest.param(PAIRS, id="two", marks=pytest.mark.slow)]
)
def test_whatever_goes_wrong_meanwhile_what_was_saved_is_the_end(cases: list[Any], sets: Any) -> None:
    for troubles in cases:
        this = world({(kind, rank): what for kind, rank, what in troubles}, sets)
        began = this.now
        this.dies(1)
        this.settle()
        check(this, troubles)
        assert this.now - began <= PATIENCE.rescue_s + PATIENCE.exit_s, troubles
        if this.named:
            assert this.released in (set(), {EXIT_SAVED}), troubles
        if not any(kind in (Kind.SAVE, Kind.RENAME) for kind, _, _ in troubles) and not this.trouble:
            ended_as_without(this)


@pytest.mark.parametrize("trouble", [(Kind.MAKE_WAY, 1 + SEAT), (Kind.REBUILD, 0), (Kind.REPAIR, 1)])
def test_the_time_for_all_of_it_is_half_of_what_is_left(trouble: tuple[Kind, int]) -> None:
    this = world({trouble: "hang"}, action_ms=300_000)
    this.dies(1)
    this.settle()
    ended_as_without(this)
    (limit_s,) = {act.limit_ms / 1000 for act in this.acted(Kind.MAKE_WAY).values()}
    assert limit_s == pytest.approx(PATIENCE.rescue_s / 2, abs=5)
    assert this.now <= PATIENCE.rescue_s / 2 + PATIENCE.exit_s + 5


def test_a_second_death_while_the_newcomer_is_awaited() -> None:
    this = world()
    this.starts = False
    this.dies(1)
    this.after(0.6)
    assert this.kinds()[-1] == "make_way"
    this.dies(2)
    this.settle()
    ended_as_without(this)
    assert this.now < 5 + PATIENCE.exit_s  # nobody waits for the first one


def test_another_controller_goes_on_with_a_newcomer_that_has_come() -> None:
    """The first controller is lost while groups are rebuilt: rounds are idempotent, and begin again."""
    this = world({(Kind.REBUILD, 0): "hang"})
    this.dies(1)
    this.start(1)
    assert this.kinds()[-1] == "rebuild" and this.machine.rescue.program.invalid(Rank(1))
    this.taken_over({rank: rm.Ailment.JOINED if rank == 1 else rm.Ailment.STOPPED for rank in range(4)})
    this.settle()
    assert this.kinds() == ["stop", "clean", "rebuild", "repair", "rollback", "resume"], this.story()
    assert {act.purpose for act in this.acts} == {"recover"}
    assert {one.version for one in this.ranks} == {7} and this.released == set()


# ---------------------------------------------------------------------------------------------------------- the manager


def led(trouble: Trouble | None = None, seat: str = "", *, saved: bool = False) -> HandlerWorld:
    """Let a manager that was told of a death stop the job, and know of no other death.

    It is not offered a replacement if ``seat`` says why the launcher cannot start one.
    """
    this = world(trouble)
    if saved:
        this.ask()
        this.settle()
    this.attend()
    this.dies(1, seat=seat)
    this.stopped({1: 1})
    assert this.heard() == [("fault_ranks", 0, ""), ("stop_complete", 0, ""), ("fault_ranks", 0, ""),
                           ("strategies", 0, "exit,dump" if seat else "exit,dump,recover")]  # fmt: skip
    return this


@pytest.mark.parametrize("strategy", ["recover", "recover-in-place"])
def test_a_manager_chooses_it_and_starts_the_process_itself(strategy: str) -> None:
    this = led()
    this.say(NoticeKind.STRATEGY, strategy=strategy)
    this.settle()
    assert this.kinds() == REPLACED and this.released == set()
    assert len(this.heard()) == 4  # it is not done before one more step
    this.report(0, m.Heartbeat(Rank(0), Version(8), m.Phase.IDLE))
    assert this.heard()[-1] == ("result", 0, strategy)


def test_a_job_that_is_soon_done_is_mended_too() -> None:
    this = led()
    this.say(NoticeKind.STRATEGY, strategy="recover")
    this.settle()
    this.goodbye(0, version=8)
    assert this.heard()[-1] == ("result", 0, "recover")


def test_where_the_launcher_cannot_start_the_process_it_is_not_offered() -> None:
    this = led(seat="the job has several hosts")
    this.say(NoticeKind.STRATEGY, strategy="recover")
    assert this.heard()[-1] == ("result", 406, "recover")


@pytest.mark.parametrize("strategy", ["upgrade", "downgrade", "migration", "nonsense"])
def test_what_else_is_refused_with_what_is_possible(strategy: str) -> None:
    this = led()
    this.say(NoticeKind.STRATEGY, strategy=strategy)
    assert this.heard()[-1] == ("result", 405, strategy)


def test_it_is_tried_once_for_each_fault() -> None:
    this = led({(Kind.MAKE_WAY, 1 + SEAT): "hang"})
    this.starts = False
    this.say(NoticeKind.STRATEGY, strategy="recover")
    this.after(PATIENCE.rescue_s / 2)
    assert this.heard()[-1] == ("result", 406, "recover")
    this.say(NoticeKind.STRATEGY, strategy="recover")
    assert this.heard()[-2:] == [("result", 406, "recover")] * 2


def test_where_it_fails_the_manager_may_have_the_dump_that_was_made_first() -> None:
    this = led({(Kind.REPAIR, 3): "die"})
    this.say(NoticeKind.STRATEGY, strategy="recover")
    while this.heard()[-1][0] != "result":
        for rank in sorted(this.machine.job.seats):
            this.start(rank)
        this.after(0.5)
    assert this.heard()[-1] == ("result", 406, "recover")
    this.say(NoticeKind.STRATEGY, strategy="dump")
    assert this.heard()[-1] == ("result", 0, "dump")
    this.say(NoticeKind.STRATEGY, strategy="exit")
    this.settle()
    ended_as_without(this)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("end", ["the manager says exit", "the manager leaves", "the time is over"])
def test_however_it_ends_what_was_saved_first_counts(end: str, saved: bool) -> None:
    """``saved``: it was on disk before the fault. Exit code 70 would say that finished steps are lost."""
    this = led({(Kind.REBUILD, 0): "fail"}, saved=saved)
    this.starts = False
    this.say(NoticeKind.STRATEGY, strategy="recover")
    if end == "the time is over":
        this.after(PATIENCE.rescue_s + 1)  # in one piece, as for a controller that was stopped
    else:
        this.start(1)
        assert this.heard()[-1] == ("result", 406, "recover")
        this.say(NoticeKind.STRATEGY, strategy="exit") if "exit" in end else this.event(ManagerLeft())
    this.settle()
    ended_as_without(this)
    assert this.kinds().count("rebuild") == ("time" not in end), "it is tried once"
    assert this.machine.rescue.committing.last == (7, "where the save handlers wrote it")


def test_a_stream_that_breaks_meanwhile_leaves_lost_memory_to_be_repaired() -> None:
    this = world()
    this.lost(1)
    this.ails(0)
    this.back(1, framework=rm.HANDLERS)
    this.settle()
    assert "repair" in this.kinds() and this.released == set(), this.story()
    assert {one.version for one in this.ranks} == {7}
