"""Single behaviours of a rank's machine, as transcripts: what happens to it, and the line of what it wants done."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import hello
from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.machine import ProcessorMachine, RankTimeouts
from ttp.core.rank.rescue import OVER_MAX
from ttp.testing.scenario import grid

ME = Rank(1)
FROZEN = "HoldLease CloseGate"


class Rank1:
    """The machine of rank 1 and a clock."""

    def __init__(self, *, joined: bool = True, **timeouts: Any) -> None:
        self.now = 0.0
        self.machine = ProcessorMachine(hello(1, grid(1, 3)), RankTimeouts(**timeouts), 0.0)
        self.did: list[act.Action] = []
        if joined:
            self.event(ev.StreamUp())
            self.order(m.Welcome(ME, 1, 1, "1"))

    def event(self, event: ev.Event) -> str:
        self.did = self.machine.on_event(event, self.now)
        return " ".join(_word(a) for a in self.did)

    def order(self, order: m.Order) -> str:
        return self.event(ev.OrderReceived(order))

    def after(self, seconds: float) -> str:
        self.now += seconds
        return self.event(ev.Observed(self.machine._state.version, m.Phase.IDLE))

    def freeze(self, incident: str = "a", *, snapshot: bool = False, term: int = 1) -> str:
        return self.order(m.Freeze(ME, term, incident, "why", snapshot))

    def quiet(self, version: int = 7, phase: m.Phase = m.Phase.IDLE, *, parked: bool = True, **more: Any) -> str:
        return self.event(ev.Quiet(Version(version), phase, parked, True, **more))

    def save(
        self,
        version: int = 7,
        generation: int = 0,
        *,
        incident: str = "a",
        shards: tuple[str, ...] = ("s0",),
        how: How = How.AS_IS,
    ) -> str:
        order = m.SaverOrder(ME, tuple(map(Shard, shards)), how, (ME,), True)
        return self.order(m.Save(ME, 1, incident, generation, Version(version), "draft", order))

    def commit(self, generation: int = 0) -> str:
        return self.order(m.Commit(ME, 1, "a", generation, Version(7), 1, "draft", "", "", 3, (), ()))

    def thaw(self, incident: str = "a", term: int = 1) -> str:
        return self.order(m.Thaw(ME, term, incident, "why"))

    def sent(self, kind: type[m.Report]) -> Any:
        return next(a.report for a in self.did if isinstance(a, act.Send) and isinstance(a.report, kind))


def _word(action: act.Action) -> str:
    match action:
        case act.Send(report):
            return f">{type(report).__name__}"
        case act.Exit(code):
            return f"Exit({code})"
        case act.Connect(start_controller):
            return "Connect(start)" if start_controller else "Connect"
        case act.LetGo(rescued):
            return f"LetGo({rescued})"
    return type(action).__name__


# --------------------------------------------------------------------------------------------------------------- stream


def test_who_is_on_its_way_to_the_next_version_saves_none_before_it_is_there() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(7)
    redo = m.SaverOrder(ME, (Shard("s0"),), How.REDO, (ME,), True)
    assert "Redo" in rank.order(m.Save(ME, 1, "a", 0, Version(8), "draft", redo))
    assert rank.save(7, generation=1) == "CancelSave >SaveFailed"
    assert "on its way to 8" in rank.sent(m.SaveFailed).text
    rank.quiet(8)
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


def test_busy_means_try_again() -> None:
    rank = Rank1(joined=False)
    rank.event(ev.StreamUp())
    assert rank.order(m.Refused(ME, m.RefusalCode.BUSY, "why")) == ""
    assert not rank.machine.gone
    rank.event(ev.StreamDown("ended"))
    assert rank.after(1) == "Connect"


# --------------------------------------------------------------------------------------------------------------- freeze


def test_a_freeze_closes_the_gate_and_answers() -> None:
    rank = Rank1()
    assert rank.freeze() == FROZEN
    assert rank.quiet(7, m.Phase.UPDATING) == ">Frozen"
    assert not rank.sent(m.Frozen).final
    assert rank.quiet(8, parked=False) == ">Frozen"
    answer = rank.sent(m.Frozen)
    assert (answer.version, answer.final, answer.main_thread_blocked, answer.incident) == (8, True, True, "a")
    assert rank.quiet(8) == ">Frozen"
    assert not rank.sent(m.Frozen).main_thread_blocked


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_device_that_stands_still_is_waited_for_only_where_nothing_broke(snapshot: bool) -> None:
    rank = Rank1()
    rank.freeze(snapshot=snapshot)
    assert act.CloseGate(hurry=not snapshot) in rank.did


def test_a_torn_rank_says_so() -> None:
    rank = Rank1()
    rank.event(ev.Raised(m.FaultKind.EXCEPTION, "x"))
    rank.freeze()
    rank.quiet(7, m.Phase.TORN, parked=False)
    answer = rank.sent(m.Frozen)
    assert (answer.phase, answer.final, answer.main_thread_blocked) == (m.Phase.TORN, True, False)


def test_quiet_without_a_freeze_is_nobodys_business() -> None:
    assert Rank1().quiet() == ""


def test_a_thaw_opens_the_gate() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet()
    assert rank.thaw("other") == ""
    assert rank.thaw("a") == "OpenGate DropLease"
    assert rank.thaw("a") == ""
    assert rank.freeze("a") == ""  # said twice, and over
    assert rank.freeze("b") == FROZEN


def test_a_new_controller_may_freeze_again_for_an_incident_that_another_ended() -> None:
    rank = Rank1()
    rank.freeze("a")
    rank.thaw("a")
    assert rank.freeze("a", term=2) == FROZEN


def test_orders_of_an_older_term_are_ignored() -> None:
    rank = Rank1()
    assert rank.freeze(term=5) == FROZEN
    assert rank.thaw("a", term=4) == ""
    assert rank.order(m.Release(ME, 4, "a", 75, "x")) == ""
    assert rank.order(m.Finished(ME, 4)) == ""
    assert rank.machine.incident == "a"


def test_incidents_that_are_over_are_forgotten_but_for_the_last() -> None:
    """A job may live for a year, and be saved on request every minute."""
    rank = Rank1()
    for number in range(3 * OVER_MAX):
        assert rank.freeze(f"i{number}") == FROZEN
        rank.thaw(f"i{number}")
    assert len(rank.machine._rescue._over) == OVER_MAX
    assert rank.freeze(f"i{3 * OVER_MAX - 2}") == "", "it is late"


def test_a_snapshot_is_thawed_when_the_stream_is_lost() -> None:
    rank = Rank1()
    rank.freeze(snapshot=True)
    rank.save(0)
    assert rank.event(ev.StreamDown("gone")) == "CancelSave OpenGate DropLease"


def test_a_snapshot_that_became_a_rescue_is_not() -> None:
    rank = Rank1()
    rank.freeze(snapshot=True)
    rank.freeze(snapshot=False)
    assert rank.event(ev.StreamDown("gone")) == ""


def test_frozen_and_never_released() -> None:
    rank = Rank1(rescue_s=360, heartbeat_s=1e9)
    rank.freeze()
    rank.event(ev.StreamDown("gone"))
    assert rank.after(359) == "Connect"
    assert rank.after(1) == "Exit(70)"


def test_a_frozen_rank_that_is_broken_and_alone_does_not_spin() -> None:
    rank = Rank1(alone_s=20, retry_min_s=1e6, retry_max_s=1e6)
    rank.freeze()
    rank.event(ev.Raised(m.FaultKind.EXCEPTION, "x"))
    rank.event(ev.StreamDown("gone"))
    rank.after(21)
    deadline = rank.machine.deadline()
    assert deadline is not None
    assert deadline > rank.now


def test_a_release_ends_the_process() -> None:
    rank = Rank1()
    rank.freeze()
    assert rank.order(m.Release(ME, 1, "a", 75, "saved")) == ">Goodbye Exit(75)"
    assert rank.sent(m.Goodbye).reason is m.GoodbyeReason.RELEASED
    assert rank.machine.gone


# ------------------------------------------------------------------------------------------------------ save and commit


def frozen() -> Rank1:
    rank = Rank1()
    rank.freeze()
    rank.quiet(7)
    return rank


def written(generation: int = 0, incident: str = "a") -> ev.PiecesWritten:
    return ev.PiecesWritten(incident, generation, ())


def test_saving_and_committing() -> None:
    rank = frozen()
    assert rank.save() == "StartSave"
    assert rank.event(written()) == ">Saved"
    assert rank.commit() == "StartCommit"
    assert rank.event(ev.CommitDone("a", 0, "/save/step_7", 9)) == ">Committed"


def test_an_order_that_comes_twice_is_carried_out_once() -> None:
    rank = frozen()
    rank.save()
    assert rank.save() == ""
    rank.event(written())
    assert rank.save() == ">Saved"
    rank.commit()
    assert rank.commit() == ""
    assert rank.save() == ">Saved"
    rank.event(ev.CommitDone("a", 0, "/save/step_7", 9))
    assert rank.commit() == ">Committed"


def test_a_result_that_nobody_heard_is_said_again_to_the_next_controller() -> None:
    rank = frozen()
    rank.save()
    rank.event(ev.StreamDown("gone"))
    assert rank.event(written()) == ""
    rank.event(ev.StreamUp())
    rank.order(m.Welcome(ME, 2, 1, "1"))
    order = m.SaverOrder(ME, (Shard("s0"),), How.AS_IS, (), True)
    assert rank.order(m.Save(ME, 2, "a", 0, Version(7), "draft", order)) == ">Saved"


def test_a_newer_generation_replaces_what_is_being_written() -> None:
    rank = frozen()
    rank.save(generation=0)
    assert rank.save(generation=1) == "CancelSave StartSave"
    assert rank.event(written(0)) == ""
    assert rank.save(generation=0) == ""
    assert rank.event(written(1)) == ">Saved"


def test_a_commit_does_not_wait_for_an_obsolete_save() -> None:
    rank = frozen()
    rank.save(generation=0)
    assert rank.commit(generation=1) == "CancelSave StartCommit"


def test_failures_are_reported() -> None:
    rank = frozen()
    rank.save()
    assert rank.event(ev.WriteFailed("a", 0, "disk full")) == ">SaveFailed"
    assert rank.event(ev.WriteFailed("a", 0, "disk full")) == ""
    rank.commit()
    assert rank.event(ev.CommitBroken("a", 0, "no rename")) == ">CommitFailed"


@pytest.mark.parametrize(("version", "phase"), [(8, m.Phase.IDLE), (7, m.Phase.TORN), (7, m.Phase.UPDATING)])
def test_only_the_planned_version_is_written(version: int, phase: m.Phase) -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(version, phase)
    assert rank.save(7) == ">SaveFailed"
    failed = rank.sent(m.SaveFailed)
    assert failed.text == f"asked for version 7, holds {version} ({phase.value})"
    assert failed.may_pass is (phase is m.Phase.IDLE), "another plan may be made of a newer version that is whole"


def test_anybody_can_collect_pages() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(7, m.Phase.TORN)
    assert rank.save(7, shards=()) == "StartSave"


# --------------------------------------------------------------------------------------------------------- redo, undo


def saves(rank: Rank1) -> How:
    return next(a.order.order.how for a in rank.did if isinstance(a, act.StartSave))


def test_an_update_is_saved_when_it_is_made() -> None:
    rank = frozen()
    assert rank.save(8, how=How.REDO) == "Redo"
    assert rank.quiet(7, m.Phase.UPDATING) == ""
    assert rank.quiet(7, parked=False) == "", "it is on its way to the optimizer"
    assert rank.quiet(8).startswith("StartSave")
    assert saves(rank) is How.AS_IS


@pytest.mark.parametrize("how", ["it hangs", "it is torn"])
def test_an_update_that_comes_to_nothing_is_said(how: str) -> None:
    rank = frozen()
    rank.save(8, how=How.REDO)
    said = rank.after(40) if how == "it hangs" else rank.quiet(8, m.Phase.TORN)
    assert ">SaveFailed" in said


def test_what_was_kept_of_the_version_before_is_written_as_such() -> None:
    rank = frozen()
    rank.quiet(7, has_preimage=True)
    assert rank.save(6, how=How.UNDO) == "StartSave"
    assert saves(rank) is How.UNDO


def test_nothing_is_unmade_without_what_was_kept() -> None:
    assert frozen().save(6, how=How.UNDO) == ">SaveFailed"


def test_no_update_is_made_for_a_checkpoint_on_request() -> None:
    """Whoever is told to go on afterwards would have made it twice."""
    for snapshot in (True, False):
        rank = Rank1()
        rank.freeze(snapshot=snapshot)
        rank.quiet(7, has_gradient=True)
        assert rank.sent(m.Frozen).has_gradient is not snapshot


def test_only_who_has_nothing_else_goes_back_for_a_checkpoint_on_request() -> None:
    """Who stands between two steps of one version is at none now, and goes on with it afterwards."""
    for phase in (m.Phase.IDLE, m.Phase.TORN):
        rank = Rank1()
        rank.freeze(snapshot=True)
        rank.quiet(7, phase, has_preimage=True)
        assert rank.sent(m.Frozen).has_preimage is (phase is m.Phase.TORN)
    assert rank.save(7, how=How.UNDO) == "StartSave"


def test_another_incident_cancels_what_belongs_to_the_last() -> None:
    rank = frozen()
    rank.save()
    assert rank.freeze("b") == "CancelSave HoldLease CloseGate"
    assert rank.event(written(0, "a")) == ""
    assert rank.save(incident="a") == ""


def test_a_thaw_cancels_a_save() -> None:
    rank = frozen()
    rank.save()
    assert rank.thaw() == "CancelSave OpenGate DropLease"
    assert rank.event(written()) == ""


# ------------------------------------------------------------------------------------------------------------- training


def test_a_broken_rank_waits_for_the_rescue() -> None:
    rank = Rank1()
    assert rank.event(ev.Raised(m.FaultKind.EXCEPTION, "ValueError: x")) == ">Fault"
    fault = rank.sent(m.Fault)
    assert (fault.subject, fault.kind, fault.nonce) == (1, m.FaultKind.EXCEPTION, "n1")


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
    decision = m.RestoreDecision(ME, 1, Version(5), "step_5", "d", "")
    assert rank.order(decision) == "Decided"
    assert rank.order(decision) == ""
    assert rank.event(ev.Based(Version(5))) == ""


def test_a_view_is_repeated_until_the_training_has_begun() -> None:
    rank = Rank1()
    rank.event(ev.RestoreWanted((), ()))
    rank.order(m.RestoreDecision(ME, 1, Version(5), "step_5", "d", ""))
    rank.event(ev.Based(Version(5)))
    rank.event(ev.StreamDown("gone"))
    rank.event(ev.StreamUp())
    assert rank.order(m.Welcome(ME, 2, 1, "1")) == "Joined >RestoreView"  # others may not have heard yet
    rank.event(ev.Observed(Version(6), m.Phase.IDLE))
    rank.event(ev.StreamDown("gone"))
    rank.event(ev.StreamUp())
    assert rank.order(m.Welcome(ME, 3, 1, "1")) == "Joined"
