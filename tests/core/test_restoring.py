"""All ranks restore the same checkpoint, and the next launch knows the last commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.core.restore_choice import LOOK_AGAIN_S, NOT_TRIED, UPGRADE, fallback_note, none_whole_note
from ttp.core.restore_messages import Candidate, Reading, Restored, RestoreDecision, RestoreView
from ttp.testing.scenario import grid


def view(rank: int, *found: tuple[int, str]) -> RestoreView:
    candidates = tuple(Candidate(Version(v), digest, f"step_{v}") for v, digest in found)
    return RestoreView(Rank(rank), candidates, ())


def both_find(talk: Talk, zero: Sequence[tuple[int, str]] = (), one: Sequence[tuple[int, str]] = ()) -> str:
    """Report the checkpoints that ranks 0 and 1 have found, and return the line of the second report."""
    talk.report(0, view(0, *zero))
    return talk.report(1, view(1, *one))


def test_all_ranks_restore_what_all_have_found() -> None:
    talk = Talk()
    both_find(talk, [(9, "a"), (7, "b")], [(7, "b")])
    assert talk.report(2, view(2, (9, "a"), (7, "b"))) == "[restore] RestoreDecision:0,1,2"
    assert talk.orders(RestoreDecision)[0].version == 7
    assert talk.machine.rescue.committing.base == 7
    assert talk.report(1, view(1, (7, "b"))) == "RestoreDecision:1"  # it did not hear


def test_where_no_checkpoint_is_whole_the_job_does_not_begin_again_at_step_0() -> None:
    reason = "step_9: piece x is missing"
    damaged = RestoreView(Rank(0), (), (reason, none_whole_note(Version(9))))
    talk = Talk(grid(1, 2))
    talk.report(0, damaged)
    talk.report(1, replace(damaged, rank=Rank(1), skipped=(none_whole_note(Version(7)),)))
    (decision,) = {replace(order, rank=Rank(0)) for order in talk.orders(RestoreDecision)}
    assert (decision.version, decision.name) == (9, "")
    assert reason in decision.error and "newest is of step 9" in decision.error
    assert "To begin at step 0, move the damaged ones away" in decision.error


@pytest.mark.parametrize("name", ["tft_saved_checkpoints-step_9", ".superseded-step_9-1"])
@pytest.mark.parametrize("found", [[(9, "b"), (7, "a")], [(7, "a")], []])
def test_a_checkpoint_of_a_newer_ttp_is_not_passed_over(name: str, found: list[tuple[int, str]]) -> None:
    """Nothing is damaged, and to go on from an older step would lose steps. One host may have the newer ttp already."""
    reason = f"{name}: /x/manifest.json has format 2, written by ttp 9; this is ttp 1, which reads format 1{UPGRADE}"
    talk = Talk(grid(1, 2))
    talk.report(0, replace(view(0, *found[-1:]), skipped=(reason,)))
    assert talk.report(1, view(1, *found)) == "[restore] RestoreDecision:0,1"
    for decision in talk.orders(RestoreDecision):
        assert (decision.version, decision.name, decision.unread) == (9, "", False)
        assert reason in decision.error and "move that directory away" in decision.error


def test_older_checkpoints_that_were_not_tried_are_told_of() -> None:
    """To call them damaged would let the operator throw them away."""
    talk = Talk(grid(1, 2))
    for rank in (0, 1):
        talk.report(rank, RestoreView(Rank(rank), (), ("step_9: x", NOT_TRIED, none_whole_note(Version(9)))))
    error = talk.orders(RestoreDecision)[0].error
    assert "To go on from an older one, which was not tried, move the damaged ones away" in error


@pytest.mark.parametrize("launch", [0, 1])
def test_damage_that_one_rank_found_in_the_only_checkpoint_is_told_at_once_as_final(launch: int) -> None:
    """The ranks share the reading. A restart would meet the damage again, and so would a second look."""
    talk = Talk(grid(1, 2), launch=launch)
    talk.report(0, view(0, (9, "a")))
    reason = "step_9: piece x is damaged: its digest is b, the manifest says c"
    found = RestoreView(Rank(1), (), (reason, none_whole_note(Version(9))))
    assert talk.report(1, found) == "[restore] RestoreDecision:0,1"
    decision = talk.orders(RestoreDecision)[0]
    assert (decision.version, decision.name, decision.unread) == (9, "", False)
    assert reason in decision.error and "newest is of step 9" in decision.error and "move" in decision.error


def test_a_checkpoint_that_one_rank_cannot_read_or_lacks_is_not_damaged() -> None:
    """Its storage may be away for a moment; another start may help."""
    for problem in ("piece x is missing", "piece x cannot be read: Input/output error"):
        talk = Talk(grid(1, 2))
        talk.report(0, view(0, (9, "a")))
        talk.report(1, RestoreView(Rank(1), (), (f"step_9: {problem}", none_whole_note(Version(9)))))
        decision = talk.orders(RestoreDecision)[0]
        assert decision.version == 0 and "do not see one common checkpoint" in decision.error


def test_each_of_two_checkpoints_may_be_damaged_for_another_rank() -> None:
    talk = Talk(grid(1, 2))
    bad = "piece x is damaged: its digest is b, the manifest says c"
    talk.report(0, replace(view(0, (9, "a")), skipped=(f"step_7: {bad}",)))
    talk.report(1, replace(view(1, (7, "b")), skipped=(f"step_9: {bad}",)))
    decision = talk.orders(RestoreDecision)[0]
    assert decision.version == 9 and "step_7: piece" in decision.error and "step_9: piece" in decision.error


def test_drafts_and_notes_of_a_newer_ttp_are_no_damaged_checkpoints() -> None:
    talk = Talk(grid(1, 2))
    talk.report(
        0, RestoreView(Rank(0), (), ("a draft", none_whole_note(Version(0)), "every checkpoint: none is whole"))
    )
    talk.report(1, view(1))
    assert talk.orders(RestoreDecision)[0].error == ""


def test_the_end_of_reading_is_written_down_once_when_the_last_rank_has_read() -> None:
    talk = Talk()
    for rank in range(3):
        talk.report(rank, view(rank, (9, "a")))
    assert talk.report(2, Restored(Rank(2), Version(9))) == ""
    assert talk.report(2, Restored(Rank(2), Version(9))) == "", "said again to a controller that may be new"
    assert talk.report(0, Restored(Rank(0), Version(9), 1000)) == ""
    assert talk.report(1, Restored(Rank(1), Version(9))) == "[restored]"
    assert talk.facts("restored") == {"version": 9, "size": 1000}
    assert talk.report(1, Restored(Rank(1), Version(9))) == ""


def test_what_nobody_has_read_is_decided_once_more_when_everybody_has() -> None:
    """Rank 1 did not receive the first decision, and repeats its report."""
    talk = Talk(grid(1, 2))

    def read(rank: int, index: int, count: int) -> RestoreView:
        return replace(view(rank, (9, "a")), readings=(Reading("copy", index, count),))

    talk.report(0, read(0, 0, 3))
    assert talk.report(1, read(1, 1, 3)) == "RestoreDecision:0,1"
    assert all(order.unread for order in talk.orders(RestoreDecision))
    assert talk.machine.rescue.committing.base == 0
    assert talk.report(1, read(1, 1, 3)) == ""
    assert talk.report(0, read(0, 0, 1)) == "[restore] RestoreDecision:1,0", "rank 0 has read what rank 1 did not"
    assert not any(order.unread for order in talk.orders(RestoreDecision))
    assert talk.machine.rescue.committing.base == 9


def test_what_a_rank_found_is_forgotten_with_it_while_the_job_forms() -> None:
    """Its replacement may find more: the first process may belong to a launch that another controller has saved."""
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank)
        talk.report(rank, view(rank))
    talk.lost(0)
    talk.hello(2)
    assert talk.report(2, view(2)) == "", "one of three is not there"
    talk.streams[0] += 10
    assert "[formed]" in talk.hello(0, nonce="again", launch=1)
    assert talk.report(0, view(0)) == "[restore] RestoreDecision:1,2,0"


def test_a_launch_that_was_saved_elsewhere_is_not_believed() -> None:
    talk = Talk(joined=0)
    for rank in range(3):
        talk.hello(rank)
        talk.report(rank, view(rank))
        talk.lost(rank)
    assert talk.machine.stage == "forming"
    for rank in range(3):
        talk.streams[rank] += 10
        talk.hello(rank, nonce=f"again {rank}", launch=1)
    for rank in (0, 1):
        assert talk.report(rank, view(rank, (9, "a"))) == ""
    assert talk.report(2, view(2, (9, "a"))) == "[restore] RestoreDecision:0,1,2"
    assert talk.orders(RestoreDecision)[0].version == 9


def test_what_was_found_by_a_process_that_was_replaced_does_not_count() -> None:
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank)
        talk.report(rank, view(rank))
    talk.streams[1] += 10
    talk.hello(1, nonce="again", launch=1)
    talk.hello(2)
    assert talk.report(2, view(2)) == ""
    assert talk.report(1, view(1)) == "[restore] RestoreDecision:0,2,1"


def test_ranks_that_see_different_storage_are_told() -> None:
    talk = Talk(grid(1, 2))
    both_find(talk, [(9, "aaaa")])
    assert talk.orders(RestoreDecision)[0].error == (
        "the ranks do not see one common checkpoint: rank 0 found step 9 (aaaa); rank 1 found nothing whole. "
        "Is save_dir shared by all hosts?"
    )


def test_nothing_found_is_a_fresh_start() -> None:
    talk = Talk(grid(1, 2))
    both_find(talk)
    assert (talk.orders(RestoreDecision)[0].version, talk.orders(RestoreDecision)[0].error) == (0, "")


def restarted(save_dir: str = "/save", again: str = "/save") -> Talk:
    """Return a job whose version 7 was committed by the incarnation before, and whose next one has formed."""
    talk = Talk(grid(1, 2), save_dir=save_dir)
    talk.accuse(1, m.FaultKind.EXITED)
    talk.frozen(0, 7)
    talk.write()
    talk.lost(0)
    restart(talk, 1, again)
    return talk


def restart(talk: Talk, launch: int, save_dir: str = "/save") -> None:
    for rank in range(2):
        talk.streams[rank] += 10
        talk.hello(rank, launch=launch, nonce=f"n{rank}.{launch}", save_dir=save_dir)
    assert talk.machine.stage == "training" and talk.machine.job.incarnation == launch + 1


def looks_in_vain(talk: Talk, *found: tuple[int, str]) -> str:
    """Let both ranks find the same as often as they are told to look again; return the first reason to do so."""
    reasons: list[str] = []
    for _ in LOOK_AGAIN_S:
        assert both_find(talk, found, found) == "[waits] RestoreDecision:0,1"
        decision = talk.orders(RestoreDecision)[0]
        assert decision.unread and not decision.version
        reasons.append(decision.error)
    return reasons[0]


def error_without_checkpoints(talk: Talk) -> str:
    """Let both ranks find nothing until they are no longer told to look again; return the error of the decision."""
    looks_in_vain(talk)
    both_find(talk)
    return str(talk.orders(RestoreDecision)[0].error)


def test_a_restart_looks_again_for_storage_that_is_away_on_a_host() -> None:
    talk = restarted()
    assert both_find(talk, [(7, "a"), (5, "b")]) == "[waits] RestoreDecision:0,1"
    assert "rank 1 found nothing whole" in talk.orders(RestoreDecision)[0].error
    assert both_find(talk, [(7, "a"), (5, "b")], [(5, "b")]) == "[waits] RestoreDecision:0,1"
    assert talk.orders(RestoreDecision)[0].error == (
        "step 7 was committed as /save/step, and rank 1 cannot see it. Is save_dir mounted?"
    )
    assert both_find(talk, [(7, "a"), (5, "b")], [(7, "old"), (5, "b")]) == "[waits] RestoreDecision:0,1"
    assert "as /save/step, and the ranks see different copies of it" in talk.orders(RestoreDecision)[0].error
    assert both_find(talk, [(7, "a"), (5, "b")], [(7, "a")]) == "[restore] RestoreDecision:0,1"
    assert (talk.orders(RestoreDecision)[0].version, talk.orders(RestoreDecision)[0].unread) == (7, False)


def test_a_restart_under_a_new_controller_looks_again_too() -> None:
    talk = Talk(grid(1, 2), joined=0)
    for rank in range(2):
        talk.hello(rank, launch=rank)
    assert both_find(talk, [(7, "a")]) == "[waits] RestoreDecision:0,1"


def under_a_new_controller(*views: RestoreView, launch: int = 1) -> RestoreDecision:
    """Return the decision for ranks whose controller knows nothing of the launch before."""
    talk = Talk(grid(1, len(views)), launch=launch)
    for told in views:
        talk.report(told.rank, told)
    decision: RestoreDecision = talk.orders(RestoreDecision)[0]
    return decision


def shared(rank: int, *versions: int, skipped: Sequence[str] = (), disk: str = "nfs") -> RestoreView:
    """Return the view of a rank that found checkpoints of these versions on ``disk``."""
    found = view(rank, *((version, f"d{version}") for version in versions))
    readings = tuple(Reading(f"{disk}.{version}", 0, 1) for version in versions)
    return replace(found, skipped=tuple(skipped), readings=readings)


def test_a_restart_waits_for_a_newer_checkpoint_that_a_host_does_not_list_yet() -> None:
    """The listing of an NFS client may be seconds old. No controller that knew of the commit is left."""
    decision = under_a_new_controller(shared(0, 12, 10), shared(1, 12, 10), shared(2, 10))
    assert decision.unread and not decision.version
    assert decision.error == "step 12 was committed as step_12, and rank 2 cannot see it. Is save_dir mounted?"


def test_a_damaged_one_does_not_hide_another_that_a_host_does_not_list_yet() -> None:
    lagging = shared(1, 10, skipped=["step_123: piece x is damaged"])
    assert under_a_new_controller(shared(0, 123, 12, 10), lagging).unread


@pytest.mark.parametrize(
    ("one", "two", "launch"),
    [
        (shared(0, 12, 10), shared(1, 10, skipped=["step_12: piece x is damaged: its digest is b"]), 1),
        (shared(0, 12, 10), shared(1, 10, skipped=["step_12: not made by ttp"]), 1),
        (shared(0, 12, 10, disk="one"), shared(1, 10, disk="two"), 1),
        (view(0, (12, "d12"), (10, "d10")), view(1, (10, "d10")), 1),
        (shared(0, 12, 10, skipped=[fallback_note("/mine", [Candidate(Version(12), "", "")])]), shared(1, 10), 1),
    ],
    ids=["damaged", "of others", "own disks", "unknown disks", "own fallback"],
)
def test_it_does_not_wait_for_what_another_look_cannot_show(one: RestoreView, two: RestoreView, launch: int) -> None:
    decision = under_a_new_controller(one, two, launch=launch)
    assert (decision.version, decision.unread, decision.error) == (10, False, "")


@pytest.mark.parametrize("older", [(), (5,)])
def test_a_first_start_looks_once_more(older: tuple[int, ...]) -> None:
    """A launch that has not ended may commit after one rank has listed the directory and before another does."""
    talk = Talk(grid(1, 2))
    talk.report(0, shared(0, 7, *older))
    assert talk.report(1, shared(1, *older)) == "[waits] RestoreDecision:0,1"
    talk.report(0, shared(0, 7, *older))
    assert talk.report(1, shared(1, 7, *older)) == "[restore] RestoreDecision:0,1"
    assert talk.orders(RestoreDecision)[0].version == 7


def test_a_first_start_does_not_wait_for_storage() -> None:
    """No rank can have lost sight of what was there a moment ago: a wrong mount is told after the second look."""
    talk = Talk(grid(1, 2))
    assert both_find(talk, [(7, "a")]) == "[waits] RestoreDecision:0,1"
    assert both_find(talk, [(7, "a")]) == "[restore] RestoreDecision:0,1"
    decision = talk.orders(RestoreDecision)[0]
    assert "rank 1 found nothing whole" in decision.error and not decision.unread


def test_what_was_committed_may_not_vanish() -> None:
    """A lost mount looks like an empty directory."""
    talk = restarted()
    assert "ranks 0-1 cannot see it" in looks_in_vain(talk, (5, "b"))
    both_find(talk, [(5, "b")], [(5, "b")])
    decision = talk.orders(RestoreDecision)[0]
    assert decision.version == 7 and "step 7 was committed as /save/step, and the newest that all" in decision.error
    assert talk.machine.rescue.committing.base == 0


def test_it_is_not_forgotten_by_an_incarnation_that_saves_nothing() -> None:
    talk = restarted()
    looks_in_vain(talk)
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(1, 0)
    talk.lost(1)
    restart(talk, 2)
    assert "the ranks find no checkpoint at all" in error_without_checkpoints(talk)


def test_it_is_not_forgotten_by_a_launch_whose_ranks_leave_before_it_is_formed() -> None:
    talk = restarted()
    for rank in range(2):
        talk.lost(rank)
    talk.after(100)
    for launch in (2, 3):
        talk.streams[0] += 10
        talk.hello(0, launch=launch, nonce=f"n0.{launch}", save_dir="/save")
        talk.lost(0)
    restart(talk, 4)
    assert "the ranks find no checkpoint at all" in error_without_checkpoints(talk)


def test_what_is_there_but_damaged_has_not_vanished() -> None:
    talk = restarted()
    talk.report(0, view(0, (5, "b")))
    talk.report(1, replace(view(1, (5, "b")), skipped=("/save/step: its digest is wrong",)))
    assert (talk.orders(RestoreDecision)[0].version, talk.orders(RestoreDecision)[0].error) == (5, "")


def test_a_committed_checkpoint_that_ranks_call_foreign_is_no_new_beginning() -> None:
    """It has lost its manifest, and the ranks cannot know from their directory that ttp wrote it."""
    talk, foreign = restarted(), ("step: /save/step has no manifest.json",)
    for rank in range(2):
        talk.report(rank, replace(view(rank), skipped=foreign))
    decision = talk.orders(RestoreDecision)[0]
    assert decision.version == 7 and "the ranks find no checkpoint at all" in decision.error


def test_what_one_rank_has_seen_has_not_vanished() -> None:
    talk = restarted()
    for _ in range(1 + len(LOOK_AGAIN_S)):
        both_find(talk, [(7, "a"), (5, "b")], [(5, "b")])
    assert (talk.orders(RestoreDecision)[0].version, talk.orders(RestoreDecision)[0].error) == (5, "")


@pytest.mark.parametrize("first", [0, 1])
def test_hosts_may_name_the_directory_differently(first: int) -> None:
    """Whichever rank joins first in the next launch, it is the same job, and the controller's host names its place."""
    talk = Talk(grid(1, 2), joined=0)
    where = {0: {"host": "h", "save_dir": "/here"}, 1: {"host": "other", "save_dir": "/there"}}
    for rank in (1, 0):
        talk.hello(rank, **where[rank])
    assert talk.machine.job.save_dir == "/here"
    talk.accuse(1, m.FaultKind.EXITED)
    talk.frozen(0, 7)
    talk.write()
    talk.lost(0)
    for rank in (first, 1 - first):
        talk.streams[rank] += 10
        talk.hello(rank, launch=1, nonce=f"n{rank}.1", **where[rank])
    assert talk.machine.job.save_dir == "/here"
    looks_in_vain(talk)


def test_another_directory_is_another_job() -> None:
    talk = restarted(again="/other")
    both_find(talk)
    assert talk.orders(RestoreDecision)[0].error == ""
