"""The controller in a world of several hosts: redo and undo, replicas that differ, hangs."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.core.talk import PATIENCE, Talk, Wide, page
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, Record, Remembered
from ttp.core.controller.saving import REPLAN_MAX_S
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Version
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

# -------------------------------------------------------------------------------------------------------- redo and undo


def test_updates_are_redone_where_a_finished_version_is_not_whole_otherwise() -> None:
    talk = Talk(grid(2, 2))  # s0: 0 and 2, s1: 1 and 3
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8)
    talk.frozen(2, 8)
    said = talk.frozen(1, 7, has_gradient=True)
    assert "[plan] Save:0,1" in said
    orders = {o.rank: o for o in talk.orders(m.Save)}
    assert {r: (o.version, o.order.how) for r, o in orders.items()} == {0: (8, How.AS_IS), 1: (8, How.REDO)}


def test_who_could_not_make_the_update_saves_the_version_that_it_holds() -> None:
    """Its training thread has left the gate meanwhile. No other copy of its shard is left."""
    talk = Talk(grid(2, 2))
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8)
    talk.frozen(2, 7)
    assert "Save:0,1" in talk.frozen(1, 7, has_gradient=True)
    assert talk.save_failed(1) == "[save_failed] [replan] [plan] Save:1,2"
    assert {(o.rank, o.version, o.order.how) for o in talk.orders(m.Save)} == {(1, 7, How.AS_IS), (2, 7, How.AS_IS)}
    talk.save_failed(1, 1)
    assert "Release(70)" in talk.after(2)


def test_nothing_is_redone_that_nobody_has_finished() -> None:
    talk = Talk(grid(1, 3))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.frozen(0, 7, has_gradient=True)
    talk.frozen(1, 7, has_gradient=True)
    assert [(o.version, o.order.how) for o in talk.orders(m.Save)] == [(7, How.AS_IS)]


def test_a_step_that_only_the_dead_had_finished_is_redone() -> None:
    talk = Talk(grid(1, 3))
    talk.report(2, m.Heartbeat(Rank(2), Version(8), m.Phase.IDLE))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.frozen(0, 7, has_gradient=True)
    talk.frozen(1, 7)
    assert [(o.rank, o.version, o.order.how) for o in talk.orders(m.Save)] == [(0, 8, How.REDO)]


def test_who_is_ahead_goes_back_where_that_is_all_that_helps() -> None:
    talk = Talk(grid(2, 2))
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8, has_preimage=True)
    talk.frozen(2, 8)
    talk.frozen(1, 7)
    assert {(o.rank, o.version, o.order.how) for o in talk.orders(m.Save)} == {(0, 7, How.UNDO), (1, 7, How.AS_IS)}


def test_who_may_still_come_to_the_gate_is_waited_for() -> None:
    talk = Talk(grid(2, 1))
    talk.fault(0)
    talk.frozen(0, 8)
    assert talk.frozen(1, 7, main_thread_blocked=True) == "[answer] [waits]"
    talk.after(1)
    assert "Save" in talk.frozen(1, 7, has_gradient=True)
    assert {(o.rank, o.version, o.order.how) for o in talk.orders(m.Save)} == {(0, 8, How.AS_IS), (1, 8, How.REDO)}


def test_who_may_still_come_to_the_gate_is_waited_for_before_a_finished_step_is_lost() -> None:
    """Version 7 is whole and 8 may become whole. A rank in the barrier answers there, and again at the gate."""
    talk = Talk(grid(2, 2))  # s0: 0 and 2, s1: 1 and 3
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8)
    talk.frozen(2, 7, main_thread_blocked=True)
    assert talk.frozen(1, 7, main_thread_blocked=True) == "[answer] [waits]"
    assert talk.frozen(1, 7, has_gradient=True) == "[answer]", "looked at by and by: there may be thousands"
    assert "Save" in talk.after(0.02)
    assert {(o.rank, o.version, o.order.how) for o in talk.orders(m.Save)} == {(0, 8, How.AS_IS), (1, 8, How.REDO)}


def test_who_never_comes_to_the_gate_is_not_waited_for_long() -> None:
    talk = Talk(grid(2, 2))
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8)
    talk.frozen(2, 7, main_thread_blocked=True)
    talk.frozen(1, 7, main_thread_blocked=True)
    assert "Save" not in talk.after(1.9)
    assert "Save" in talk.after(0.1)
    assert {(o.rank, o.version) for o in talk.orders(m.Save)} == {(1, 7), (2, 7)}


def test_nobody_is_waited_for_where_a_checkpoint_was_asked_for() -> None:
    talk = Talk(grid(2, 2))
    talk.ask()
    talk.frozen(0, 8)
    talk.frozen(2, 7, main_thread_blocked=True)
    talk.frozen(1, 7, main_thread_blocked=True)
    assert "Save" in talk.frozen(3, 7, main_thread_blocked=True)


def test_a_version_that_never_becomes_whole_is_given_up() -> None:
    talk = Talk(grid(2, 1))
    talk.fault(0)
    talk.frozen(0, 8)
    talk.frozen(1, 7)
    assert "Release(70)" in talk.after(2)


# ---------------------------------------------------------------------------------------------------- replicas disagree


def test_the_odd_replica_does_not_save() -> None:
    talk = Talk(grid(1, 4))
    talk.accuse(3, m.FaultKind.EXITED)
    (shard,) = talk.layout.groups
    for rank, digest in ((0, "x"), (1, "y"), (2, "y")):
        said = talk.frozen(rank, 7, digests=(m.ShardDigest(shard, digest),))
    assert "Save:1" in said
    assert talk.facts("plan")["odd"] == [0]
    for order in talk.orders(m.Save):
        talk.saved(order.rank)
    assert talk.orders(m.Commit)[0].disputed == ()


def test_a_dispute_reaches_the_manifest() -> None:
    talk = Talk(grid(1, 3))
    talk.accuse(2, m.FaultKind.EXITED)
    (shard,) = talk.layout.groups
    for rank, digest in ((0, "x"), (1, "y")):
        talk.frozen(rank, 7, digests=(m.ShardDigest(shard, digest),))
    for order in talk.orders(m.Save):
        talk.saved(order.rank)
    assert talk.orders(m.Commit)[0].disputed == (shard,)


# ---------------------------------------------------------------------------------------------------------------- hangs


class Hanging(Wide):
    """A job with a known pace of one step a second, whose ``slow`` ranks stop before the forward pass."""

    def __init__(self, slow: Collection[int] = (3,)) -> None:
        super().__init__(grid(1, 4), hang_s=10.0)
        self.marks = {rank: 0 if rank in slow else 2 for rank in range(4)}
        for version in range(1, 31):
            self.now += 1
            for rank in range(4):
                self.beat(rank, version)
        self.hung_at = self.now
        for _ in range(3):
            self.now += 1
            for rank in range(4):
                self.beat(rank, 30, mark=self.marks[rank])

    @property
    def alarm_s(self) -> float | None:
        """Seconds without progress after which there is an alarm."""
        return self.machine._parts.hangs.patience_s

    def go_on(self, seconds: int = 40) -> str:
        """Send heartbeats until the machine acts."""
        for _ in range(seconds):
            self.now += 1
            for rank in sorted(self.machine.job.live):
                self.beat(rank, 30, mark=self.marks[rank])
            due = self.machine.deadline()
            if due is not None and due <= self.now and (said := self.after(0)):
                return said
        return ""


def test_the_one_that_the_others_wait_for_is_named_and_its_stack_is_taken() -> None:
    talk = Hanging()
    assert talk.go_on() == "[opened] Freeze:0,1,2,3 [evidence] [stood_still] TakeStack:2"
    order = talk.orders(m.TakeStack)[0]
    assert (order.subject, order.pid) == (3, talk.machine.job.members[Rank(3)].hello.pid)
    assert talk.facts("evidence")["rank"] == 3
    assert talk.now - talk.hung_at < 20
    assert talk.report(2, m.StackTaken(Rank(2), talk.id, Rank(3), "File x")) == "[stack]"


def test_a_hang_that_is_real_ends_with_a_release() -> None:
    talk = Hanging()
    talk.go_on()
    talk.frozen_all(30, main_thread_blocked=True)
    assert talk.write() == "[committed]", "a slow rank may still come to the gate"
    assert "Release(75):0,1,2,3" in talk.after(5)


def test_a_hang_is_not_withdrawn_as_ranks_leave() -> None:
    talk = Hanging()
    talk.go_on()
    talk.frozen_all(30, 0, 1, 2)
    talk.frozen(3, 30, main_thread_blocked=True)
    talk.write()
    assert "Release(75):0,1,2,3" in talk.after(5)
    talk.goodbye(3, m.GoodbyeReason.RELEASED, 30)
    assert talk.lost(3) == ""


def test_a_slow_rank_that_comes_to_the_gate_was_a_false_alarm() -> None:
    talk = Hanging()
    talk.go_on()
    talk.frozen_all(30, main_thread_blocked=True)
    talk.write()
    assert talk.frozen(3, 30) == "[retracted] [answer] Thaw:0,1,2,3 [thawed]"
    assert talk.machine.rescue.false_alarms == 1
    assert talk.alarm_s == 30, "ranks were thawed before the next heartbeat, and yet it has learnt"


@pytest.mark.parametrize(("waited_s", "known_s"), [(40, 10), (9, 9), (3, 0)])
def test_long_waits_are_known_to_another_controller(waited_s: int, known_s: int) -> None:
    """A requeued job has one, as after a takeover. Without this, each could end it in the same long checkpoint."""
    talk, recorded = Hanging(), []
    for _ in range(waited_s - 3):
        talk.go_on(1)
        recorded += [a.facts["stood_s"] for a in talk.said if isinstance(a, Record) and a.kind == "stood_still"]
    talk.now += 1
    talk.beat(0, 31)
    recorded += [a.facts["stood_s"] for a in talk.said if isinstance(a, Record) and a.kind == "stood_still"]
    assert recorded == [known_s] * bool(known_s)
    another = Hanging()
    another.event(Remembered(0, False, stood_s=float(known_s)))
    assert another.alarm_s == max(10, 3 * known_s)


def test_a_hang_of_nobody_is_withdrawn_when_all_have_come_to_the_gate_and_not_after_the_save() -> None:
    talk = Hanging(slow=range(4))
    assert talk.go_on() == "[opened] Freeze:0,1,2,3 [evidence] [stood_still]"
    assert talk.facts("evidence")["rank"] == -1
    assert "[plan]" in talk.frozen_all(30, main_thread_blocked=True)
    assert [talk.frozen(rank, 30) for rank in range(3)] == ["[answer]"] * 3
    assert talk.frozen(3, 30) == "[answer] [retracted] Thaw:0,1,2,3 [thawed]"


def test_what_is_done_on_purpose_is_no_hang() -> None:
    talk = Hanging()
    talk.beat(0, 30, mark=2, activity="evaluation")
    for _ in range(60):
        talk.now += 1
        for rank in range(4):
            talk.beat(rank, 30, mark=2, activity="evaluation" if rank == 0 else "")
        due = talk.machine.deadline()
        if due is not None and due <= talk.now:
            assert talk.after(0) == ""
    assert talk.machine.incident is None


def test_hangs_are_not_looked_for_unless_asked() -> None:
    talk = Wide(grid(1, 4))
    for version in range(1, 31):
        talk.now += 1
        for rank in range(4):
            talk.beat(rank, version)
    assert talk.machine.deadline() == talk.now + (PATIENCE.quiet_s or 0), (
        "but for hosts that are not heard, nothing is due"
    )


# --------------------------------------------------------------------------------------------------------------- forged


@pytest.mark.parametrize("report", [m.StandbyUp(Rank(0), "x:1"), page(0), m.Probed(Rank(0), Rank(99), True, "")])
def test_what_nobody_asked_for_does_nothing(report: m.Report) -> None:
    talk = Talk(grid(1, 2))
    talk.report(0, report)
    stranger = Received(ConnectionId(77), report)
    assert talk.event(stranger) == ""
    assert talk.machine.incident is None
    assert hello(0, talk.layout).rank == 0


def test_savers_that_die_one_after_the_other_are_replaced_together() -> None:
    """A power cut ends hundreds of streams within a second, and each plan would cost tens of milliseconds."""
    ranks = 202
    talk = Talk(grid(ranks // 2, 2))
    talk.fault(ranks - 1)
    talk.frozen_all(7, *range(ranks))
    incident = talk.machine.incident
    assert incident is not None and incident.draft.plan is not None
    plans = 0
    for rank in range(ranks // 2 - 1):
        plans += "[plan]" in talk.accuse(rank, m.FaultKind.EXITED)
        plans += "[plan]" in talk.after(0.005)
    assert plans < 16
    due = talk.machine.deadline()
    assert due is not None and due <= talk.now + REPLAN_MAX_S
    talk.after(due - talk.now)
    assert not incident.draft.dropped and incident.stage.value == "saving"
    assert all(rank >= ranks // 2 - 1 for rank in incident.draft.pending), "whoever is dead is asked for nothing"


def test_ten_thousand_answers_are_given_the_time_to_be_read() -> None:
    """Answers wait in the controller's queue. A rank whose answer was not read is not silent."""
    ranks = 2_000
    talk = Wide(Layout.data_parallel(ranks))
    talk.accuse(ranks - 1, m.FaultKind.EXITED)
    assert talk.after(PATIENCE.answer_s + 0.0005 * ranks) == ""
    talk.frozen(0, 7)
    assert "[plan]" in talk.frozen_all()
    late = Wide(Layout.data_parallel(ranks))
    late.accuse(ranks - 1, m.FaultKind.EXITED)
    assert "[evidence]" in late.after(PATIENCE.answer_s + 0.0015 * ranks), "but not for ever"


def test_ten_thousand_streams_that_break_at_once_are_given_the_time_to_be_opened_again() -> None:
    ranks = 2_000
    talk = Wide(Layout.data_parallel(ranks))
    for rank in range(ranks):
        talk.lost(rank)
    assert "[evidence]" not in talk.after(PATIENCE.grace_s + 0.0005 * ranks)
    for rank in range(ranks):
        talk.back(rank, resume=True)
    assert not talk.machine.job.suspects and not talk.machine.job.broken
