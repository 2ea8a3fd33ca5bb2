"""Scripts of rounds on the controller's machine: the order of actions, with failures at every point."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.core.talk import PATIENCE, Talk
from tests.mindio.handler_world import CURE, FOUR, HandlerWorld, Kind, Trouble
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, StreamEnded
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED
from ttp.mindio.protocol import messages as rm
from ttp.mindio.protocol.rounds import RESPITE_S


def lists(world: HandlerWorld) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    return {r: [(t.type, tuple(map(int, t.ranks))) for t in a.lists] for r, a in world.acted(Kind.SAVE).items()}


# ----------------------------------------------------------------------------------------------------------------- dump


def test_a_death_is_a_dump() -> None:
    world = HandlerWorld([[(list(range(8)), 2)]])
    world.kill(1)
    world.settle()
    assert world.kinds() == ["save", "rename"] and world.named == [7]
    assert lists(world) == {rank: [(0, (0, 5, 2, 3))] for rank in (0, 5, 2, 3)}
    assert set(world.acted(Kind.RENAME)) == {5} and world.released == {EXIT_SAVED}


def test_each_type_has_lists_of_its_own() -> None:
    dense, experts = [([0, 1, 2, 3], 4)], [([0, 2], 2), ([1, 3], 2)]
    world = HandlerWorld([dense, experts])
    world.kill(0)
    world.settle()
    assert lists(world) == {1: [(0, (1,)), (1, (1,))], 2: [(1, (2,))]}


def test_stop_and_clean_come_first_where_they_are_wanted_and_may_fail() -> None:
    trouble: Trouble = {(Kind.STOP, 2): "fail"}
    world = HandlerWorld(FOUR, trouble, halt_before_dump=True)
    world.kill(0)
    world.settle()
    assert world.kinds() == ["stop", "save", "rename"] and world.released == {EXIT_SAVED}


def test_who_was_stopped_for_a_save_is_not_thawed_although_nothing_is_broken_after_all() -> None:
    """A silent host is heard again, but all have left their loops, and the save hangs."""
    world = HandlerWorld(FOUR, {(Kind.SAVE, rank): "hang" for rank in range(4)}, halt_before_dump=True, save_ms=10**9)
    world.machine.rescue.unheard(Rank(2), "its host is silent", world.now)
    world.after(PATIENCE.rescue_s / 2)
    assert world.kinds() == ["stop", "clean", "save"]
    world.machine.rescue.heard_again(Rank(2), world.now)
    world.settle()
    assert world.released == {EXIT_NOT_SAVED}


def test_a_rank_in_front_of_the_missing_update_makes_it() -> None:
    """Of one piece only version 8 is left, of the other only 7."""
    world = HandlerWorld(FOUR)
    world.ranks[0].version = world.ranks[2].version = 8
    world.kill(1)
    world.settle()
    assert world.kinds() == ["catch_up", "save", "rename"]
    assert set(world.acted(Kind.CATCH_UP)) == {3} and world.named == [8]


def test_without_it_the_older_version_is_saved_where_it_is_whole() -> None:
    """The original gives up when a rank is one step behind."""
    world = HandlerWorld(FOUR)
    for rank in (0, 1):
        world.ranks[rank].version = 8
    for rank in (2, 3):
        world.ranks[rank].parked = False
    world.kill(1)
    world.settle()
    assert world.kinds() == ["save", "rename"] and world.named == [7]
    assert lists(world) == {rank: [(0, (2, 3))] for rank in (2, 3)}


def test_a_controller_that_stood_still_reads_first_that_a_rank_was_in_its_update() -> None:
    """Without that rank, one of the pieces has no copy."""
    world = HandlerWorld(FOUR)
    world.ranks[3].updating = True
    world.kill(1)
    world.after(PATIENCE.freeze_s + 2)
    world.report(3, world.standing(3, m.Phase.IDLE, world.id))
    world.settle()
    assert world.kinds() == ["save", "rename"] and world.released == {EXIT_SAVED}


def test_ranks_that_contradict_each_other_are_named() -> None:
    world = HandlerWorld(FOUR)
    world.report(3, rm.Handlers(Rank(3), (rm.ReplicaSet((Rank(2), Rank(3)), 2),), True, False, False, 1, 1, False))
    world.kill(0)
    world.settle()
    assert world.kinds() == [] and world.released == {EXIT_NOT_SAVED}
    incident = world.machine.rescue.last
    assert incident is not None and incident.release is not None
    assert "rank 3 says that ranks 2-3 hold 2 copies" in incident.release.text


def test_a_saver_that_is_lost_spoils_the_attempt_of_all() -> None:
    """Its loss makes the other savers fail, so they are asked again."""
    world = HandlerWorld([[([0, 1, 2, 3, 4, 5], 3)]], {(Kind.SAVE, 2): "die", (Kind.SAVE, 1): "fail"})
    world.kill(0)
    world.settle()
    assert world.kinds() == ["save", "save", "rename"]
    assert [saved.lists for saved in world.saves.values()][-1].keys() == {4, 1}


def test_savers_that_hang_after_a_loss_get_a_respite_only() -> None:
    world = HandlerWorld([[([0, 1, 2, 3, 4, 5], 3)]], {(Kind.SAVE, 2): "die", (Kind.SAVE, 1): "hang"})
    world.kill(0)
    began = world.now
    world.settle()
    assert world.now - began <= RESPITE_S + PATIENCE.exit_s
    assert [tuple(entry.ranks) for a in world.acts if a.kind is Kind.SAVE and a.rank == 1 for entry in a.lists] == [
        (2, 1), (4, 1),
    ]  # fmt: skip
    assert world.named == [7] and world.released == {EXIT_SAVED}


def test_a_saver_that_fails_is_replaced_and_storage_that_refuses_everybody_is_no_success() -> None:
    world = HandlerWorld(FOUR, {(Kind.SAVE, 2): "fail"})
    world.kill(0)
    world.settle()
    assert world.named == [] and world.released == {EXIT_NOT_SAVED}
    world = HandlerWorld([[([0, 1, 2, 3], 4)]], {(Kind.SAVE, 1): "fail"})
    world.kill(0)
    world.settle()
    assert world.kinds() == ["save", "save", "rename"] and world.named == [7]


@pytest.mark.parametrize(("what", "named"), [("die", [7]), ("fail", [])])
def test_the_name_is_given_by_another_one_only_if_the_first_is_lost(what: str, named: list[int]) -> None:
    world = HandlerWorld(FOUR, {(Kind.RENAME, 3): what})
    world.kill(1)
    world.settle()
    assert world.named == named and world.released == {EXIT_SAVED if named else EXIT_NOT_SAVED}


def test_a_checkpoint_on_demand() -> None:
    """All savers have to be at one version, so an update that waits at the gate is made."""
    world = HandlerWorld(FOUR)
    world.ranks[0].version = 8
    world.ask()
    world.settle()
    assert world.kinds() == ["catch_up", "save", "rename"] and world.released == set()
    assert world.machine.stage == "training" and world.machine.rescue.committing.last == (
        8,
        "where the save handlers wrote it",
    )
    world.ask()
    world.settle()
    assert world.kinds() == ["catch_up", "save", "rename"]  # it is on disk already


def test_a_death_during_a_checkpoint_on_demand_is_a_death() -> None:
    world = HandlerWorld(FOUR, {(Kind.SAVE, 1): "die"})
    world.ask()
    world.settle()
    assert world.kinds() == ["save", "save", "rename"] and world.released == {EXIT_SAVED}


# ----------------------------------------------------------------------------------------------------------------- cure


def test_lost_memory_comes_from_the_next_copy() -> None:
    world = HandlerWorld(FOUR)
    world.ails(1, code="1f")
    world.settle()
    assert world.kinds() == CURE and world.machine.stage == "training" and world.machine.rescue.false_alarms == 0
    assert {r: (a.way, a.rebuild) for r, a in world.acted(Kind.REPAIR).items()} == {
        1: (rm.RepairWay.MEMORY_HIGH, True),
        3: (rm.RepairWay.SEND, False),
    }
    assert [a.memory_error for _, a in sorted(world.acted(Kind.CLEAN).items())] == [False, True, False, False]
    assert all(one.life == 1 and one.version == 7 and one.whole for one in world.ranks)
    world.ails(2, rm.Ailment.NETWORK)  # and again
    world.settle()
    assert world.kinds() == [*CURE, "stop", "clean", "rollback", "resume"]


def test_memory_that_was_not_needed_is_not_sent() -> None:
    world = HandlerWorld(FOUR, {(Kind.CLEAN, 1): "2"})
    world.ails(1, needed=False)
    world.settle()
    assert {r: (a.way, a.transfers) for r, a in world.acted(Kind.REPAIR).items()} == {1: (rm.RepairWay.MEMORY_LOW, ())}


def test_a_copy_that_is_torn_or_behind_is_repaired_too() -> None:
    world = HandlerWorld([[([0, 1, 2, 3], 4)]])
    world.ranks[0].whole = False
    world.ranks[1].version = world.ranks[2].version = 8
    world.ails(3, rm.Ailment.NETWORK)
    world.settle()
    ways = {r: a.way for r, a in world.acted(Kind.REPAIR).items()}
    assert ways == {0: rm.RepairWay.RECEIVE, 1: rm.RepairWay.SEND, 3: rm.RepairWay.RECEIVE} | ways
    assert {one.version for one in world.ranks} == {8} and all(one.whole for one in world.ranks)


def test_a_copy_that_was_being_overwritten_is_not_saved() -> None:
    """All ranks were one step behind rank 1 and receive its state when it dies."""
    trouble: Trouble = {(Kind.REPAIR, 1): "die"} | {(Kind.REPAIR, rank): "fail" for rank in (0, 2, 3)}
    world = HandlerWorld([[([0, 1, 2, 3], 4)]], trouble)
    world.ranks[1].version = 8
    world.ails(3, rm.Ailment.NETWORK)
    world.settle()
    assert world.kinds() == ["stop", "clean", "repair"] and world.released == {EXIT_NOT_SAVED}


@pytest.mark.parametrize("steps", [("4", "4", "4", "3"), ("9", "9", "9", "9")])
def test_a_step_that_not_all_have_loaded_or_that_nobody_has_made_is_no_repair(steps: tuple[str, ...]) -> None:
    world = HandlerWorld(FOUR, {(Kind.REPAIR, r): step for r, step in enumerate(steps)}, load_repair=True)
    world.ails(1, rm.Ailment.RETRY)
    world.settle()
    assert world.kinds() == ["stop", "clean", "repair"] and world.released == {EXIT_NOT_SAVED}


@pytest.mark.parametrize("ailment", [rm.Ailment.RETRY, rm.Ailment.MEMORY_CORRUPT])
@pytest.mark.parametrize("load", [True, False])
def test_where_no_copy_can_be_trusted_a_checkpoint_is_loaded_or_nothing_saved(ailment: rm.Ailment, load: bool) -> None:
    steps: Trouble = {(Kind.REPAIR, rank): "4" for rank in range(4)}
    world = HandlerWorld(FOUR, steps, load_repair=load)
    world.ails(1, ailment)
    world.settle()
    assert world.kinds() == (CURE if load else ["stop", "clean"])
    assert world.released == (set() if load else {EXIT_NOT_SAVED}) and not world.saves
    assert {one.version for one in world.ranks} == {4 if load else 7}


def test_after_an_older_checkpoint_was_loaded_the_steps_that_follow_it_are_saved() -> None:
    """The version that is on disk, newer than they are, is of the training that went wrong."""
    world = HandlerWorld(FOUR, {(Kind.REPAIR, rank): "4" for rank in range(4)}, load_repair=True)
    world.ask()
    world.settle()
    world.ails(1, rm.Ailment.RETRY)
    world.settle()
    for rank, one in enumerate(world.ranks):
        one.version = 6
        world.report(rank, m.Heartbeat(Rank(rank), Version(6), m.Phase.IDLE))
    world.kill(0)
    world.settle()
    assert world.named == [7, 6] and world.released == {EXIT_SAVED}


def test_who_is_stopped_may_not_be_repaired_without_everybodys_consent() -> None:
    world = HandlerWorld(FOUR, retry=False)
    world.ails(1, rm.Ailment.NETWORK)
    world.settle()
    assert world.kinds() == ["save", "rename"] and world.released == {EXIT_SAVED}


def test_a_new_controller_does_not_thaw_ranks_that_were_stopped() -> None:
    world = HandlerWorld(FOUR)
    handlers = rm.Handlers(Rank(2), (rm.ReplicaSet(tuple(map(Rank, range(4))), 2),), True, False, False, 9, 9, True)
    world.report(2, handlers)
    world.settle()
    assert world.kinds() == ["stop", "clean", "rollback", "resume"] and world.machine.stage == "training"


@pytest.mark.parametrize("dead", [[0], [1], [0, 1]], ids=str)
def test_ranks_that_died_with_the_controller_are_in_the_sets_of_the_others(dead: list[int]) -> None:
    """They do not come back to the new controller, which has never been told their sets."""
    world = HandlerWorld(FOUR)
    for rank in dead:
        world.ranks[rank].dead = True
    world.taken_over({})
    world.after(PATIENCE.gather_s + 1)
    world.settle()
    assert world.kinds() == ["save", "rename"] and world.released == {EXIT_SAVED}


# -------------------------------------------------------------------------------------------------- every failure point


TROUBLES = [
    (kind, rank, what)
    for kind, rank, what in itertools.product(
        [Kind.STOP, Kind.CLEAN, Kind.REPAIR, Kind.ROLLBACK, Kind.RESUME, Kind.SAVE, Kind.RENAME],
        range(4),
        ["fail", "die", "hang"],
    )
]


PAIRS = list(itertools.combinations(TROUBLES, 2))


@pytest.mark.parametrize("ailment", [rm.Ailment.MEMORY, rm.Ailment.NETWORK, None], ids=str)
@pytest.mark.parametrize(
    "cases", [pytest.param([(t,) for t in TROUBLES], id="one"), pytest.param(PAIRS, id="two", marks=pytest.mark.slow)]
)
def test_whatever_fails_while_a_job_is_mended_it_ends_well(ailment: rm.Ailment | None, cases: list[Any]) -> None:
    """With one trouble or each pair: either all ranks go on at one version, or the save is whole."""
    for troubles in cases:
        world = HandlerWorld([[([0, 1, 2, 3], 4)]], {(kind, rank): what for kind, rank, what in troubles})
        if ailment is None:
            world.kill(1)
        else:
            world.ails(1, ailment)
        world.settle()
        check(world, troubles)


def check(world: HandlerWorld, told: object) -> None:
    alive = [one for one in world.ranks if not one.dead]
    if world.released:
        assert world.released <= {EXIT_SAVED, EXIT_NOT_SAVED} and len(world.released) == 1, told
        assert all(one.released is not None for one in alive), told
    else:
        assert alive == world.ranks, told
        assert {one.life for one in alive} in ({0}, {1}) and all(one.whole and not one.out for one in alive), told
        assert len({one.version for one in alive}) == 1, told
    if world.released == {EXIT_SAVED}:
        assert world.named, told
    for saved in world.saves.values():
        assert saved.version == 7, told


@pytest.mark.parametrize("first", [0, 1])
def test_memory_that_is_lost_while_others_are_still_on_their_way_back_is_repaired_too(first: int) -> None:
    """The rank, back in its loop, fails again before the last one is back. The report is equal, the fault new."""
    world = HandlerWorld(FOUR, {(Kind.RESUME, first): "again"})
    world.ails(1)
    world.settle()
    assert world.kinds() == [*CURE, *CURE] and world.released == set()
    assert all(rank.whole and not rank.out for rank in world.ranks)


def test_a_rank_that_raises_while_others_are_still_on_their_way_back_is_not_forgotten() -> None:
    world = HandlerWorld(FOUR, {(Kind.RESUME, 0): "raise"})
    world.ails(1)
    world.settle()
    assert world.kinds() == [*CURE, "save", "rename"] and world.released == {EXIT_SAVED}


def test_late_and_repeated_answers_change_nothing() -> None:
    world = HandlerWorld(FOUR, {(Kind.CLEAN, 2): "hang"})
    world.ails(1)
    (act,) = [a for a in world.acts if a.kind is Kind.CLEAN and a.rank == 2]
    stop = world.ranks[1].last
    assert stop is not None
    for serial in (act.serial - 1, act.serial + 1):
        world.report(2, rm.Acted(Rank(2), serial, False, 0, Version(7), False, "late"))
    assert world.kinds() == ["stop", "clean"] and world.machine.stage == "mending"
    for _ in range(2):
        world.report(2, rm.Acted(Rank(2), act.serial, True, 0, Version(7), False, ""))
    world.settle()
    assert world.kinds() == CURE


def test_an_act_is_told_again_to_a_rank_that_comes_back() -> None:
    world = HandlerWorld(FOUR, {(Kind.CLEAN, 2): "hang"})
    world.ails(1)
    Talk.event(world, StreamEnded(ConnectionId(world.streams[2])))  # nobody obeys yet
    assert world.machine.stage == "mending"
    told = world.back(2, framework=rm.HANDLERS, incident=world.id)
    assert "Freeze:2" in told
