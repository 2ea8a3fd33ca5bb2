"""Evidence that turns out to be false: streams that come back; and checkpoints on request, which are no faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import Talk, all_at_7
from ttp.core import messages as m
from ttp.core.controller.events import Tick
from ttp.core.decide import How
from ttp.core.layout import Rank
from ttp.testing.scenario import grid

# --------------------------------------------------------------------------------------------------------- false alarms


BACK = "Welcome:0 [reconnected] [retracted] Freeze:0"


@pytest.mark.parametrize("saves", [False, True])
def test_a_flap_within_the_grace_is_thawed_before_anything_is_saved(saves: bool) -> None:
    """A save may take minutes, and nobody needs it."""
    talk = Talk()
    talk.lost(0)
    if saves:
        assert "Save:1" in talk.frozen_all(7, 1, 2)
    assert talk.back(0) == f"{BACK} Thaw:0,1,2 [thawed]"
    assert talk.machine.stage == "training"
    assert talk.saved(1) == "", "it was written before the thaw was known"
    assert talk.frozen_all(7, 0) == "Thaw:0", "it was frozen only after the thaw"


def test_nothing_follows_from_what_is_said_of_a_rank_that_does_not_exist() -> None:
    talk = Talk()
    for kind in m.FaultKind:
        assert talk.report(0, m.Fault(Rank(0), Rank(7), kind, "it seems so", nonce="n7")) == ""
    assert talk.machine.stage == "training"


def test_a_flap_is_thawed_after_a_commit_that_may_exist() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    assert talk.saved(1) == "[saved] [commit] Commit:1"
    assert talk.back(0) == BACK
    assert talk.committed(1) == "[committed] Thaw:0,1,2 [thawed]"


def test_a_flap_of_one_is_not_thawed_while_another_is_lost() -> None:
    talk = Talk()
    talk.lost(0)
    talk.lost(1)
    assert talk.back(0) == BACK
    assert talk.after(1) == ""
    assert "Save:0" in talk.frozen_all(7, 0, 2)


def test_a_flap_during_a_redo_is_thawed_after_it() -> None:
    """The update goes on behind the gate: a thaw would open the gate in the middle of it."""
    talk = Talk(grid(2, 2))
    talk.lost(0)
    talk.frozen(1, 8)
    talk.frozen(3, 8)
    assert "Save:1,2" in talk.frozen(2, 7, has_gradient=True)
    assert talk.back(0) == BACK
    assert talk.frozen(2, 8) == "[answer] Thaw:0,1,2,3 [thawed]"


def test_a_flap_while_a_checkpoint_is_wanted_is_thawed_after_it() -> None:
    talk = Talk()
    talk.lost(0)
    talk.ask()
    assert talk.back(0) == BACK
    talk.frozen_all(7, 0, 1, 2)
    assert talk.write() == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_flap_that_leaves_no_common_version_is_thawed_too() -> None:
    talk = Talk(grid(2, 1))
    talk.lost(0)
    talk.ask()
    talk.back(0)
    talk.frozen(0, 8)
    assert talk.frozen(1, 7) == "[answer] [waits]"
    assert talk.after(1.9) == ""  # rank 1 may still come to the gate with the gradient of 8
    assert talk.after(0.1) == "Thaw:0,1 [thawed] answer: not saved"


def test_a_lost_rank_that_comes_back_too_late_is_fenced() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    talk.after(1)
    assert talk.back(0) == "Refused(fenced):0 [refused]"
    assert "rank 0 was given up (its stream did not come back within 1 s)" in talk.orders(m.Refused)[0].text


def test_a_lost_rank_has_its_grace_after_the_controller_was_stopped() -> None:
    """When the controller runs again its timers are due, and the rank's hello waits unread."""
    talk = Talk()
    talk.lost(0)
    talk.frozen_all(7, 1, 2)
    talk.now += 5
    assert talk.event(Tick()) == ""
    assert talk.back(0) == f"{BACK} Thaw:0,1,2 [thawed]"


def test_a_newer_version_that_comes_back_within_the_grace_is_saved() -> None:
    talk = Talk()
    talk.fault(2)
    talk.lost(0)
    talk.frozen(1, 7)
    assert talk.frozen(2, 7) == "[answer] [plan] Save:1"
    talk.back(0)
    assert talk.frozen(0, 8) == "[answer] [plan] Save:0"


def test_a_device_that_was_only_slow_is_saved_at_its_newer_version() -> None:
    """A device that seemed to hang goes on during the save. The save fails, but its rank is not excluded."""
    talk = Talk()
    talk.lost(2)
    talk.frozen(0, 7)
    assert "Save:0" in talk.frozen(1, 7)
    assert talk.frozen(0, 8) == "[answer] [plan] Save:0"
    assert talk.save_failed(0, 0, may_pass=True) == ""
    assert "Commit" in talk.saved(0, 1)


def test_devices_that_were_only_slow_may_go_on_one_after_the_other() -> None:
    """Between the two no version is whole, but the first rank is not excluded for that."""
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
    """An older answer of rank 0 does not take back the version that it was told to make."""
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
    talk.frozen_all(7, 1, 2)
    assert talk.write() == "[committed] [released] Release(75):0,1,2"


@pytest.mark.parametrize("kind", [m.FaultKind.COLLECTIVE, m.FaultKind.EXCEPTION])
def test_a_rank_that_raises_and_dies_is_one_fault(kind: m.FaultKind) -> None:
    talk = Talk()
    assert talk.fault(0, kind) == "[opened] Freeze:0,1,2 [evidence]"
    assert talk.lost(0) == "[evidence]"
    talk.frozen_all(7, 1, 2)
    talk.write()
    assert talk.after(1) == "[released] Release(75):1,2"


def test_if_all_streams_break_the_ranks_have_longer_to_come_back() -> None:
    """A name service, or a firewall that has forgotten their connections, takes longer than the usual grace."""
    talk = Talk()
    for rank in range(3):
        talk.lost(rank)
    assert talk.after(5) == ""
    for rank in range(3):
        said = talk.back(rank)
        assert "Refused" not in said
    assert said.endswith("Thaw:0,1,2 [thawed]")


def test_the_launcher_ends_the_doubt_about_a_lost_rank() -> None:
    talk = all_at_7(lambda talk: talk.lost(0), 1, 2)
    talk.write()
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
    left = Talk()
    left.goodbye(0, m.GoodbyeReason.LEFT)
    assert left.report(1, replace(witness, kind=m.FaultKind.EXITED, nonce="n0")) == "", "nor about one that has left"


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_checkpoint_on_request() -> None:
    talk = Talk()
    assert talk.ask() == "[opened] Freeze:0,1,2 [evidence]"
    assert all(order.snapshot for order in talk.orders(m.Freeze))
    talk.frozen_all(7, 0, 1, 2)
    assert talk.write() == "[committed] Thaw:0,1,2 [thawed] answer: saved"
    assert talk.ask(2) == "[opened] Freeze:0,1,2 [evidence]"
    assert talk.frozen_all(7, 0, 1, 2) == "[answer] [nothing_new] Thaw:0,1,2 [thawed] answer: saved"


def test_a_checkpoint_on_request_between_two_steps_of_one_version() -> None:
    talk = Talk()
    talk.ask()
    for rank in (0, 1, 2):
        said = talk.frozen(rank, 7, m.Phase.TORN, has_preimage=True)
    assert said == "[answer] [plan] Save:0"
    assert [order.order.how for order in talk.orders(m.Save)] == [How.UNDO]
    assert talk.write() == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_request_before_the_job_trains_is_answered_at_once() -> None:
    assert Talk(joined=0).ask() == "answer: not saved"


def test_a_snapshot_that_fails_hurts_nobody() -> None:
    talk = all_at_7(Talk.ask, 0, 1, 2)
    talk.save_failed(0)
    talk.save_failed(1, generation=1)
    assert talk.save_failed(2, generation=2) == "[save_failed] [replan] Thaw:0,1,2 [thawed] answer: not saved"


def test_a_rank_that_is_slow_to_answer_a_snapshot_is_not_broken() -> None:
    talk = Talk()
    talk.ask()
    talk.frozen(0, 7)
    talk.frozen(1, 7)
    assert talk.after(5) == "[evidence] [plan] Save:0"
    assert talk.write() == "[committed] Thaw:0,1,2 [thawed] answer: saved"


def test_a_fault_late_in_a_snapshot_has_the_time_of_a_rescue() -> None:
    talk = all_at_7(Talk.ask, 0, 1, 2)
    assert talk.after(350) == "", "the storage is slow"
    assert talk.lost(2) == "Freeze:0,1 [evidence]"
    assert talk.after(300) == ""
    talk.write()
    assert talk.facts("committed")["after_ms"] == 650_000
    assert talk.facts("released")["exit_code"] == 75
    silent = Talk()
    silent.ask()
    silent.after(350)
    silent.lost(2)
    assert "Release(70):0,1" in silent.after(360)


def test_a_fault_during_a_snapshot_makes_it_a_rescue() -> None:
    talk = Talk()
    talk.ask()
    assert talk.lost(2) == "Freeze:0,1 [evidence]"
    assert not any(order.snapshot for order in talk.orders(m.Freeze))
    talk.frozen_all(7, 0, 1)
    talk.write()
    assert talk.after(1) == "[released] answer: saved Release(75):0,1"


@pytest.mark.parametrize("what", ["time", "ranks"])
def test_what_was_saved_before_newer_ranks_came_is_saved(what: str) -> None:
    """They come back with a version that cannot be saved any more."""
    talk = Talk(grid(2, 2))  # s0: 0 and 2, s1: 1 and 3
    talk.fault(0)
    talk.lost(2)
    talk.lost(3)
    talk.frozen(0, 7)
    talk.frozen(1, 7)
    assert talk.write() == "[committed]"
    for rank in (2, 3):
        talk.back(rank, incident=talk.id, version=8)
    talk.frozen(2, 8)
    assert "[plan] Save:2,3" in talk.frozen(3, 8)
    for rank in (0, 1, 2) if what == "ranks" else ():
        said = talk.accuse(rank, m.FaultKind.EXITED)
    if what == "time":
        said = talk.after(360)
    assert "Release(75)" in said
    assert talk.orders(m.Release)[0].text.startswith("saved version 7, but none of the newer ones: ")


def overtaken(**more: Any) -> Talk:
    """Rank 1 has written version 7, and rank 2 is to write version 8; rank 3 can only commit."""
    talk = Talk(grid(1, 4), **more)
    talk.lost(0)
    talk.frozen(3, 7, m.Phase.TORN)
    talk.frozen(1, 7)
    while "Save:1" not in talk.after(1):
        pass
    assert talk.saved(1) == "[saved] [commit] Commit:1"
    assert talk.frozen(2, 8) == "[retracted] [answer] [plan] Save:2"
    return talk


@pytest.mark.parametrize("order", ["at once", "one by one", "after the fallback"])
def test_pieces_that_are_durable_count_again_when_the_newer_version_is_lost(order: str) -> None:
    talk = overtaken(fallback_dir="/fallback")
    if order == "one by one":
        assert "Save:1" in talk.lost(2), "a living rank writes version 7 anew"
    talk.lost(1)
    if order == "after the fallback":
        talk.after(2)
        assert "[fallback] [plan] Save:2" in talk.save_failed(2, 1)
    talk.lost(2)
    while "Commit:3" not in talk.after(0.5):
        assert talk.machine.stage != "released"
    (commit,) = talk.orders(m.Commit)
    assert (commit.version, commit.directory, len(commit.pieces)) == (7, "", 1)


@pytest.mark.parametrize("refused", ["save", "commit", "for good"])
def test_a_newer_version_that_the_storage_refuses_is_tried_again_before_the_older_one_is_saved(refused: str) -> None:
    talk = overtaken(fallback_dir="/fallback" if refused == "for good" else "")
    talk.lost(1)
    talk.after(2)
    if refused == "commit":
        talk.saved(2, 1)
        talk.commit_failed(2, 1, may_pass=True)
        said = talk.commit_failed(3, 1, may_pass=True)
    else:
        said = talk.save_failed(2, 1, may_pass=refused == "save")
    if refused != "for good":
        said = talk.after(0.2)
    kind = m.Commit if refused == "commit" else m.Save
    assert [order.version for order in talk.orders(kind)] == [8], said
