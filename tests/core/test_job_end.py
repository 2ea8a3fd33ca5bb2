"""The end of a job and of its controller."""

from __future__ import annotations

import pytest

from tests.core.talk import LOST, Talk
from ttp.core import messages as m
from ttp.core.controller.events import LauncherSaid
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid


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
    talk.frozen_all(7, 1, 2)
    talk.write()
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


def test_who_left_on_purpose_is_the_cause_when_a_collective_of_the_others_fails() -> None:
    """The others see only that a peer is gone; a rank that waits for the end of the others is no cause."""
    talk = Talk()
    talk.goodbye(2)
    talk.goodbye(0, m.GoodbyeReason.LEFT)
    talk.lost(0)
    assert talk.fault(1, m.FaultKind.COLLECTIVE) == "[opened] Freeze:1,2 [evidence] [evidence]"
    left = "left train() at version 9 while others trained (by sys.exit(0), Ctrl-C or the end of its program)"
    assert talk.incident.cause == f"{talk.machine.job.members[Rank(0)].name} {left}"
    assert [order.cause for order in talk.orders(m.Freeze)] == [talk.incident.cause] * 2


def test_who_left_long_ago_is_not_the_cause_when_a_collective_of_the_others_fails() -> None:
    """They have trained on without it, so they wait for another rank, which the first of them to fail cannot name."""
    talk = Talk()
    talk.goodbye(0, m.GoodbyeReason.LEFT)
    talk.report(1, m.Heartbeat(Rank(1), Version(11), m.Phase.IDLE))
    talk.fault(1, m.FaultKind.COLLECTIVE)
    talk.accuse(2, m.FaultKind.EXITED)
    assert talk.incident.cause == f"{talk.machine.job.members[Rank(2)].name}: seen from outside"


def test_a_job_that_ctrl_c_ends_has_not_trained_to_its_end() -> None:
    talk = Talk(grid(1, 2))
    talk.goodbye(1)
    assert talk.goodbye(0, m.GoodbyeReason.INTERRUPTED) == "[interrupted] Finished:0,1 [finished]"
    end = talk.machine.verdict
    assert (end.code, end.text) == (70, "rank 0 was interrupted (Ctrl-C): nothing was saved")
    assert talk.lost(0) == "", "its stream ends without a fault"


@pytest.mark.parametrize(
    ("newest", "told"),
    [
        (6, "no finished step is lost, version 6 is on disk already"),
        (7, "nothing was saved after version 6, which is on disk"),
    ],
)
def test_a_job_that_ctrl_c_ends_is_told_what_is_on_disk(newest: int, told: str) -> None:
    talk = Talk(grid(1, 2))
    talk.machine.rescue.committing.restored(Version(6))
    for rank in (0, 1):
        talk.goodbye(rank, m.GoodbyeReason.INTERRUPTED, version=newest)
    assert (talk.machine.verdict.code, talk.machine.verdict.text) == (70, f"rank 0 was interrupted (Ctrl-C): {told}")


def test_nobody_speaks_to_the_controller_any_more() -> None:
    talk = Talk(joined=0)
    assert talk.machine.deadline() == 120
    assert talk.after(119) == ""
    assert talk.after(1) == "[stopped] stop"
    assert talk.machine.deadline() is None


def test_all_ranks_die_at_once() -> None:
    talk = Talk()
    for rank in range(3):
        talk.lost(rank)
    assert talk.after(9) == "", "while no rank is connected nothing can be saved, and to end the job loses all steps"
    assert talk.after(1) == "[released] [closed]"
    assert talk.after(120) == "[stopped] stop"


def test_what_one_rank_knows_to_be_wrong_all_leave_with() -> None:
    """Also after another fault, and whether anything was saved or not."""
    talk = Talk()
    assert talk.fault(1, wrong=True) == "[wrong] [opened] Freeze:0,1,2 [evidence]"
    assert talk.event(LauncherSaid("h0", starts=False, code=64)) == "", "it is written down once"
    talk.frozen_all(7, 0, 1, 2)
    assert talk.write() == "[committed] [released] Release(64):0,1,2"
    (text,) = {order.text for order in talk.orders(m.Release)}
    assert "exception of 1" in text and "goes on with step 8" in text

    talk = Talk(grid(2, 1))
    talk.lost(0)
    talk.fault(1, wrong=True)
    talk.frozen(1, 7)
    assert talk.after(1) == "[released] Release(64):1"


def test_who_says_of_another_that_it_is_wrong_is_not_heard() -> None:
    talk = Talk()
    about = m.Fault(Rank(0), Rank(1), m.FaultKind.COLLECTIVE, "x", wrong=True)
    assert "[wrong]" not in talk.report(0, about)
