"""A manager outside the job: its handshake, and pauses at the end of a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import PATIENCE
from tests.mindio.handler_world import CURE, FOUR, REPLACED, FakeRank, HandlerWorld, Kind, Trouble
from tests.mindio.test_replacement import led
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED
from ttp.mindio.protocol.manager_messages import ManagerLeft, NoticeKind
from ttp.mindio.protocol.messages import HANDLERS

# -------------------------------------------------------------------------------------------------------------- manager


def attended(*said: NoticeKind, trouble: Trouble | None = None, wait_s: float = 30.0, **handlers: Any) -> HandlerWorld:
    """Return a world of four ranks with a manager, which has given these notices."""
    world = HandlerWorld(FOUR, trouble, **handlers)
    world.attend(wait_s)
    for kind in said:
        world.say(kind)
    return world


def test_the_hand_shake() -> None:
    world = attended()
    world.ails(1)
    assert world.kinds() == [] and world.heard() == [("fault_ranks", 0, "")]
    world.say(NoticeKind.STOP_TRAIN, {1: 0})
    world.say(NoticeKind.STOP_TRAIN, {1: 0})  # the original would end the job here
    assert world.kinds() == []
    world.say(NoticeKind.GLOBAL_RANK, {1: 0})
    world.say(NoticeKind.STRATEGY, strategy="upgrade")
    world.say(NoticeKind.STRATEGY, strategy="retry")
    assert world.kinds() == CURE and world.machine.stage == "training"
    assert world.heard()[1:] == [
        ("stop_complete", 0, ""), ("fault_ranks", 0, ""), ("strategies", 0, "exit,dump,retry"),
        ("result", 406, "upgrade"),
    ]  # fmt: skip
    world.report(0, m.Heartbeat(Rank(0), Version(8), m.Phase.IDLE))
    assert world.heard()[-1] == ("result", 0, "retry")


@pytest.mark.parametrize("until", [None, NoticeKind.STOP_TRAIN, NoticeKind.GLOBAL_RANK])
def test_a_manager_that_says_nothing_more_is_not_waited_for_long(until: NoticeKind | None) -> None:
    world = attended()
    world.kill(1)
    world.after(1.1)
    for kind in () if until is None else (NoticeKind.STOP_TRAIN, until):
        world.say(kind, {1: 1})
    began = world.now
    world.settle()
    assert world.now - began <= 30 + PATIENCE.exit_s and world.named == [7] and world.released == {EXIT_SAVED}


def test_what_cannot_be_cured_can_be_dumped_and_what_cannot_be_dumped_only_be_left() -> None:
    world = attended(trouble={(Kind.SAVE, 3): "fail"})
    world.kill(1)
    world.after(1.1)
    world.stopped({1: 1})
    assert world.heard()[-1] == ("strategies", 0, "exit,dump")
    world.say(NoticeKind.STRATEGY, strategy="retry")
    assert world.heard()[-1] == ("result", 406, "retry")
    world.say(NoticeKind.STRATEGY, strategy="dump")
    assert world.heard()[-1] == ("result", 499, "dump")
    world.say(NoticeKind.STRATEGY, strategy="exit")
    world.settle()
    assert world.released == {EXIT_NOT_SAVED}


def test_the_manager_knows_of_a_fault_first() -> None:
    world = attended()
    world.say(NoticeKind.STOP_TRAIN, {9: 1})
    assert "names no rank of this job" in world.answer and world.machine.stage == "training"
    world.say(NoticeKind.STOP_TRAIN, {2: 2, 9: 1})
    for notice in (NoticeKind.GLOBAL_RANK, NoticeKind.STRATEGY):
        world.say(notice, {2: 2}, strategy="retry")
    assert world.kinds() == ["stop", "clean", "rollback", "resume"] and world.machine.stage == "training"


def test_the_manager_knows_of_more_faults_and_wants_more_time_to_choose() -> None:
    world = attended()
    world.ails(1)
    world.say(NoticeKind.STOP_TRAIN, {1: 0})
    world.say(NoticeKind.GLOBAL_RANK, {1: 0, 2: 1}, seconds=50)
    assert {int(fault.rank): fault.kind.value for fault in world.calls[-1].faults} == {1: 0, 2: 1}
    assert world.heard()[-1] == ("strategies", 0, "exit,dump")  # no retry with a broken process
    world.after(49)
    assert world.kinds() == []
    world.say(NoticeKind.STRATEGY, strategy="dump")
    assert world.kinds() == ["save", "rename"] and set(world.acted(Kind.SAVE)) == {0, 3}


def test_a_death_while_some_are_back_in_their_loops_stops_them_again() -> None:
    this = attended(trouble={(Kind.RESUME, 3): "die"}, recover=True)
    this.ails(1)
    this.stopped(strategy="retry")
    this.dies(3)
    this.after(3)
    this.say(NoticeKind.STRATEGY, strategy="recover")
    this.settle()
    assert this.kinds()[-len(REPLACED) :] == REPLACED and this.released == set(), this.story()


def test_a_manager_that_reports_the_death_again_does_not_accuse_the_newcomer() -> None:
    this = led()
    this.starts = False
    this.say(NoticeKind.STRATEGY, strategy="recover")
    this.sit(1)
    this.say(NoticeKind.GLOBAL_RANK, {1: 1})
    for report in this._newcomer(1):
        this.report(1, report)
    this.settle()
    assert this.kinds() == REPLACED and this.released == set(), this.story()


# -------------------------------------------------------------------------------------------------------------- resize


def resizing(strategy: str, *dead: int, hosts: str = "aabb", **handlers: Any) -> HandlerWorld:
    """Let a manager choose this strategy, offered or not, in a job that was launched as elastic."""
    world = HandlerWorld(FOUR, None, hosts, **{"elastic": True, **handlers})
    world.attend()
    if dead:
        world.dies(*dead)
    else:
        for rank in range(4):
            world.fault(rank, m.FaultKind.PREEMPTED)
    world.stopped(dict.fromkeys(dead, 1), strategy)
    return world


@pytest.mark.parametrize(("strategy", "dead", "drained"), [("downgrade", (3,), ["b"]), ("upgrade", (), [])])
def test_the_next_launch_has_other_hosts(strategy: str, dead: tuple[int, ...], drained: list[str]) -> None:
    """The job is saved, and hosts of faulty ranks start no rank again. Success is told after its first step."""
    world = resizing(strategy, *dead)
    assert ("strategies", 0, f"exit,dump,{strategy}") in world.heard(), world.heard()
    assert world.machine.drained_hosts == drained and world.named == [7]
    world.goodbye(0, m.GoodbyeReason.RELEASED, version=8)  # it was a step ahead, which was not whole
    world.settle()
    assert world.released == {EXIT_SAVED} and world.heard()[-1][0] == "strategies"
    world.hello(0, framework=HANDLERS, nonce="next", launch=1, host="a", pid=9)
    for version in (7, 8):
        assert world.heard()[-1][0] == "strategies"
        world.report(0, m.Heartbeat(Rank(0), Version(version), m.Phase.IDLE))
    assert world.heard()[-1] == ("result", 0, strategy)


@pytest.mark.parametrize(
    ("strategy", "dead", "hosts", "handlers"),
    [
        ("downgrade", (3,), "aabb", {"elastic": False}),
        ("downgrade", (0,), "abcd", {}),  # the host of rank 0
        ("downgrade", (1,), "aabb", {}),  # likewise
        ("downgrade", (), "aabb", {}),  # a host wants to come in
        ("upgrade", (3,), "aabb", {}),
        ("upgrade", (), "aabb", {"elastic": False}),
    ],
)
def test_otherwise_it_is_refused_with_what_is_possible(
    strategy: str, dead: tuple[int, ...], hosts: str, handlers: dict[str, Any]
) -> None:
    world = resizing(strategy, *dead, hosts=hosts, **handlers)
    assert world.heard()[-1] == ("result", 406, strategy) and world.machine.drained_hosts == []
    world.settle()
    assert world.named == [7] and world.released == {EXIT_SAVED}


# ---------------------------------------------------------------------------------------------------------------- pause


def test_a_pause_is_at_the_end_of_the_step_that_the_furthest_is_in() -> None:
    world = attended()
    world.ranks[2].version = 8
    world.say(NoticeKind.PAUSE_TRAIN)
    assert world.kinds() == ["hold", "pause", "sync"]
    assert {act.version for act in world.acted(Kind.PAUSE).values()} == {9}
    assert world.heard() == [("stop_complete", 0, "")]
    world.say(NoticeKind.STRATEGY, strategy="continue")
    assert world.kinds()[3:] == ["continue"] and world.heard()[1:] == [("result", 0, "continue")]
    assert world.machine.stage == "training"


@pytest.mark.parametrize("strategy", ["retry", "migration", "nonsense", ""])
def test_a_strategy_that_a_pause_does_not_have_is_refused_and_the_next_one_counts(strategy: str) -> None:
    world = attended(NoticeKind.PAUSE_TRAIN)
    world.say(NoticeKind.STRATEGY, strategy=strategy)
    assert world.heard()[1:] == [("result", 406, strategy)] and world.kinds()[-1] == "sync"
    world.say(NoticeKind.STRATEGY, strategy="continue")
    assert world.heard()[2:] == [("result", 0, "continue")] and world.kinds()[-1] == "continue"


def test_a_pause_that_not_all_can_make_is_none() -> None:
    world = attended(NoticeKind.PAUSE_TRAIN, trouble={(Kind.PAUSE, 1): "fail"})
    assert world.kinds() == ["hold", "pause", "continue"]
    assert world.heard() == [("stop_complete", 1, ""), ("result", 0, "continue")]


def test_a_death_in_a_pause_is_a_death_and_the_pause_ends_with_its_incarnation() -> None:
    world = attended(NoticeKind.PAUSE_TRAIN)
    world.kill(0)
    world.settle()
    assert world.named == [7] and world.released == {EXIT_SAVED}
    world.ranks = [FakeRank() for _ in world.ranks]
    for rank in range(4):
        world.streams[rank] += 1000
        world.hello(rank, framework=HANDLERS, nonce=f"next{rank}", launch=1)
    for rank in range(4):
        world.report(rank, world.handlers(rank))
    world.acts.clear()
    world.say(NoticeKind.PAUSE_TRAIN)
    assert world.kinds() == ["hold", "pause", "sync"]


@pytest.mark.parametrize("early", [False, True])
def test_a_checkpoint_in_a_pause_leaves_the_pause_as_it_is(early: bool) -> None:
    """``early``: the manager ends the pause while the checkpoint is written."""
    world = attended(NoticeKind.PAUSE_TRAIN, trouble={(Kind.SAVE, 0): "hang"} if early else {}, wait_s=2000)
    world.ask()
    if early:
        world.say(NoticeKind.STRATEGY, strategy="continue")
    assert "continue" not in world.kinds()
    world.settle()
    assert ("continue" in world.kinds()) is early
    world.say(NoticeKind.STRATEGY, strategy="continue")
    assert world.kinds()[-1] == "continue"


@pytest.mark.parametrize(("strategy", "named"), [("dump", [7]), ("exit", [])])
def test_a_paused_job_can_be_ended(strategy: str, named: list[int]) -> None:
    world = attended(NoticeKind.PAUSE_TRAIN)
    world.say(NoticeKind.STRATEGY, strategy=strategy)
    world.settle()
    assert world.named == named and world.released == {EXIT_SAVED if named else EXIT_NOT_SAVED}


@pytest.mark.parametrize(
    ("how", "wait_s", "asked_s"),
    [
        ("it leaves", 30, 0),
        ("it says nothing", 30, 0),
        ("it says nothing", 10, 30),
        ("it cannot take what it is told", 30, 0),
    ],
)
def test_without_a_manager_nobody_is_left_standing(how: str, wait_s: float, asked_s: float) -> None:
    world = attended(wait_s=wait_s)
    world.say(NoticeKind.PAUSE_TRAIN, seconds=asked_s)
    world.after(29)
    assert world.kinds()[-1] == "sync"
    if how == "it leaves":
        world.event(ManagerLeft())
    elif how == "it says nothing":
        world.after(1)
    else:
        world.say(NoticeKind.FAILED)
    assert world.kinds()[-1] == "continue"
    assert world.heard()[1:] == ([("result", 406, "continue")] if how == "it says nothing" else [])


def test_a_repair_ends_the_pause_and_the_next_one_is_a_pause() -> None:
    world = attended(NoticeKind.PAUSE_TRAIN)
    world.ails(1)
    world.stopped(strategy="retry")
    assert world.kinds()[-1] == "resume"
    world.say(NoticeKind.PAUSE_TRAIN)
    assert world.kinds()[-1] == "sync" and world.heard()[-1] == ("stop_complete", 0, "")


def test_what_was_said_in_a_pause_is_no_answer_in_the_next_incident() -> None:
    world = attended(NoticeKind.PAUSE_TRAIN)
    for kind in (NoticeKind.GLOBAL_RANK, NoticeKind.STRATEGY):
        world.say(kind, strategy="continue")
    world.ails(1)
    world.say(NoticeKind.STOP_TRAIN)
    assert world.heard()[-1] == ("stop_complete", 0, "")
