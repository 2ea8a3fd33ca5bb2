"""Single behaviours of the controller's machine, as transcripts: an event, and the line of actions that it causes."""

from __future__ import annotations

import pytest

from tests.core.talk import LOST, PATIENCE, Talk, all_at_7
from ttp.core import messages as m
from ttp.core.controller.events import Accused, ConnectionId, Record, StreamEnded
from ttp.core.layout import Rank
from ttp.testing.scenario import grid

# --------------------------------------------------------------------------------------------------------------- rescue


def test_the_whole_story() -> None:
    talk = Talk()
    assert talk.lost(0) == LOST
    assert talk.frozen(2, 7, m.Phase.UPDATING) == "[acknowledged]"
    assert talk.frozen(1, 7) == "[answer]"
    assert talk.frozen(2, 8) == "[answer] [plan] Save:2"
    assert talk.facts("plan")["version"] == 8
    save = talk.orders(m.Save)[-1]
    assert (save.draft, save.order.shards, save.order.pages, save.order.job_state) == (
        ".draft-step_8-i1", ("s0",), (0, 1, 2), True,
    )  # fmt: skip


def test_saved_committed_released_closed() -> None:
    talk = Talk()
    talk.lost(0)
    assert talk.frozen_all(7, 1, 2) == "[answer] [plan] Save:1"
    assert talk.saved(1) == "[saved] [commit] Commit:1"
    assert talk.orders(m.Commit)[0].cause == "rank 0 on h (pid 100) was lost: its stream ended without a goodbye"
    assert talk.committed(1) == "[committed]"  # rank 0 may still come back
    assert talk.after(1) == "[released] Release(75):1,2"
    assert talk.orders(m.Release)[0].text == (
        "saved version 7; a restart goes on with step 8. "
        "Cause: rank 0 on h (pid 100) was lost: its stream ended without a goodbye"
    )
    assert talk.goodbye(1, m.GoodbyeReason.RELEASED) == ""
    assert talk.lost(1) == ""
    assert talk.lost(2) == "[closed]"
    assert talk.machine.stage == "waiting"


def test_messages_that_come_twice_change_nothing() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    assert talk.frozen(2, 7) == "[answer]"
    assert talk.frozen(2, 7, m.Phase.UPDATING) == ""
    talk.saved(1)
    assert talk.saved(1) == ""
    talk.committed(1)
    assert talk.committed(1) == ""
    assert talk.lost(0) == ""


def test_nobody_is_waited_for_when_the_newest_version_is_known() -> None:
    talk = Talk(grid(1, 4))
    talk.lost(0)
    assert talk.frozen(1, 7) == "[answer]"
    assert talk.frozen(2, 8) == "[answer] [plan] Save:2"  # rank 3 has not answered


def test_answers_that_come_together_are_all_taken_before_anything_follows_from_them() -> None:
    talk, alone = Talk(grid(1, 4)), Talk(grid(1, 4))
    talk.lost(0)
    alone.lost(0)
    assert [alone.frozen(rank, version) for rank, version in ((1, 7), (2, 8))] == ["[answer]", "[answer] [plan] Save:2"]

    assert [talk.frozen(r, v, together=True) for r, v in ((1, 7), (2, 8), (3, 9))] == ["[answer]"] * 3
    assert talk.incident.draft.plan is None
    assert talk.all_said() == "[plan] Save:3"  # alone, 9 would have come too late
    assert talk.all_said() == ""


def test_what_follows_from_other_words_is_not_put_off() -> None:
    talk = Talk()
    lost = talk.event(StreamEnded(ConnectionId(talk.streams[0])), together=True)
    assert lost == LOST
    assert talk.all_said() == ""


def test_all_are_waited_for_when_they_may_know_of_a_newer_one() -> None:
    talk = Talk(grid(1, 4))
    talk.lost(0)
    assert talk.frozen(1, 8) == "[answer]"
    assert talk.frozen(2, 8) == "[answer]"
    assert talk.frozen(3, 9) == "[answer] [plan] Save:3"


def test_a_saver_that_dies_is_replaced_under_the_next_generation() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    assert talk.lost(1) == "[evidence] [replan] [plan] Save:2"
    assert talk.orders(m.Save)[0].generation == 1
    assert talk.saved(2, generation=0) == ""
    assert talk.saved(2, generation=1) == "[saved] [commit] Commit:2"


def test_a_saver_that_fails_is_not_asked_again() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    assert talk.save_failed(1) == "[save_failed] [replan] [plan] Save:2"
    assert talk.save_failed(2, generation=1) == "[save_failed] [replan] [waits]"  # rank 0 may come back
    assert talk.after(1) == "[released] Release(70):1,2"
    assert talk.orders(m.Release)[0].text.startswith(
        "rank 1: disk full; rank 2: disk full; shard 's0' has no whole copy"
    )


def test_whose_late_word_is_that_it_updates_is_waited_for_like_any_other() -> None:
    talk = Talk(grid(2, 2))
    talk.fault(0)
    talk.now += talk.machine.timeouts.answer_s + 1  # the controller was away
    talk.frozen(2, 7, m.Phase.UPDATING)
    talk.frozen(0, 7)
    assert "[retracted]" in talk.frozen(1, 7, m.Phase.UPDATING)
    talk.frozen(3, 7)
    assert "[plan]" not in talk.frozen(2, 8), "7 is whole, and 8 will be"
    assert "[plan]" in talk.frozen(1, 8)
    assert talk.facts("plan")["version"] == 8


def test_what_others_have_written_is_kept_when_a_saver_is_replaced() -> None:
    talk = Talk(grid(2, 3))
    talk.lost(0)
    talk.frozen_all(7, 1, 2, 3, 4, 5)
    first = {order.rank: order.order for order in talk.orders(m.Save)}
    assert {r: o.shards for r, o in first.items()} == {1: ("s1",), 2: ("s0",)}
    talk.saved(1)
    assert talk.lost(1) == "[evidence]"  # its piece is durable
    assert talk.lost(2) == "[evidence] [replan] [plan] Save:4"
    assert talk.orders(m.Save)[0].order.shards == ("s0",)
    assert talk.saved(4, generation=1) == "[saved] [commit] Commit:4"
    assert [p.file for p in talk.orders(m.Commit)[0].pieces] == ["1_0", "4_1"]
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_a_piece_counts_when_every_copy_of_its_shard_is_gone() -> None:
    talk = Talk(grid(2, 2))
    talk.fault(0)
    talk.frozen_all(7, 0, 1, 2, 3)
    savers = {order.order.shards[0]: order.rank for order in talk.orders(m.Save)}
    assert savers == {"s0": 2, "s1": 1}
    talk.saved(2)
    talk.lost(2)
    talk.lost(0)
    assert talk.lost(1) == "[evidence] [replan] [plan] Save:3"
    talk.saved(3, generation=1)
    assert talk.committed(3, generation=1) == "[committed]"


def test_another_one_commits_when_the_committer_dies_or_fails() -> None:
    talk = Talk(grid(1, 4))
    talk.lost(0)
    talk.frozen_all(7, 1, 2, 3)
    talk.saved(1)
    assert talk.lost(1) == "[evidence] [commit] Commit:2"
    assert talk.commit_failed(2) == "[commit_failed] [commit] Commit:3"
    assert talk.committed(3) == "[committed]"


def test_nobody_is_left_to_commit() -> None:
    talk = all_at_7(lambda talk: talk.fault(0), 0, 1, 2)
    talk.saved(1)
    talk.commit_failed(1)
    talk.commit_failed(0)
    assert talk.commit_failed(2) == "[commit_failed] [released] Release(70):0,1,2"
    assert "rank 2: no rename; no rank is left to commit the checkpoint" in talk.orders(m.Release)[0].text


def test_who_hangs_in_an_update_can_commit() -> None:
    """All pieces are durable when their writer dies. A commit touches only files, not the half-updated state."""
    talk = Talk(grid(1, 2))
    talk.ask()
    talk.frozen(1, 6, m.Phase.UPDATING)
    talk.frozen(0, 7)
    assert "[plan] Save:0" in talk.after(31), "the update of rank 1 does not end"
    talk.saved(0)
    assert talk.lost(0) == "Freeze:1 [evidence] [commit] Commit:1"
    assert talk.committed(1) == "[committed]"
    assert "Release(75):1" in talk.after(1)


def test_who_stands_still_commits_before_who_hangs_in_an_update() -> None:
    talk = Talk()
    talk.ask()
    talk.frozen(0, 6, m.Phase.UPDATING)
    talk.frozen(1, 7)
    talk.frozen(2, 7)
    talk.after(31)
    talk.saved(1)
    assert "[commit] Commit:2" in talk.lost(1)
    assert "[commit] Commit:0" in talk.commit_failed(2)
    talk.commit_failed(0)
    talk.after(1)
    assert "no rank is left to commit" in talk.orders(m.Release)[0].text


def test_ttp_ot_ends_a_save_that_takes_too_long() -> None:
    talk = all_at_7(lambda talk: talk.fault(0), 0, 1, 2)
    assert talk.after(359) == ""
    assert talk.after(1) == "[released] Release(70):0,1,2"
    assert talk.orders(m.Release)[0].text == (
        "nothing was saved within 360 s (TTP_OT); versions 1 to 7 are lost: a restart begins where this launch did, or "
        "with a newer checkpoint of the program's own. Cause: exception of 0"
    )


def test_who_has_answered_at_the_gate_does_not_hang_whatever_is_said_later() -> None:
    talk = all_at_7(Talk.ask, 0, 1, 2)
    assert talk.fault(0, m.FaultKind.HUNG, subject=1) == "Freeze:0,1,2 [evidence] [retracted]"
    assert talk.write() == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_rank_that_does_not_answer_is_done_without() -> None:
    talk = Talk()
    talk.lost(0)
    talk.frozen(1, 7)
    talk.after(1)
    assert talk.after(4) == "[evidence] [plan] Save:1"
    assert talk.frozen(2, 7) == "[retracted] [answer]"


@pytest.mark.parametrize("comes", [True, False])
def test_the_last_copy_is_waited_for_longer(comes: bool) -> None:
    """Its host, or the controller's, may be overloaded."""
    talk = Talk(grid(1, 2))
    talk.lost(0)
    talk.after(1)
    assert talk.after(5) == "[evidence] [waits]"
    if comes:
        assert "[plan] Save:1" in talk.frozen(1, 7)
    else:
        assert "Release(70):1" in talk.after(5)


def test_the_schedule_is_not_taken_from_a_rank_that_raised_before_its_schedules_step() -> None:
    talk = Talk(grid(2, 2))
    mine = next(ranks for ranks in talk.layout.groups.values() if 0 in ranks)
    (other,) = (rank for rank in mine if rank != 0)
    talk.fault(0)
    talk.lost(other)
    for rank in sorted({0, 1, 2, 3} - {other}):
        talk.frozen(rank, 7, post_step_done=rank != 0, main_thread_blocked=True)
    orders = {order.rank: order.order for order in talk.orders(m.Save)}
    assert {rank: order.job_state for rank, order in orders.items() if order.shards}.pop(0) is False
    assert sum(order.job_state for order in orders.values()) == 1


def test_an_update_of_a_rank_that_acknowledged_late_has_its_time_from_the_freeze_on() -> None:
    talk = Talk(grid(1, 4))
    talk.lost(0)
    talk.frozen(2, 7)
    talk.after(3)
    talk.lost(3)
    talk.back(3, incident=talk.id)
    talk.frozen(3, 7, m.Phase.UPDATING)
    talk.after(2)
    assert talk.incident.evidence.against(m.FaultKind.SILENT) == [1]
    talk.after(1)
    talk.frozen(1, 7, m.Phase.UPDATING)
    assert not talk.incident.evidence.against(m.FaultKind.SILENT)
    talk.after(PATIENCE.freeze_s - 6)
    assert talk.incident.evidence.against(m.FaultKind.SILENT) == [1], "rank 3 was asked later"


@pytest.mark.parametrize("finished", [m.Phase.TORN, m.Phase.UPDATING, None])
def test_a_finished_step_of_which_only_the_pre_image_can_be_read_is_called_lost(finished: m.Phase | None) -> None:
    """Every rank evaluates other weights, or has left its loop in it. A torn rank has not finished the step."""
    talk = Talk(grid(1, 2))
    talk.accuse(1, m.FaultKind.EXITED)
    if finished:
        talk.frozen(0, 7, finished, main_thread_blocked=True)
    assert "Save:0" in talk.frozen(0, 6, m.Phase.TORN, has_preimage=True, main_thread_blocked=True)
    talk.write()
    assert ("saved version 6; 1 finished step is lost" in talk.incident.outcome) is bool(finished)


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_evaluates_other_weights_is_waited_for_if_no_other_has_a_copy(comes: bool) -> None:
    talk = Talk(grid(1, 2))
    talk.fault(1)
    talk.lost(1)
    talk.frozen(0, 7, m.Phase.TORN, main_thread_blocked=True)
    talk.after(PATIENCE.grace_s)  # rank 1 does not come back
    assert talk.after(PATIENCE.whole_s - 1) == ""
    if comes:
        assert "[plan] Save:0" in talk.frozen(0, 7)
    else:
        assert "Release(70):0" in talk.after(2)


def test_it_is_not_waited_for_if_another_rank_has_one() -> None:
    talk = Talk(grid(1, 3))
    talk.fault(2)
    talk.lost(2)
    talk.frozen(0, 7, m.Phase.TORN, main_thread_blocked=True)
    assert "Save:1" in talk.frozen(1, 7)


def test_a_rank_in_a_long_update_is_waited_for_longer() -> None:
    talk = Talk()
    talk.lost(0)
    talk.frozen(1, 7)
    talk.frozen(2, 7, m.Phase.UPDATING)
    talk.after(1)
    assert talk.after(28) == ""
    assert talk.after(1) == "[evidence] [plan] Save:1"


@pytest.mark.parametrize("read", ["before", "after"])
@pytest.mark.parametrize("comes", [True, False])
def test_a_controller_that_was_stopped_for_longer_reads_that_the_update_is_finished(read: str, comes: bool) -> None:
    """It reads that the rank is in an update, before it is stopped or only after, and then that the rank is frozen."""
    talk = Talk(grid(1, 2))
    talk.lost(0)
    talk.after(1)
    if read == "before":
        talk.frozen(1, 7, m.Phase.UPDATING)
    assert "Release" not in talk.after(PATIENCE.freeze_s + 1)
    if read == "after":
        assert talk.frozen(1, 7, m.Phase.UPDATING) == "[retracted] [acknowledged]"
    if comes:
        assert "[plan] Save:1" in talk.frozen(1, 8)
    else:
        assert "Release(70):1" in talk.after(PATIENCE.answer_s)


@pytest.mark.parametrize("kind", [m.FaultKind.EXCEPTION, m.FaultKind.PREEMPTED])
def test_the_untouched_beginning_needs_no_checkpoint(kind: m.FaultKind) -> None:
    talk = Talk()
    talk.fault(0, kind)
    talk.frozen(0, 0)
    talk.frozen(1, 0)
    assert talk.frozen(2, 0) == "[answer] [nothing_new] [released] Release(75):0,1,2"
    assert talk.facts("nothing_new")["text"] == "no update had finished in this launch: there is nothing to lose"
    end = talk.facts("released")
    assert "a restart begins where this launch did" in end["text"], "ranks may not have restored yet"
    assert end["preempted"] == (kind is m.FaultKind.PREEMPTED), "it does not count as a launch in vain"


@pytest.mark.parametrize("finished", [5, 6])
def test_a_shard_without_a_copy_costs_nothing_if_no_rank_has_finished_a_newer_version(finished: int) -> None:
    """The dead rank had just restored version 5, as all have."""
    talk = Talk(grid(2, 1), version=5, base_version=5)
    talk.accuse(1, m.FaultKind.EXITED)
    said = talk.frozen(0, finished)
    if finished == 5:
        assert said == "[answer] [nothing_new] [released] Release(75):0"
        assert talk.facts("nothing_new")["reason"] == "shard 's1' has no whole copy left: rank 1 gave no answer"
        assert talk.facts("released")["text"] == "version 5 is on disk already; a restart goes on with step 6"
    else:
        assert said == "[answer] [released] Release(70):0"
        assert "; version 6 is lost: a restart goes on with step 6, or with" in talk.facts("released")["text"]


def restored_at_5() -> Talk:
    talk = Talk(version=5, base_version=5)
    talk.fault(0)
    return talk


def test_what_was_restored_is_not_lost_if_nobody_answers() -> None:
    talk = restored_at_5()
    talk.after(360)
    assert talk.facts("released")["text"] == "nothing was saved within 360 s (TTP_OT)"


def test_what_was_restored_is_on_disk() -> None:
    talk = restored_at_5()
    talk.frozen_all(5, *range(3))
    assert "version 5 is on disk already; a restart goes on with step 6" in talk.orders(m.Release)[0].text


def test_a_rank_frozen_before_it_restored_saves_nothing_older() -> None:
    talk = Talk(base_version=5)
    talk.fault(0)
    talk.frozen_all(0, *range(3))
    assert "version 5 is on disk already" in talk.orders(m.Release)[0].text


def test_how_a_rank_died_is_added_to_its_incident_when_its_launcher_knows_it() -> None:
    """The kernel frees the memory of a large process for seconds, in which the others have saved and left."""
    talk = Talk()
    talk.accuse(1, m.FaultKind.EXITED)
    talk.frozen_all(7, 0, 2)
    talk.write()
    for rank in (0, 2):
        talk.lost(rank)
    assert talk.machine.incident is None and talk.id == "i1"
    killed = Accused((Rank(1),), m.FaultKind.EXITED, "killed: out of memory", (0,))
    assert "[evidence]" in talk.event(killed)
    assert next(a.incident for a in talk.said if isinstance(a, Record) and a.kind == "evidence") == "i1"
    assert talk.machine.rescue.last is not None and talk.machine.rescue.last.cause.endswith("out of memory")
    assert talk.event(killed) == "", "it is repeated until it is accepted"
