"""Single behaviours of a rank's machine, as transcripts: its stream, its training, its restore."""

from __future__ import annotations

import pytest

from tests.core.rank_talk import FROZEN, ME, Rank1
from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.restore_messages import RestoreDecision

# --------------------------------------------------------------------------------------------------------------- stream


def test_who_is_on_its_way_to_the_next_version_saves_none_before_it_is_there() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(7)
    redo = m.SaverOrder(ME, (Shard("s0"),), How.REDO, (ME,), True)
    assert "Redo" in rank.order(m.Save(ME, 1, "a", 0, Version(8), "draft", redo))
    assert rank.save(7, generation=1) == "CancelSave"
    assert rank.quiet(8) == ">Frozen >SaveFailed"
    assert rank.save(8, generation=2) == "StartSave"


def test_a_lost_controller_gets_no_more_than_its_respite() -> None:
    rank = Rank1(failover_s=0.5, connect_s=1.0, retry_min_s=0.05)
    rank.order(m.Standbys(ME, 1, ("h1:1", "h2:1")))
    rank.event(ev.StreamDown("gone"))
    tries: list[tuple[float, str, float | None]] = []
    while len(tries) < 3:
        rank.now = rank.machine.deadline() or 0.0
        for action in rank.machine.on_event(ev.Observed(Version(7), m.Phase.IDLE), rank.now):
            if isinstance(action, act.Connect):
                tries.append((round(rank.now, 3), action.address, action.within_s))
                rank.now += action.within_s or 0.0  # a host that is gone refuses nothing: time passes, no more
                rank.machine.on_event(ev.StreamDown("gone"), rank.now)
    assert tries == [(0.05, "", pytest.approx(0.95)), (1.05, "h1:1", 1.0), (2.1, "h2:1", 1.0)], "where all ranks go"


def test_a_rank_that_was_stopped_meanwhile_still_makes_an_attempt() -> None:
    rank = Rank1(failover_s=0.5, connect_s=1.0, retry_min_s=0.05)
    rank.order(m.Standbys(ME, 1, ("h1:1",)))
    rank.event(ev.StreamDown("gone"))
    assert rank.after(9) == "Connect" and [a.within_s for a in rank.did if isinstance(a, act.Connect)] == [0.05]


def test_joining() -> None:
    rank = Rank1(joined=False)
    assert rank.after(0) == "Connect"
    assert rank.event(ev.StreamUp()) == ">Hello"
    assert rank.sent(m.Hello).incarnation == 0
    assert rank.order(m.Welcome(ME, 3, 2, "1")) == "Joined"
    assert (rank.machine.term, rank.machine.incarnation) == (3, 2)


def test_nobody_listens() -> None:
    rank = Rank1(joined=False, retry_min_s=1.0, retry_max_s=2.0)
    assert rank.after(0) == "Connect"
    assert rank.event(ev.StreamDown("refused")) == ""
    assert rank.machine.deadline() == 1.0
    assert rank.after(1) == "Connect"
    rank.event(ev.StreamDown("refused"))
    assert rank.after(1) == ""
    assert rank.after(1) == "Connect(start)"


def test_a_hello_after_a_break_repeats_what_a_new_controller_must_know() -> None:
    rank = Rank1()
    rank.quiet(7)
    rank.freeze("a")
    rank.event(ev.Raised(m.FaultKind.EXCEPTION, "ValueError: x"))
    rank.event(ev.StreamDown("gone"))
    assert rank.event(ev.StreamUp()) == ">Hello"
    said = rank.sent(m.Hello)
    assert (said.incarnation, said.term_seen, said.incident, said.resume) == (1, 1, "a", True)
    assert (said.version, said.broken) == (7, "ValueError: x")


def test_nothing_is_said_before_the_welcome() -> None:
    rank = Rank1(joined=False)
    rank.event(ev.StreamUp())
    assert rank.event(ev.Raised(m.FaultKind.EXCEPTION, "x")) == ""
    assert rank.order(m.Welcome(ME, 1, 1, "1")) == "Joined >Fault"


def test_orders_before_the_welcome_are_left_over_from_the_last_stream() -> None:
    rank = Rank1()
    rank.event(ev.StreamDown("gone"))
    rank.event(ev.StreamUp())
    assert rank.freeze() == ""
    rank.order(m.Welcome(ME, 1, 1, "1"))
    assert rank.freeze() == FROZEN


def test_a_beat_once_a_second() -> None:
    rank = Rank1()
    assert rank.after(0.5) == ""
    assert rank.after(0.5) == ">Heartbeat"
    assert rank.machine.deadline() == 2.0
    assert rank.event(ev.Observed(Version(0), m.Phase.IDLE, activity="evaluates", urgent=True)) == ">Heartbeat"


@pytest.mark.parametrize("code", [c for c in m.RefusalCode if c not in (m.RefusalCode.BUSY, m.RefusalCode.MOVED)])
def test_refused_is_the_end(code: m.RefusalCode) -> None:
    rank = Rank1(joined=False)
    rank.event(ev.StreamUp())
    assert rank.order(m.Refused(ME, code, "why")) == "Rejected"
    assert rank.machine.gone
    assert rank.after(1000) == ""
    assert rank.machine.deadline() is None


def test_who_was_part_of_the_job_and_is_refused_leaves() -> None:
    rank = Rank1()
    assert rank.order(m.Refused(ME, m.RefusalCode.FENCED, "declared lost")).startswith("Exit")
    assert rank.machine.gone


def test_a_controller_that_was_replaced_and_does_not_know_it_is_not_followed() -> None:
    rank = Rank1()
    assert rank.comes_back(term=3).startswith("Joined")
    assert rank.comes_back(term=2) == ""
    assert rank.machine.term == 3
    assert rank.freeze(term=3) == "", "on this stream nobody has welcomed the rank"
    assert rank.comes_back(term=3).startswith("Joined") and FROZEN in rank.freeze(term=3)


def test_the_ring_is_written_down_when_it_changes() -> None:
    """Each time is a file of the host's disk, and the controller repeats the list to each rank that comes back."""
    rank = Rank1()
    for order in (m.Standbys(ME, 1, ("h1:1",)), m.Standbys(ME, 1, ("h1:1", "h2:1")), m.Standbys(ME, 2, ("h1:1",))):
        assert (rank.order(order), rank.order(order)) == ("NoteRing", "")
    assert "NoteRing" not in rank.comes_back(term=2)


def test_a_standby_whose_place_another_job_has_taken_is_passed_over() -> None:
    rank = Rank1(failover_s=0.0)
    rank.order(m.Standbys(ME, 1, ("10.0.0.1:9", "10.0.0.2:9")))
    asked = []
    for _ in range(2):
        rank.event(ev.StreamDown("gone"))
        rank.after(1.0)
        asked += [action.address for action in rank.did if isinstance(action, act.Connect)]
        rank.event(ev.StreamUp())
        assert rank.order(m.Refused(ME, m.RefusalCode.OTHER_JOB, "two jobs share TTP_PORT")) == ""
    assert asked == ["10.0.0.1:9", "10.0.0.2:9"]
    assert Rank1().order(m.Refused(ME, m.RefusalCode.OTHER_JOB, "why")).startswith("Exit"), "its own controller"


def test_busy_means_try_again() -> None:
    rank = Rank1(joined=False)
    rank.event(ev.StreamUp())
    assert rank.order(m.Refused(ME, m.RefusalCode.BUSY, "why")) == "Rejected"
    assert Rank1().order(m.Refused(ME, m.RefusalCode.BUSY, "why")) == "", "it has joined before, and need not be told"
    assert not rank.machine.gone
    rank.event(ev.StreamDown("ended"))
    assert rank.after(1) == "Connect"


# ------------------------------------------------------------------------------------------------------------- training


def test_a_broken_rank_waits_for_the_rescue() -> None:
    rank = Rank1()
    assert rank.event(ev.Raised(m.FaultKind.EXCEPTION, "ValueError: x")) == ">Fault"
    fault = rank.sent(m.Fault)
    assert (fault.subject, fault.kind, fault.nonce, fault.wrong) == (1, m.FaultKind.EXCEPTION, "n1", False)


def test_what_is_wrong_is_said_to_a_new_controller_too() -> None:
    rank = Rank1()
    rank.event(ev.Raised(m.FaultKind.EXCEPTION, "UsageError: x", wrong=True))
    assert rank.comes_back(2) == "Joined >Fault"
    assert rank.sent(m.Fault).wrong


def test_nobody_comes_to_the_rescue() -> None:
    rank = Rank1(alone_s=20, retry_min_s=1e6, retry_max_s=1e6)
    rank.event(ev.Raised(m.FaultKind.EXCEPTION, "x"))
    rank.event(ev.StreamDown("gone"))
    assert rank.after(19) == ""
    assert rank.after(1) == "LetGo(False)"
    assert rank.machine.gone


def test_a_healthy_rank_trains_on_without_a_controller() -> None:
    rank = Rank1(alone_s=20, retry_min_s=1e6, retry_max_s=1e6)
    rank.event(ev.StreamDown("gone"))
    assert rank.after(1000) == ""


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    rank = Rank1()
    assert rank.event(ev.Returned(m.GoodbyeReason.DONE)) == ">Goodbye"
    assert rank.freeze() == FROZEN
    rank.thaw()
    assert rank.order(m.Finished(ME, 1)) == "LetGo(True)"
    assert rank.machine.gone


def test_a_rank_that_is_done_says_so_to_a_new_controller() -> None:
    rank = Rank1()
    rank.event(ev.Returned(m.GoodbyeReason.DONE))
    rank.event(ev.StreamDown("gone"))
    rank.event(ev.StreamUp())
    assert rank.sent(m.Hello).phase is m.Phase.DONE
    assert rank.order(m.Welcome(ME, 2, 1, "1")) == "Joined >Goodbye"


def test_who_leaves_on_purpose_is_not_kept_waiting() -> None:
    rank = Rank1()
    assert rank.event(ev.Returned(m.GoodbyeReason.LEFT)) == ">Goodbye LetGo(True)"


# ------------------------------------------------------------------------------------------------------------ restoring


def test_restoring() -> None:
    rank = Rank1()
    assert rank.event(ev.RestoreWanted((), ())) == ">RestoreView"
    decision = RestoreDecision(ME, 1, Version(5), "step_5", "d", "")
    assert rank.order(decision) == "Decided"
    assert rank.order(decision) == ""
    assert rank.event(ev.Based(Version(5))) == ">Restored"


def test_a_view_is_repeated_until_the_training_has_begun() -> None:
    rank = Rank1()
    rank.event(ev.RestoreWanted((), ()))
    rank.order(RestoreDecision(ME, 1, Version(5), "step_5", "d", ""))
    rank.event(ev.Based(Version(5)))
    assert rank.comes_back(2) == "Joined >RestoreView >Restored"  # others may not have heard yet
    rank.event(ev.Observed(Version(6), m.Phase.IDLE))
    assert rank.comes_back(3) == "Joined"


def test_an_update_that_is_on_its_way_is_not_ordered_again() -> None:
    """The thread that the first order has let through is away from the gate: a second order would find nobody there."""
    rank = Rank1()
    rank.freeze()
    rank.quiet(7)
    rank.save(8, how=How.REDO)
    assert rank.save(8, 1, how=How.REDO) == "CancelSave"
    assert rank.save(7, 2) == "CancelSave"
    assert rank.save(8, 3, how=How.REDO) == "CancelSave"
    assert ">SaveFailed" in rank.after(40) and rank.save(8, 4, how=How.REDO) == "", "it may still be made"
    assert rank.quiet(7, m.Phase.UPDATING) == ""
    assert rank.quiet(8).startswith("StartSave")


def test_an_update_that_cannot_be_made_is_refused_to_the_order_that_asks_for_it_by_then() -> None:
    """Had the second order been carried out, its update could run when the answer to the first one comes."""
    rank = Rank1()
    rank.freeze()
    rank.quiet(7)
    rank.save(8, how=How.REDO)
    assert "Redo" not in rank.save(8, 1, how=How.REDO)
    assert rank.event(ev.NotRedone("the training thread does not wait at the gate")) == ">SaveFailed"
    assert rank.sent(m.SaveFailed).generation == 1
    assert rank.save(7, 2) == "StartSave"


def test_a_save_of_the_version_before_waits_for_the_update_that_is_on_its_way() -> None:
    """Refused at once, the rank would save nothing in this incident, neither that version nor the next one."""
    for made in (True, False):
        rank = Rank1()
        rank.freeze()
        rank.quiet(7)
        rank.save(8, how=How.REDO)
        assert rank.freeze("b") == "CancelSave CloseGate"
        assert rank.quiet(7) == ">Frozen", "an answer from before the first order"
        assert rank.save(7, incident="b") == rank.quiet(7, m.Phase.UPDATING).replace(">Frozen", "") == ""
        if made:
            assert rank.quiet(8) == ">Frozen >SaveFailed" and rank.sent(m.SaveFailed).may_pass
        else:
            assert rank.event(ev.NotRedone("the training thread has left the gate")) == ""
            assert rank.quiet(7, parked=False) == ">Frozen StartSave"
            assert rank.after(40) == ">Heartbeat"


def test_a_save_does_not_wait_longer_for_an_update_than_the_order_to_make_it() -> None:
    rank = Rank1(redo_s=10)
    rank.freeze()
    rank.quiet(7)
    rank.save(8, how=How.REDO)
    rank.after(6)
    assert rank.save(7, 1) == "CancelSave"
    assert rank.after(6) == ">Heartbeat >SaveFailed"
    assert rank.save(7, 2) == ">SaveFailed" and "on its way to 8" in rank.sent(m.SaveFailed).text
