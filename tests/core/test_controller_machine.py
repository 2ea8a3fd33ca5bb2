"""Single behaviours of the controller's machine, as transcripts: what comes in, and the line of what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import Talk, hello
from ttp.core import messages as m
from ttp.core.controller import planning
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.decide import Answer, How, NoPlan, Plan, decide
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.testing.scenario import grid

LOST = "[opened] Freeze:1,2 [evidence]"
"""Rank 0 of three is lost."""


def frozen_at_7(talk: Talk, *ranks: int) -> str:
    lines = [talk.frozen(r, 7) for r in ranks]
    return lines[-1]


# ------------------------------------------------------------------------------------------------------------ admission


def test_a_job_forms() -> None:
    talk = Talk(formed=False)
    assert talk.hello(1) == "[incarnation] Welcome:1 [joined]"
    assert talk.hello(0) == "Welcome:0 [joined]"
    assert talk.machine.stage == "forming"
    assert talk.hello(2) == "Welcome:2 [joined] [formed]"
    assert talk.machine.stage == "training"
    assert talk.hello(2) == "Welcome:2 [joined]"  # the welcome was lost


other = grid(1, 4)
wrong: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol_major": 9}, "protocol", f"rank 1 speaks 9.{m.PROTOCOL_MINOR}"),
    ({"rank": Rank(7)}, "malformed", "rank 7 is not in a world of 3"),
    ({"world_size": 4}, "malformed", "layout and digest do not belong together"),
    ({"run_id": "b"}, "other_job", "two jobs share TTP_PORT"),
    ({"nonce": "b"}, "rank_taken", "rank 1 is already held by pid 101 on h"),
    ({"incarnation": -1}, "fenced", "which was given up"),
]


@pytest.mark.parametrize(("change", "code", "text"), wrong, ids=[w[1] + str(i) for i, w in enumerate(wrong)])
def test_who_does_not_belong_is_refused_in_words(change: dict[str, Any], code: str, text: str) -> None:
    talk = Talk()
    stranger = replace(hello(1, talk.layout), **change)
    assert talk.event(Received(ConnectionId(50), stranger)) == f"Refused({code}):{stranger.rank} [refused]"
    assert text in talk.orders(m.Refused)[0].text
    assert talk.facts("refused")["code"] == code
    assert talk.machine.incident is None


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (other, "rank 2 has WORLD_SIZE=4, the others have 3"),
        (
            Layout(3, {Shard("w"): (Rank(0), Rank(1)), Shard("v"): (Rank(2),)}),
            "rank 2 announces another layout than the others: 2 shards (v: 2, w: 0-1) against 1 shards (s0: 0-2): "
            "shards 'v', 'w' only there; shard 's0' only here. Every rank must wrap the same model in the same way",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(layout: Layout, text: str) -> None:
    talk = Talk(formed=False)
    talk.hello(0)
    talk.hello(1)
    talk.machine.job.learn(layout)
    assert talk.report(2, hello(2, layout)) == "Refused(mismatch):2 [refused]"
    assert text in talk.orders(m.Refused)[0].text


def beat(talk: Talk, rank: int, version: int) -> str:
    return talk.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE))


def three_of_four() -> Talk:
    """Rank 3 could not join, and trains without protection."""
    talk = Talk(grid(1, 4), formed=False)
    for rank in range(3):
        talk.hello(rank)
    return talk


def test_an_update_proves_that_every_rank_exists() -> None:
    talk = three_of_four()
    assert beat(talk, 0, 7) == "", "the first change may be a restore"
    assert talk.ask() == "answer: not saved"
    assert beat(talk, 0, 8) == "[formed]"
    assert talk.facts("formed")["unprotected_ranks"] == "3"
    assert talk.machine.stage == "training"
    assert beat(talk, 1, 9) == ""
    assert talk.lost(1).startswith("[opened] Freeze:0,2 [evidence]")
    talk.frozen(0, 9)
    assert "[plan] Save" in talk.frozen(2, 9)


def test_a_job_with_a_rank_that_never_joined_is_saved_on_request_and_ends() -> None:
    talk = three_of_four()
    for version in (1, 2):
        beat(talk, 0, version)
    assert talk.ask() == "[opened] Freeze:0,1,2 [evidence]"
    for rank in range(3):
        talk.frozen(rank, 2)
    talk.saved(0)
    assert "Thaw:0,1,2" in talk.committed(0)
    said = [talk.goodbye(rank) for rank in range(3)]
    assert said[-1] == "[done] Finished:0,1,2 [finished]"


def test_a_rank_that_joins_late_is_protected_from_then_on() -> None:
    talk = three_of_four()
    for version in (1, 2):
        beat(talk, 0, version)
    assert talk.hello(3, version=Version(2)) == "Welcome:3 [joined] [formed]"
    assert talk.lost(3).startswith("[opened] Freeze:0,1,2 [evidence]")


def test_a_rank_that_dies_before_the_job_is_formed_is_replaced() -> None:
    talk = Talk(formed=False)
    talk.hello(0)
    talk.hello(1)
    assert talk.lost(0) == "[gone]"
    assert talk.hello(0, nonce="again", launch=1) == "Welcome:0 [joined]"
    assert (
        talk.hello(1, nonce="again", launch=1) == "Refused(fenced):1 Welcome:1 [joined]"
    )  # its death is not known yet
    assert talk.hello(2, nonce="again", launch=1) == "Welcome:2 [joined] [formed]"
    assert talk.machine.job.incarnation == 1


def test_a_launch_that_came_to_nothing_is_followed_by_the_next_incarnation() -> None:
    """Everybody has gone before the job was whole, and may have trained elsewhere: pages of theirs are of the past."""
    talk = Talk(formed=False)
    for rank in (0, 1):
        talk.hello(rank)
        talk.lost(rank)
    assert "[incarnation]" not in talk.hello(2), "somebody who has not been there goes on forming it"
    talk.lost(2)
    assert "[incarnation]" not in talk.hello(1, incarnation=1, resume=True), "and so does who was there"
    talk = Talk(formed=False)
    for rank in (0, 1):
        talk.hello(rank)
        talk.lost(rank)
    assert "[incarnation]" in talk.hello(1, nonce="b", launch=1)
    assert talk.machine.job.incarnation == 2


def test_a_new_launch_opens_the_next_incarnation() -> None:
    talk = Talk()
    assert "Refused(fenced):0,1,2 [incarnation] Welcome:1" in talk.hello(1, nonce="b", launch=1)
    assert talk.machine.job.incarnation == 2
    assert talk.back(0, incarnation=1) == "Refused(fenced):0 [refused]"


def test_a_restarted_job_waits_while_the_last_one_is_saved() -> None:
    talk = Talk()
    talk.lost(0)
    assert talk.hello(0, nonce="b", launch=1) == "Refused(busy):0 [refused]"
    for rank in (1, 2):
        talk.frozen(rank, 7)
    talk.saved(1)
    talk.committed(1)
    assert "Release(75):1,2" in talk.after(1)
    assert "[incarnation] Welcome:0" in talk.hello(0, nonce="b", launch=1)


def test_incarnations_go_on_when_the_controller_that_counted_is_gone() -> None:
    talk = Talk(formed=False)
    talk.hello(0, launch=4)
    assert talk.machine.job.incarnation == 5


def test_a_hello_that_comes_late_on_an_old_stream_changes_nothing() -> None:
    talk = Talk()
    talk.back(1)
    late = hello(1, talk.layout, incarnation=1, resume=True)
    assert talk.event(Received(ConnectionId(2), late)) == ""
    assert talk.event(StreamEnded(ConnectionId(2))) == ""
    assert talk.machine.job.live == {0, 1, 2}


# -------------------------------------------------------------------------------------------------------------- rescue


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
    assert frozen_at_7(talk, 1, 2) == "[answer] [plan] Save:1"
    assert talk.saved(1) == "[saved] [commit] Commit:1"
    assert talk.orders(m.Commit)[0].cause == "rank 0 on h (pid 100) was lost: its stream ended without a goodbye"
    assert talk.committed(1) == "[committed]"  # rank 0 may still come back
    assert talk.after(1) == "[released] Release(75):1,2"
    assert talk.orders(m.Release)[0].text == "saved version 7; a restart goes on with step 8"
    assert talk.goodbye(1, m.GoodbyeReason.RELEASED) == ""
    assert talk.lost(1) == ""
    assert talk.lost(2) == "[closed]"
    assert talk.machine.stage == "waiting"


def test_messages_that_come_twice_change_nothing() -> None:
    talk = Talk()
    talk.lost(0)
    frozen_at_7(talk, 1, 2)
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


def test_all_are_waited_for_when_they_may_know_of_a_newer_one() -> None:
    talk = Talk(grid(1, 4))
    talk.lost(0)
    assert talk.frozen(1, 8) == "[answer]"
    assert talk.frozen(2, 8) == "[answer]"
    assert talk.frozen(3, 9) == "[answer] [plan] Save:3"


def test_a_saver_that_dies_is_replaced_under_the_next_generation() -> None:
    talk = Talk()
    talk.lost(0)
    frozen_at_7(talk, 1, 2)
    assert talk.lost(1) == "[evidence] [replan] [plan] Save:2"
    assert talk.orders(m.Save)[0].generation == 1
    assert talk.saved(2, generation=0) == ""
    assert talk.saved(2, generation=1) == "[saved] [commit] Commit:2"


def test_a_saver_that_fails_is_not_asked_again() -> None:
    talk = Talk()
    talk.lost(0)
    frozen_at_7(talk, 1, 2)
    assert talk.save_failed(1) == "[save_failed] [replan] [plan] Save:2"
    assert talk.save_failed(2, generation=1) == "[save_failed] [replan] [waits]"  # rank 0 may come back
    assert talk.after(1) == "[released] Release(70):1,2"
    assert talk.orders(m.Release)[0].text.startswith(
        "rank 1: disk full; rank 2: disk full; shard 's0' has no whole copy"
    )


def test_whose_late_word_is_that_it_updates_is_waited_for_like_any_other() -> None:
    talk = Talk(grid(2, 2))
    talk.fault(0)
    talk.now += talk.machine.patience.answer_s + 1  # the controller was away
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
    for rank in (1, 2, 3, 4, 5):
        talk.frozen(rank, 7)
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
    for rank in (0, 1, 2, 3):
        talk.frozen(rank, 7)
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
    frozen_at_7(talk, 1, 2, 3)
    talk.saved(1)
    assert talk.lost(1) == "[evidence] [commit] Commit:2"
    assert talk.commit_failed(2) == "[commit_failed] [commit] Commit:3"
    assert talk.committed(3) == "[committed]"


def test_nobody_is_left_to_commit() -> None:
    talk = Talk()
    talk.fault(0)
    frozen_at_7(talk, 0, 1, 2)
    talk.saved(1)
    talk.commit_failed(1)
    talk.commit_failed(0)
    assert talk.commit_failed(2) == "[commit_failed] [released] Release(70):0,1,2"
    assert "rank 2: no rename; nobody is left to commit the checkpoint" in talk.orders(m.Release)[0].text


def test_who_hangs_in_an_update_can_commit() -> None:
    """All is durable and its writer dies: a commit touches files only, not the state that is half written."""
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
    assert "nobody is left to commit" in talk.orders(m.Release)[0].text


def test_ttp_ot_ends_a_save_that_takes_too_long() -> None:
    talk = Talk()
    talk.fault(0)
    frozen_at_7(talk, 0, 1, 2)
    assert talk.after(359) == ""
    assert talk.after(1) == "[released] Release(70):0,1,2"
    assert talk.orders(m.Release)[0].text == "nothing was saved within 360 s (TTP_OT)"


def test_a_rank_that_does_not_answer_is_done_without() -> None:
    talk = Talk()
    talk.lost(0)
    talk.frozen(1, 7)
    talk.after(1)
    assert talk.after(4) == "[evidence] [plan] Save:1"
    assert talk.frozen(2, 7) == "[retracted] [answer]"


def test_a_rank_in_a_long_update_is_waited_for_longer() -> None:
    talk = Talk()
    talk.lost(0)
    talk.frozen(1, 7)
    talk.frozen(2, 7, m.Phase.UPDATING)
    talk.after(1)
    assert talk.after(28) == ""
    assert talk.after(1) == "[evidence] [plan] Save:1"


def test_the_untouched_beginning_needs_no_checkpoint() -> None:
    talk = Talk()
    talk.fault(0)
    talk.frozen(0, 0)
    talk.frozen(1, 0)
    assert talk.frozen(2, 0) == "[answer] [nothing_new] [released] Release(75):0,1,2"
    assert talk.facts("nothing_new")["text"] == "no update had finished: there is nothing to lose"


def test_what_was_restored_is_on_disk() -> None:
    talk = Talk(formed=False)
    for rank in range(3):
        talk.hello(rank, version=5, base_version=5)
    talk.fault(0)
    for rank in range(3):
        talk.frozen(rank, 5)
    assert "version 5 is on disk already; a restart goes on with step 6" in talk.orders(m.Release)[0].text


def test_a_rank_frozen_before_it_restored_saves_nothing_older() -> None:
    talk = Talk(formed=False)
    for rank in range(3):
        talk.hello(rank, base_version=5)
    talk.fault(0)
    for rank in range(3):
        talk.frozen(rank, 0)
    assert "version 5 is on disk already" in talk.orders(m.Release)[0].text


# --------------------------------------------------------------------------------------------------------- false alarms


def test_a_flap_within_the_grace_is_thawed() -> None:
    talk = Talk()
    talk.lost(0)
    assert talk.back(0) == "Welcome:0 [reconnected] [retracted] Freeze:0"
    talk.now += 0.5
    assert talk.frozen(0, 7) == "[answer]"
    frozen_at_7(talk, 1, 2)
    talk.saved(0)
    assert talk.committed(0) == "[committed] Thaw:0,1,2 [thawed]"
    assert talk.machine.stage == "training"


def test_a_flap_that_leaves_no_common_version_is_thawed_too() -> None:
    talk = Talk(grid(2, 1))
    talk.lost(0)
    talk.back(0)
    talk.frozen(0, 8)
    assert talk.frozen(1, 7) == "[answer] [waits]"
    assert talk.after(1.9) == ""  # rank 1 may still come to the gate with the gradient of 8
    assert talk.after(0.1) == "Thaw:0,1 [thawed]"


def test_a_lost_rank_that_comes_back_too_late_is_fenced() -> None:
    talk = Talk()
    talk.lost(0)
    frozen_at_7(talk, 1, 2)
    talk.after(1)
    assert talk.back(0) == "Refused(fenced):0 [refused]"
    assert "rank 0 was given up (its stream did not come back within 1 s)" in talk.orders(m.Refused)[0].text


def test_a_newer_version_that_comes_back_within_the_grace_is_saved() -> None:
    talk = Talk()
    talk.fault(2)
    talk.lost(0)
    talk.frozen(1, 7)
    assert talk.frozen(2, 7) == "[answer] [plan] Save:1"
    talk.back(0)
    assert talk.frozen(0, 8) == "[answer] [plan] Save:0"


def test_a_device_that_was_only_slow_is_saved_at_its_newer_version() -> None:
    """It seemed to hang; while it is saved it goes on. The save that fails of it counts nobody out."""
    talk = Talk()
    talk.lost(2)
    talk.frozen(0, 7)
    assert "Save:0" in talk.frozen(1, 7)
    assert talk.frozen(0, 8) == "[answer] [plan] Save:0"
    assert talk.save_failed(0, 0, may_pass=True) == ""
    assert "Commit" in talk.saved(0, 1)


def test_devices_that_were_only_slow_may_go_on_one_after_the_other() -> None:
    """Between the two no version is whole: the first one is not counted out for that."""
    talk = Talk(grid(2, 2))
    for rank in (2, 3):
        talk.lost(rank)
    talk.after(1)
    talk.frozen(0, 7)
    assert "Save:0,1" in talk.frozen(1, 7)
    assert talk.frozen(0, 8) == "[answer]"
    talk.save_failed(0, 0, may_pass=True)
    talk.frozen(1, 8)
    talk.save_failed(1, 0, may_pass=True)
    for _ in range(100):
        if "Save:0,1" in talk.after(0.1):
            break
    assert talk.orders(m.Save)[0].version == 8


def test_an_answer_that_was_outrun_by_a_newer_one_changes_nothing() -> None:
    """The version that rank 0 was told to make is not taken back by what it said before."""
    talk = Talk(grid(1, 3))
    talk.lost(2)
    talk.frozen(1, 8)
    assert "Save:1" in talk.frozen(0, 7, has_gradient=True)
    assert "[plan] Save:0" in talk.save_failed(1)
    assert talk.frozen(0, 8) == "[answer]"
    assert talk.frozen(0, 7, has_gradient=True) == ""
    talk.lost(1)
    assert talk.saved(0, 1) == "[saved] [commit] Commit:0"


def test_who_has_a_pre_image_may_go_back_and_so_may_who_turns_out_to_be_torn() -> None:
    for preimage, later in ((True, m.Phase.IDLE), (False, m.Phase.TORN)):
        talk = Talk(grid(1, 3))
        talk.lost(2)
        talk.frozen(0, 8, has_preimage=preimage)
        assert talk.frozen(0, 7, later) == "[answer]"


def test_a_saver_whose_gate_was_open_meanwhile_is_asked_again() -> None:
    talk = Talk(grid(1, 1))
    talk.ask()
    assert talk.frozen(0, 7) == "[answer] [plan] Save:0"
    talk.lost(0)  # a snapshot is thawed by the processor itself
    assert talk.back(0, incident="") == "Welcome:0 [reconnected] [retracted] Freeze:0"
    assert talk.saved(0) == ""
    assert talk.frozen(0, 8) == "[answer] [plan] Save:0"
    assert talk.orders(m.Save)[0].generation == 1


def test_nor_is_it_trusted_when_its_new_stream_is_faster_than_the_end_of_the_old_one() -> None:
    talk = Talk(grid(1, 1))
    talk.ask()
    assert talk.frozen(0, 7) == "[answer] [plan] Save:0"
    assert talk.back(0, incident="") == "Welcome:0 [reconnected] Freeze:0 [replan]"
    assert talk.saved(0) == ""
    assert talk.frozen(0, 7) == "[answer] [plan] Save:0"
    assert talk.orders(m.Save)[0].generation == 1  # what it wrote before may be half a file


def test_who_stayed_frozen_goes_on_saving_on_its_new_stream() -> None:
    talk = Talk(grid(1, 1))
    talk.ask()
    talk.frozen(0, 7)
    assert talk.back(0, incident="i1") == "Welcome:0 [reconnected] Freeze:0 Save:0"
    talk.frozen(0, 7)
    assert talk.saved(0) == "[saved] [commit] Commit:0"


def test_an_exception_is_no_false_alarm_even_if_its_stream_comes_back() -> None:
    talk = Talk()
    talk.fault(0)
    talk.lost(0)
    talk.back(0, broken="exception of 0", incident="i1")
    talk.frozen(0, 7)
    frozen_at_7(talk, 1, 2)
    talk.saved(1)
    assert talk.committed(1) == "[committed] [released] Release(75):0,1,2"


@pytest.mark.parametrize("kind", [m.FaultKind.COLLECTIVE, m.FaultKind.EXCEPTION])
def test_a_rank_that_raises_and_dies_is_one_fault(kind: m.FaultKind) -> None:
    talk = Talk()
    assert talk.fault(0, kind) == "[opened] Freeze:0,1,2 [evidence]"
    assert talk.lost(0) == "[evidence]"
    frozen_at_7(talk, 1, 2)
    talk.saved(1)
    talk.committed(1)
    assert talk.after(1) == "[released] Release(75):1,2"


def test_the_launcher_ends_the_doubt_about_a_lost_rank() -> None:
    talk = Talk()
    talk.lost(0)
    frozen_at_7(talk, 1, 2)
    talk.saved(1)
    talk.committed(1)
    assert talk.accuse(0, m.FaultKind.EXITED, pid=100) == "[evidence] [released] Release(75):1,2"


def test_who_is_called_dead_and_is_not_is_told() -> None:
    talk = Talk()
    assert talk.accuse(0, m.FaultKind.EXITED).startswith("Refused(fenced):0 [opened] Freeze:1,2 [evidence]")


def test_an_accusation_of_an_earlier_process_is_ignored() -> None:
    talk = Talk()
    assert talk.accuse(0, m.FaultKind.EXITED, pid=99) == ""
    assert talk.accuse(0, m.FaultKind.OUTSIDE, pid=100) == "[opened] Freeze:0,1,2 [evidence]"


def test_evidence_about_an_earlier_process_is_ignored() -> None:
    talk = Talk()
    witness = m.Fault(Rank(1), Rank(0), m.FaultKind.LOST, "owner died", nonce="older")
    assert talk.report(1, witness) == ""
    assert talk.report(1, replace(witness, nonce="n0")) == "[opened] Freeze:0,1,2 [evidence]"


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_checkpoint_on_request() -> None:
    talk = Talk()
    assert talk.ask() == "[opened] Freeze:0,1,2 [evidence]"
    assert all(order.snapshot for order in talk.orders(m.Freeze))
    frozen_at_7(talk, 0, 1, 2)
    talk.saved(0)
    assert talk.committed(0) == "[committed] Thaw:0,1,2 [thawed] answer: saved"
    assert talk.ask(2) == "[opened] Freeze:0,1,2 [evidence]"
    assert frozen_at_7(talk, 0, 1, 2) == "[answer] [nothing_new] Thaw:0,1,2 [thawed] answer: saved"


def test_a_checkpoint_on_request_between_two_steps_of_one_version() -> None:
    talk = Talk()
    talk.ask()
    for rank in (0, 1, 2):
        said = talk.frozen(rank, 7, m.Phase.TORN, has_preimage=True)
    assert said == "[answer] [plan] Save:0"
    assert [order.order.how for order in talk.orders(m.Save)] == [How.UNDO]
    talk.saved(0)
    assert talk.committed(0) == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_request_before_the_job_trains_is_answered_at_once() -> None:
    assert Talk(formed=False).ask() == "answer: not saved"


def test_a_snapshot_that_fails_hurts_nobody() -> None:
    talk = Talk()
    talk.ask()
    frozen_at_7(talk, 0, 1, 2)
    talk.save_failed(0)
    talk.save_failed(1, generation=1)
    assert talk.save_failed(2, generation=2) == "[save_failed] [replan] Thaw:0,1,2 [thawed] answer: not saved"


def test_a_rank_that_is_slow_to_answer_a_snapshot_is_not_broken() -> None:
    talk = Talk()
    talk.ask()
    talk.frozen(0, 7)
    talk.frozen(1, 7)
    assert talk.after(5) == "[evidence] [plan] Save:0"
    talk.saved(0)
    assert talk.committed(0) == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_fault_during_a_snapshot_makes_it_a_rescue() -> None:
    talk = Talk()
    talk.ask()
    assert talk.lost(2) == "Freeze:0,1 [evidence]"
    assert not any(order.snapshot for order in talk.orders(m.Freeze))
    frozen_at_7(talk, 0, 1)
    talk.saved(0)
    talk.committed(0)
    assert talk.after(1) == "[released] answer: saved Release(75):0,1"


# ------------------------------------------------------------------------------------------------------------- takeover


def test_a_takeover_in_the_steady_state_changes_nothing() -> None:
    talk = Talk(formed=False)
    for rank in range(3):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7)
    assert (talk.machine.term, talk.machine.job.incarnation, talk.machine.stage) == (2, 2, "training")
    assert talk.lost(0).startswith("[opened] Freeze:1,2")


def test_a_dead_rank_that_never_says_hello_again_is_missed() -> None:
    talk = Talk(formed=False)
    for rank in (0, 1):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7)
    assert talk.after(4) == ""
    assert talk.after(1) == "[opened] Freeze:0,1 [evidence]"
    assert talk.facts("evidence")["text"] == "rank 2 did not come back to the new controller"


def test_a_job_that_never_trained_is_still_waited_for() -> None:
    talk = Talk(formed=False)
    for rank in (0, 1):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1)
    assert talk.after(5) == ""
    assert talk.after(5) == ""
    assert talk.hello(2) == "Welcome:2 [joined] [formed]"


def test_nothing_is_decided_while_ranks_are_coming_back() -> None:
    talk = Talk(formed=False)
    talk.hello(0, incarnation=2, resume=True, term_seen=1, version=7)
    talk.fault(0, m.FaultKind.COLLECTIVE)
    assert talk.frozen(0, 7) == "[answer]"
    talk.hello(1, incarnation=2, resume=True, term_seen=1, version=8)
    assert talk.frozen(1, 8) == "[answer]"
    assert talk.after(5) == "[evidence] [plan] Save:0,1"[:0] + talk_plan(talk)
    assert talk.facts("plan")["version"] == 8


def talk_plan(talk: Talk) -> str:
    assert talk.orders(m.Save)
    return "[evidence] [plan] Save:1"


def test_an_incident_is_taken_over_and_thawed_when_nothing_is_broken() -> None:
    talk = Talk(formed=False)
    assert "[opened] Freeze:0" in talk.hello(0, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
    talk.frozen(0, 7)
    talk.hello(1, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
    assert talk.hello(2, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1").endswith(
        "Thaw:0,1,2 [thawed]"
    )


def test_an_incident_is_taken_over_and_finished_when_somebody_is_broken() -> None:
    talk = Talk(formed=False)
    for rank in (0, 1):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
        talk.frozen(rank, 7)
    assert talk.after(5) == "[evidence] [plan] Save:0"
    save = talk.orders(m.Save)[0]
    assert (save.incident, save.term, save.generation) == ("old-1", 2, 1 << 16)  # no file name is used twice


def test_a_rank_that_missed_the_thaw_is_thawed() -> None:
    talk = Talk()
    talk.ask()
    frozen_at_7(talk, 0, 1, 2)
    talk.saved(0)
    talk.committed(0)
    assert talk.back(1, incident="i1") == "Welcome:1 [reconnected] Thaw:1"


def test_a_rank_that_is_frozen_for_nothing_is_thawed() -> None:
    talk = Talk()
    assert talk.report(0, m.Frozen(Rank(0), "gone", Version(7), m.Phase.IDLE, True)) == "Thaw:0"


def test_a_rank_that_missed_the_release_is_released() -> None:
    talk = Talk()
    talk.fault(0)
    frozen_at_7(talk, 0, 1, 2)
    talk.saved(1)
    talk.committed(1)
    assert talk.machine.stage == "released"
    for rank in range(3):
        talk.lost(rank)
    assert talk.back(2, incident="i1").endswith("Release(75):2")


# ------------------------------------------------------------------------------------------------------------ restoring


def view(rank: int, *found: tuple[int, str]) -> m.RestoreView:
    candidates = tuple(m.Candidate(Version(v), digest, f"step_{v}") for v, digest in found)
    return m.RestoreView(Rank(rank), candidates, ())


def test_all_ranks_restore_what_all_have_found() -> None:
    talk = Talk()
    talk.report(0, view(0, (9, "a"), (7, "b")))
    talk.report(1, view(1, (7, "b")))
    assert talk.report(2, view(2, (9, "a"), (7, "b"))) == "[restore] RestoreDecision:0,1,2"
    assert talk.orders(m.RestoreDecision)[0].version == 7
    assert talk.machine.base_version == 7
    assert talk.report(1, view(1, (7, "b"))) == "RestoreDecision:1"  # it did not hear


def test_what_nobody_has_read_is_decided_once_more_when_everybody_has() -> None:
    """Rank 1 does not hear the first decision: it says once more what it said before."""
    talk = Talk(grid(1, 2))

    def read(rank: int, index: int, count: int) -> m.RestoreView:
        return replace(view(rank, (9, "a")), readings=(m.Reading("copy", index, count),))

    talk.report(0, read(0, 0, 3))
    assert talk.report(1, read(1, 1, 3)) == "RestoreDecision:0,1"
    assert all(order.unread for order in talk.orders(m.RestoreDecision))
    assert talk.machine.base_version == 0
    assert talk.report(1, read(1, 1, 3)) == ""
    assert talk.report(0, read(0, 0, 1)) == "[restore] RestoreDecision:1,0", "rank 0 has read what rank 1 did not"
    assert not any(order.unread for order in talk.orders(m.RestoreDecision))
    assert talk.machine.base_version == 9


def test_what_a_rank_found_is_forgotten_with_it_while_the_job_forms() -> None:
    """Its successor may find more: the first process is of a launch that was saved under another controller."""
    talk = Talk(formed=False)
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
    talk = Talk(formed=False)
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
    assert talk.orders(m.RestoreDecision)[0].version == 9


def test_what_was_found_by_a_process_that_was_replaced_does_not_count() -> None:
    talk = Talk(formed=False)
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
    talk.report(0, view(0, (9, "aaaa")))
    talk.report(1, view(1))
    assert talk.orders(m.RestoreDecision)[0].error == (
        "the ranks do not see one common checkpoint: rank 0 found step 9 (aaaa); rank 1 found nothing whole. "
        "Is save_dir shared by all hosts?"
    )


def test_nothing_found_is_a_fresh_start() -> None:
    talk = Talk(grid(1, 2))
    talk.report(0, view(0))
    talk.report(1, view(1))
    assert (talk.orders(m.RestoreDecision)[0].version, talk.orders(m.RestoreDecision)[0].error) == (0, "")


def restarted(save_dir: str = "/save", again: str = "/save") -> Talk:
    """Version 7 was committed by an incarnation of this job; the next one has formed."""
    talk = Talk(grid(1, 2), formed=False)
    for rank in range(2):
        talk.hello(rank, save_dir=save_dir)
    talk.accuse(1, m.FaultKind.EXITED)
    talk.frozen(0, 7)
    talk.saved(0)
    talk.committed(0)
    talk.lost(0)
    restart(talk, 1, again)
    return talk


def restart(talk: Talk, launch: int, save_dir: str = "/save") -> None:
    for rank in range(2):
        talk.streams[rank] += 10
        talk.hello(rank, launch=launch, nonce=f"n{rank}.{launch}", save_dir=save_dir)
    assert talk.machine.stage == "training" and talk.machine.job.incarnation == launch + 1


def test_what_was_committed_may_not_vanish() -> None:
    """An unmounted directory looks like an empty one."""
    talk = restarted()
    talk.report(0, view(0, (5, "b")))
    talk.report(1, view(1, (5, "b")))
    decision = talk.orders(m.RestoreDecision)[0]
    assert decision.version == 7 and "step 7 was committed as /save/step, and the newest that all" in decision.error
    assert talk.machine.base_version == 0


def test_it_is_not_forgotten_by_an_incarnation_that_saves_nothing() -> None:
    talk = restarted()
    talk.accuse(0, m.FaultKind.EXITED)
    talk.frozen(1, 0)
    talk.lost(1)
    restart(talk, 2)
    talk.report(0, view(0))
    talk.report(1, view(1))
    assert "the ranks find no checkpoint at all" in talk.orders(m.RestoreDecision)[0].error


def test_what_is_there_but_damaged_has_not_vanished() -> None:
    talk = restarted()
    talk.report(0, view(0, (5, "b")))
    talk.report(1, replace(view(1, (5, "b")), skipped=("/save/step: its digest is wrong",)))
    assert (talk.orders(m.RestoreDecision)[0].version, talk.orders(m.RestoreDecision)[0].error) == (5, "")


def test_what_one_rank_has_seen_has_not_vanished() -> None:
    talk = restarted()
    talk.report(0, view(0, (7, "a"), (5, "b")))
    talk.report(1, view(1, (5, "b")))
    assert (talk.orders(m.RestoreDecision)[0].version, talk.orders(m.RestoreDecision)[0].error) == (5, "")


def test_another_directory_is_another_job() -> None:
    talk = restarted(again="/other")
    talk.report(0, view(0))
    talk.report(1, view(1))
    assert talk.orders(m.RestoreDecision)[0].error == ""


# ------------------------------------------------------------------------------------------------------------------ end


def test_the_job_is_over_when_every_rank_has_left_its_loop() -> None:
    talk = Talk()
    assert talk.goodbye(0) == "[done]"
    assert talk.goodbye(2) == "[done]"
    assert talk.goodbye(1) == "[done] Finished:0,1,2 [finished]"
    assert talk.lost(0) == ""
    assert talk.back(1, phase=m.Phase.DONE) == "Welcome:1 [reconnected] Finished:1"  # it did not hear
    assert talk.after(2) == "[stopped] stop"


def test_the_controller_ends_with_the_last_stream() -> None:
    talk = Talk(grid(1, 1))
    talk.goodbye(0)
    assert talk.lost(0) == "[stopped] stop"


def test_a_rank_that_is_done_and_dies_while_others_finish_is_a_fault() -> None:
    talk = Talk()
    talk.goodbye(0)
    assert talk.lost(0) == LOST
    frozen_at_7(talk, 1, 2)
    talk.saved(1)
    talk.committed(1)
    assert talk.after(1) == "[released] Release(75):1,2"


def test_a_rank_that_is_done_can_save() -> None:
    talk = Talk()
    talk.goodbye(0, version=8)
    talk.lost(1)
    talk.frozen(0, 8, m.Phase.DONE)
    assert talk.frozen(2, 7) == "[answer] [plan] Save:0"


def test_who_leaves_on_purpose_is_no_fault() -> None:
    talk = Talk()
    assert talk.goodbye(0, m.GoodbyeReason.LEFT) == "[left]"
    assert talk.lost(0) == ""


def test_nobody_speaks_to_the_controller_any_more() -> None:
    talk = Talk(formed=False)
    assert talk.machine.deadline() == 120
    assert talk.after(119) == ""
    assert talk.after(1) == "[stopped] stop"
    assert talk.machine.deadline() is None


def test_all_ranks_die_at_once() -> None:
    talk = Talk()
    for rank in range(3):
        talk.lost(rank)
    assert talk.after(1) == "[released] [closed]"
    assert talk.after(120) == "[stopped] stop"


# ----------------------------------------------------------------------------------------------------------------- cost


def test_a_thousand_ranks_cost_constant_time_per_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts decisions, not seconds: one for a thousand ranks may not happen after every answer."""
    decided: list[int] = []

    def counted(layout: Layout, said: Iterable[Answer], *more: Any) -> Plan | NoPlan:
        decided.append(1)
        return decide(layout, said, *more)

    monkeypatch.setattr(planning, "decide", counted)
    talk = Talk(grid(10, 100))
    talk.lost(0)
    for rank in range(1, 1000):
        talk.frozen(rank, 8 if rank < 500 and rank % 10 else 7)
    assert talk.machine.stage == "saving"
    assert len(decided) <= 2


def calls_of_a_burst(ranks: int) -> int:
    """Every stream breaks and comes back, all is saved; how many calls the machine makes for that."""
    talk = Talk(Layout(ranks, grid(1, ranks).groups))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for rank in range(ranks):
            talk.lost(rank)
        for rank in range(ranks):
            talk.back(rank)
        talk.fault(0)
        for rank in range(ranks):
            talk.frozen(rank, 7)
        talk.saved(1)
        talk.committed(1)
    finally:
        sys.setprofile(before)
    assert talk.machine.stage == "released"
    return calls


def test_a_burst_of_returning_ranks_costs_each_of_them_the_same() -> None:
    """What is asked after every event may not look at all that are lost, accused or writing."""
    assert calls_of_a_burst(400) < 2.2 * calls_of_a_burst(200)
