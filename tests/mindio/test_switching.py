"""A hot switch: living ranks are replaced by processes on other hosts, with faults at every point."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.core.talk import PATIENCE
from tests.mindio.handler_world import FOUR, HandlerWorld, Kind, Trouble
from tests.mindio.test_handler_recovery import check
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_SAVED
from ttp.mindio.protocol import messages as rm
from ttp.mindio.protocol.manager_messages import ManagerLeft, NoticeKind

STOOD = ["hold", "pause", "sync", "save", "rename"]
MOVED = [*STOOD, "stop", "rebuild", "repair", "rollback", "resume"]
OFFER = ("strategies", 0, "migration")


def world(trouble: Trouble | None = None, *moving: int, knocks: bool = True, **handlers: Any) -> HandlerWorld:
    """Let a manager ask for ranks to be moved, and its new processes come."""
    this = HandlerWorld(FOUR, trouble, **{"recover": True, **handlers})
    this.attend()
    this.say(NoticeKind.HOT_SWITCH, dict.fromkeys(moving or (1,), 1))
    for rank in (moving or (1,)) if knocks else ():
        this.knock(rank)
    return this


def chosen(trouble: Trouble | None = None, *moving: int) -> HandlerWorld:
    this = world(trouble, *moving)
    this.say(NoticeKind.STRATEGY, strategy="migration")
    return this


def stayed(this: HandlerWorld) -> None:
    """Check that all ranks train on where they were, and that no guest is left."""
    assert this.machine.stage == "training" and this.released == set() and not this.guests, this.story()
    assert {(one.life, one.out) for one in this.ranks} == {(0, False)} and not this.machine.job.moving
    assert this.kinds()[-1] in ("continue", "rename"), this.story()


# ----------------------------------------------------------------------------------------------------- it goes well


@pytest.mark.parametrize("moving", [(1,), (0,), (0, 1)])
def test_newcomers_take_the_seats_of_ranks_that_live(moving: tuple[int, ...]) -> None:
    this = world(None, *moving, knocks=False)
    old = [this.ranks[rank] for rank in moving]
    for rank in moving:
        assert this.kinds() == [] and this.machine.stage == "training"  # all others train meanwhile
        this.knock(rank)
    assert this.kinds() == STOOD and this.named == [7] and this.heard() == [OFFER]
    assert {one.released for one in old} == {None}
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.kinds() == MOVED and this.machine.stage == "training" and this.released == set(), this.story()
    assert {one.released for one in old} == {0} and not any(
        this.ranks[rank] is one for rank, one in zip(moving, old, strict=True)
    )
    assert set(this.acted(Kind.STOP)) == set(range(4)) - set(moving)
    assert {a.error_ranks for a in this.acted(Kind.REBUILD).values()} == {moving} and len(this.acted(Kind.REBUILD)) == 4
    ways = {rank: act.way for rank, act in this.acted(Kind.REPAIR).items()}
    assert {rank for rank, way in ways.items() if way is rm.RepairWay.RECEIVE} == set(moving)
    assert {one.version for one in this.ranks} == {7} and this.machine.job.live == {0, 1, 2, 3}
    assert this.machine.job.incarnation == 1 and this.machine.rescue.committing.last == (
        7,
        "where the save handlers wrote it",
    )
    this.report(0, m.Heartbeat(Rank(0), Version(8), m.Phase.IDLE))
    assert this.heard()[1:] == [("result", 0, "migration")]


def test_the_manager_may_end_the_old_processes_itself() -> None:
    """ClusterD deletes the old pod between its offer and its choice."""
    this = world()
    this.dies(1, seat="")
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.kinds() == MOVED and this.released == set() and this.machine.stage == "training", this.story()


def test_it_can_be_done_twice_and_a_death_after_it_is_a_death() -> None:
    this = chosen()
    this.say(NoticeKind.HOT_SWITCH, {2: 1})
    this.knock(2)
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.kinds() == [*MOVED, *MOVED[:3], *MOVED[5:]] and this.released == set()  # 7 is saved already
    this.event(ManagerLeft())
    this.dies(1)
    this.settle()
    assert this.released == set() and this.kinds()[-1] == "resume" and {one.life for one in this.ranks} != {1}


def test_a_newcomer_is_a_guest_until_it_has_a_seat() -> None:
    this = world(knocks=False)
    this.knock(1, ready=False)
    (welcome,) = this.orders(m.Welcome)
    assert (welcome.joins, welcome.guest) == (True, True) and this.machine.job.members[Rank(1)].hello.nonce == "n1"
    assert "Refused(rank_taken):1" in this.knock(1, ready=False, host="h")  # where the old one lives: pages are there
    assert "Refused(rank_taken):2" in this.knock(2, ready=False)  # nobody has asked for that


# ------------------------------------------------------------------------------------------------- it is not accepted


@pytest.mark.parametrize(
    ("faults", "why", "recover"),
    [
        ({}, "no rank was given", True),
        ({9: 1}, "no rank 9 trains here", True),
        ({1: 1, 3: 1}, "the state of ranks 1,3 is on no other rank", True),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "is on no other rank", True),
        ({1: 1}, "no enable_arf, or no handlers to rebuild and repair, on ranks 0-3", False),
    ],
)
def test_ranks_that_cannot_be_moved(faults: dict[int, int], why: str, recover: bool) -> None:
    this = HandlerWorld(FOUR, recover=recover)
    this.attend()
    this.say(NoticeKind.HOT_SWITCH, faults)
    assert why in this.answer and not this.machine.job.moving
    assert "Refused" in this.knock(1)


def test_said_twice_it_is_the_same_and_of_others_it_is_refused() -> None:
    this = world(knocks=False)
    this.say(NoticeKind.HOT_SWITCH, {1: 1})
    assert this.answer == ""
    this.say(NoticeKind.HOT_SWITCH, {2: 1})
    assert "the move of rank 1 has begun already" in this.answer and this.machine.job.moving == {1}
    this.knock(1)
    this.say(NoticeKind.HOT_SWITCH, {2: 1})
    assert "a rescue is going on" in this.answer


def test_during_an_incident_or_a_pause_it_is_refused() -> None:
    this = HandlerWorld(FOUR, recover=True)
    this.attend()
    this.say(NoticeKind.PAUSE_TRAIN)
    this.say(NoticeKind.HOT_SWITCH, {1: 1})
    assert "training is paused" in this.answer
    this.say(NoticeKind.STRATEGY, strategy="continue")
    this.dies(2)
    this.say(NoticeKind.HOT_SWITCH, {1: 1})
    assert "a rescue is going on" in this.answer


def test_while_ranks_are_brought_to_a_stand_still_a_pause_is_refused() -> None:
    """A pause would give up the script that stands still, and the switch would stay held after the pause."""
    this = world({(Kind.HOLD, 2): "hang"})
    assert this.kinds() == ["hold"] and this.machine.incident is None
    this.say(NoticeKind.PAUSE_TRAIN)
    assert "stand still for a hot switch" in this.answer
    stream, _ = this.guests.pop(1)
    this.event(StreamEnded(ConnectionId(stream)))
    this.after(PATIENCE.rescue_s)
    stayed(this)
    program: Any = this.machine.rescue.program
    assert not program._switching.held and not program._state.paused


def test_migration_that_nobody_has_prepared_is_refused() -> None:
    this = HandlerWorld(FOUR, recover=True)
    this.attend()
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.answer == "there is nothing to decide" and this.machine.stage == "training"


# ---------------------------------------------------------------------------------------------------- nobody is moved


def test_a_switch_that_is_stopped_before_anybody_has_come() -> None:
    this = world(knocks=False)
    this.knock(1, ready=False)
    this.say(NoticeKind.STOP_SWITCH)
    assert not this.guests and not this.machine.job.moving and this.kinds() == [] and this.calls == []


@pytest.mark.parametrize("halts", [False, True])
@pytest.mark.parametrize("kind", [NoticeKind.STOP_SWITCH, NoticeKind.STRATEGY])
def test_a_manager_that_changes_its_mind_while_all_stand_still(kind: NoticeKind, halts: bool) -> None:
    """Nobody has left its loop for the save, also in a program that wants this before each other save."""
    this = world(halt_before_dump=halts)
    this.say(kind, strategy="continue")
    stayed(this)
    assert this.machine.rescue.committing.last is not None and this.machine.rescue.false_alarms == 0


@pytest.mark.parametrize("silence", ["it leaves", "it says nothing", "it cannot take what it is told"])
def test_a_manager_that_chooses_nothing(silence: str) -> None:
    this = world()
    if silence == "it leaves":
        this.event(ManagerLeft())
    elif silence == "it says nothing":
        this.after(31)
        assert this.heard()[-1] == ("result", 406, "migration")
    else:
        this.say(NoticeKind.FAILED)
    stayed(this)


def test_a_strategy_that_is_none_is_refused_and_the_next_one_counts() -> None:
    this = world()
    for strategy in ("upgrade", "nonsense", ""):
        this.say(NoticeKind.STRATEGY, strategy=strategy)
        assert this.heard()[-1][:2] == ("result", 406)
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.kinds() == MOVED


@pytest.mark.parametrize("strategy", ["dump", "exit"])
def test_it_may_be_ended_with_the_checkpoint_instead(strategy: str) -> None:
    this = world()
    this.say(NoticeKind.STRATEGY, strategy=strategy)
    this.settle()
    assert this.named == [7] and this.released == {EXIT_SAVED} and not this.guests, this.story()


@pytest.mark.parametrize("stands", [False, True])
def test_a_newcomer_that_goes_again(stands: bool) -> None:
    """Before all ranks are paused its departure changes nothing, and another newcomer may come."""
    this = world(None, 0, 1, knocks=stands)
    if not stands:
        this.knock(0)
    stream, _ = this.guests.pop(0)
    this.event(StreamEnded(ConnectionId(stream)))
    if stands:
        stayed(this)
        assert this.heard()[-1] == ("result", 406, "migration")
        return
    assert this.kinds() == [] and this.machine.job.moving == {0, 1}
    for rank in (1, 0):
        assert this.kinds() == []
        this.knock(rank)
    assert this.kinds() == STOOD


@pytest.mark.parametrize(
    "trouble", list(itertools.product([Kind.HOLD, Kind.PAUSE, Kind.SYNC], [0, 1], ["fail", "hang"]))
)
def test_a_job_that_cannot_stand_still(trouble: tuple[Kind, int, str]) -> None:
    this = world({trouble[:2]: trouble[2]})
    this.after(PATIENCE.rescue_s)
    assert "save" not in this.kinds() and this.heard()[-1] == ("result", 406, "migration")
    stayed(this)


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_what_cannot_be_saved_is_not_moved(how: str) -> None:
    this = world({(Kind.SAVE, 0): how, (Kind.SAVE, 2): how})
    this.settle()
    assert this.heard() == [("result", 406, "migration")]
    stayed(this)


def test_a_checkpoint_that_is_asked_for_meanwhile_changes_nothing() -> None:
    this = world(knocks=False)
    this.ask()
    this.settle()
    this.knock(1)
    this.say(NoticeKind.STRATEGY, strategy="migration")
    assert this.kinds() == ["save", "rename", *MOVED[:3], *MOVED[5:]] and this.released == set()


# ------------------------------------------------------------------------------------------------------- it goes wrong


@pytest.mark.parametrize("dead", [0, 1, 3])
@pytest.mark.parametrize("at", ["prepared", "standing"])
def test_a_death_is_a_fault_like_any_other(dead: int, at: str) -> None:
    """Except the death of a rank that is to be replaced, when all are paused."""
    this = world(knocks=at == "standing")
    this.event(ManagerLeft()) if at == "prepared" else None
    this.dies(dead)
    if at == "standing":
        this.event(ManagerLeft())
    this.settle()
    assert this.released == set() and this.named == [7] and not this.guests, this.story()
    assert {one.life for one in this.ranks} == {1} and {one.version for one in this.ranks} == {7}


WRONG = [
    *itertools.product([Kind.STOP], [0, 2, 3], ["fail", "die", "hang"]),
    *itertools.product([Kind.REBUILD, Kind.REPAIR, Kind.ROLLBACK, Kind.RESUME], range(4), ["fail", "die", "hang"]),
]
EARLIER = [
    *itertools.product(
        [Kind.HOLD, Kind.PAUSE, Kind.SYNC, Kind.SAVE, Kind.RENAME, Kind.CONTINUE], range(4), ["fail", "die", "hang"]
    )
]
PAIRS = list(itertools.combinations([*EARLIER, *WRONG], 2))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(t,) for t in [*EARLIER, *WRONG]], id="one"),
        pytest.param(PAIRS, id="two", marks=pytest.mark.slow),
    ],
)
def test_whatever_goes_wrong_meanwhile_nothing_is_lost(cases: list[Any]) -> None:
    for troubles in cases:
        this = world({(kind, rank): what for kind, rank, what in troubles})
        began = this.now
        if this.machine.incident is not None:
            this.say(NoticeKind.STRATEGY, strategy="migration")
        this.event(ManagerLeft())
        program: Any = this.machine.rescue.program
        while this.machine.incident is not None or program._runner.running:
            due = this.machine.deadline()
            assert due is not None, troubles
            this.after(max(0.001, due - this.now))
        check(this, troubles)
        assert not this.guests and not this.machine.job.moving and not this.machine.job.seats, troubles
        assert this.now - began <= 2 * PATIENCE.rescue_s + PATIENCE.exit_s, troubles
        if this.named:
            assert this.released in (set(), {EXIT_SAVED}), troubles
        if len(troubles) == 1 and troubles[0] in EARLIER and troubles[0][2] != "die":
            assert this.released == set(), troubles


def test_where_it_fails_the_manager_may_have_the_dump_that_was_made_first() -> None:
    this = chosen({(Kind.REPAIR, 3): "fail"})
    assert this.heard()[-1] == ("result", 406, "migration")
    this.say(NoticeKind.STRATEGY, strategy="dump")
    assert this.heard()[-1] == ("result", 0, "dump")
    this.say(NoticeKind.STRATEGY, strategy="exit")
    this.settle()
    assert this.named == [7] and this.released == {EXIT_SAVED}


@pytest.mark.parametrize("when", ["paused", "standing for a switch"])
def test_another_controller_lets_go_of_those_that_stand_still(when: str) -> None:
    """It knows of no pause. Paused ranks report that they are halted, and are led back into their loops."""
    this = world(knocks=when != "paused")
    if when == "paused":
        this.say(NoticeKind.STOP_SWITCH)
        this.say(NoticeKind.PAUSE_TRAIN)
    this.guests.clear()  # they leave when their controller is lost
    this.taken_over({})
    this.settle()
    assert this.kinds()[-1] == "resume" and this.released == set() and this.machine.stage == "training", this.story()


def test_what_a_guest_says_is_kept_once() -> None:
    """The newest report of each kind is kept, however many the program sends."""
    this = world(knocks=False)
    this.knock(1)
    stream, _ = this.guests[1]
    for number in range(100):
        ailing = rm.Ailing(Rank(1), rm.Ailment.JOINED, f"{number}", "here I am")
        this.event(Received(ConnectionId(stream), ailing))
    guest = this.machine.job.guests[Rank(1)]
    assert len(guest.said) == 2 and guest.said[rm.Ailing] == ailing
