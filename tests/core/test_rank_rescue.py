"""The behaviour of a rank in an incident, as transcripts: freeze, save and commit, redo and undo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.rank_talk import FROZEN, ME, Rank1
from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.rescue import OVER_MAX

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
    assert act.CloseGate(360, hurry=not snapshot) in rank.did


@pytest.mark.parametrize(("kind", "runs"), [(m.FaultKind.EXCEPTION, False), (m.FaultKind.PREEMPTED, True)])
def test_a_torn_rank_says_so(kind: m.FaultKind, runs: bool) -> None:
    """After a SIGTERM its thread runs on, such as in an evaluation of other weights, and may have a whole copy soon."""
    rank = Rank1()
    rank.event(ev.Raised(kind, "x"))
    assert rank.freeze() and rank.quiet(7, m.Phase.TORN, parked=False)
    answer = rank.sent(m.Frozen)
    assert (answer.phase, answer.final, answer.main_thread_blocked) == (m.Phase.TORN, True, runs)


def test_quiet_without_a_freeze_is_nobodys_business() -> None:
    assert Rank1().quiet() == ""


def test_a_thaw_opens_the_gate() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet()
    assert rank.thaw("other") == ""
    assert rank.thaw("a") == "OpenGate"
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
    assert rank.event(ev.StreamDown("gone")) == "CancelSave OpenGate"


@pytest.mark.parametrize(("written_before", "answer"), [(True, m.Saved), (False, m.SaveFailed)])
def test_who_is_frozen_again_for_the_same_incident_writes_no_file_twice(
    written_before: bool, answer: type[m.Report]
) -> None:
    """The saving thread may still write for the first freeze."""
    rank = Rank1()
    rank.freeze(snapshot=True)
    rank.quiet(7)
    assert rank.save() == "StartSave"
    if written_before:
        rank.event(written())
    rank.comes_back()
    rank.freeze(snapshot=True)
    rank.quiet(7)
    assert rank.save() == f">{answer.__name__}"
    assert rank.save(generation=1) == "StartSave"


def test_a_snapshot_that_became_a_rescue_is_not() -> None:
    rank = Rank1()
    rank.freeze(snapshot=True)
    rank.freeze(snapshot=False)
    assert rank.event(ev.StreamDown("gone")) == ""


def test_a_snapshot_that_became_a_rescue_has_the_time_of_one() -> None:
    rank = Rank1(rescue_s=360, heartbeat_s=1e9)
    rank.freeze(snapshot=True)
    assert rank.after(350) == ""
    rank.freeze(snapshot=False)
    assert act.CloseGate(350 + 360, hurry=True) in rank.did
    rank.freeze(snapshot=False)
    assert rank.after(359) == ""
    assert rank.after(1) == "Exit(70)"


def test_frozen_and_never_released() -> None:
    rank = Rank1(rescue_s=360, heartbeat_s=1e9)
    rank.freeze()
    rank.event(ev.StreamDown("gone"))
    assert rank.after(359) == "Connect"
    assert rank.after(1) == "Exit(70)"


@pytest.mark.parametrize("again", [False, True])
def test_never_released_as_the_storage_refused_says_so(again: bool) -> None:
    """The release of the controller, which names the reason too, comes at the same moment, and may come too late."""
    rank = Rank1(rescue_s=360, heartbeat_s=1e9)
    rank.freeze()
    rank.quiet(7)
    rank.save()
    rank.event(ev.Worked(m.SaveFailed(ME, "a", 0, "disk full")))
    if again:
        rank.save(generation=1)
        rank.event(written(generation=1))
    assert rank.after(360) == "Exit(70)"
    (leaves,) = (action for action in rank.did if isinstance(action, act.Exit))
    why = "" if again else "; it could not write: disk full"
    lost = "; unless a checkpoint has them, versions 1 to 7 are lost"
    assert leaves.text == f"frozen for 360 s (TTP_OT) without being released{why}{lost}"


@pytest.mark.parametrize(("base", "lost"), [(6, "; unless a checkpoint has it, version 7 is lost"), (7, "")])
def test_a_rank_that_is_never_released_says_what_is_lost(base: int, lost: str) -> None:
    rank = Rank1(rescue_s=360, heartbeat_s=1e9)
    rank.event(ev.Based(Version(base), 9))
    rank.freeze()
    rank.quiet(7)
    rank.event(ev.StreamDown("gone"))
    rank.after(360)
    (leaves,) = (action for action in rank.did if isinstance(action, act.Exit))
    assert leaves.text == f"frozen for 360 s (TTP_OT) without being released{lost}"


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


def written(generation: int = 0, incident: str = "a") -> ev.Worked:
    return ev.Worked(m.Saved(ME, incident, generation, ()))


def test_saving_and_committing() -> None:
    rank = frozen()
    assert rank.save() == "StartSave"
    assert rank.event(written()) == ">Saved"
    assert rank.commit() == "StartCommit"
    assert rank.event(ev.Worked(m.Committed(ME, "a", 0, "/save/step_7", 9))) == ">Committed"


def test_an_order_that_comes_twice_is_carried_out_once() -> None:
    rank = frozen()
    rank.save()
    assert rank.save() == ""
    rank.event(written())
    assert rank.save() == ">Saved"
    rank.commit()
    assert rank.commit() == ""
    assert rank.save() == ">Saved"
    rank.event(ev.Worked(m.Committed(ME, "a", 0, "/save/step_7", 9)))
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
    assert rank.event(ev.Worked(m.SaveFailed(ME, "a", 0, "disk full"))) == ">SaveFailed"
    assert rank.event(ev.Worked(m.SaveFailed(ME, "a", 0, "disk full"))) == ""
    rank.commit()
    assert rank.event(ev.Worked(m.CommitFailed(ME, "a", 0, "no rename"))) == ">CommitFailed"


@pytest.mark.parametrize(("version", "phase"), [(8, m.Phase.IDLE), (7, m.Phase.TORN)])
def test_only_the_planned_version_is_written(version: int, phase: m.Phase) -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(version, phase)
    assert rank.save(7) == ">SaveFailed"
    failed = rank.sent(m.SaveFailed)
    assert failed.text == f"version 7 was ordered, but this rank holds version {version} ({phase.value})"
    assert failed.may_pass is (phase is m.Phase.IDLE), "another plan may be made of a newer version that is whole"


@pytest.mark.parametrize(
    ("version", "phase", "said"), [(7, m.Phase.IDLE, ">Frozen StartSave"), (7, m.Phase.TORN, ">Frozen >SaveFailed")]
)
def test_a_save_waits_while_the_state_is_looked_at_again(version: int, phase: m.Phase, said: str) -> None:
    """Where the state is on a device, each movement of the training thread is acknowledged before it is looked at."""
    rank = frozen()
    rank.quiet(7, m.Phase.UPDATING)
    assert rank.save(7) == "" and rank.save(7) == ""
    assert rank.quiet(7, m.Phase.UPDATING) == ">Frozen"
    assert rank.quiet(version, phase) == said
    assert rank.quiet(version, phase) == ">Frozen"


def test_a_heartbeat_meanwhile_does_not_end_the_wait() -> None:
    """It tells the host's version, and the device may be behind."""
    rank = frozen()
    rank.quiet(8, m.Phase.UPDATING)
    rank.event(ev.Observed(Version(8), m.Phase.IDLE, 0, "", 0))
    assert rank.save(7) == ""
    assert rank.quiet(7) == ">Frozen StartSave"


def test_a_save_that_waits_is_forgotten_with_its_incident() -> None:
    rank = frozen()
    rank.quiet(7, m.Phase.UPDATING)
    rank.save(7)
    rank.thaw()
    assert rank.quiet(7) == ""


def test_anybody_can_collect_pages() -> None:
    rank = Rank1()
    rank.freeze()
    rank.quiet(7, m.Phase.TORN)
    assert rank.save(7, shards=()) == "StartSave"


# ----------------------------------------------------------------------------------------------------------- redo, undo


def saves(rank: Rank1) -> How:
    return next(a.order.order.how for a in rank.did if isinstance(a, act.StartSave))


def test_an_update_is_saved_when_it_is_made() -> None:
    rank = frozen()
    assert rank.save(8, how=How.REDO) == "Redo"
    assert rank.quiet(7, m.Phase.UPDATING) == ""
    assert rank.quiet(7, parked=False) == "", "it is on its way to the optimizer"
    assert rank.quiet(8).startswith("StartSave")
    assert saves(rank) is How.AS_IS


def test_the_last_update_of_the_training_is_saved_too() -> None:
    """The training thread may have left train() before the new state was inspected."""
    rank = frozen()
    rank.save(8, how=How.REDO)
    assert rank.quiet(8, m.Phase.DONE, parked=False).startswith("StartSave")


@pytest.mark.parametrize("how", ["it hangs", "it is torn"])
def test_an_update_that_comes_to_nothing_is_said(how: str) -> None:
    rank = frozen()
    rank.save(8, how=How.REDO)
    said = rank.after(40) if how == "it hangs" else rank.quiet(8, m.Phase.TORN)
    assert ">SaveFailed" in said


BEGUN: dict[str, tuple[Callable[[Rank1], str], str]] = {
    "Redo": (lambda rank: rank.save(8, how=How.REDO), ">SaveFailed"),
    "StartSave": (lambda rank: rank.save(), ">SaveFailed"),
    "StartCommit": (lambda rank: rank.commit(), ">CommitFailed"),
    "StandBy": (lambda rank: rank.order(m.StandBy(ME, 1)), ">StandbyUp"),
    "Probe": (lambda rank: rank.order(m.Probe(ME, 1, Rank(2), "h2:1")), ">Probed"),
}


@pytest.mark.parametrize("what", BEGUN)
def test_what_cannot_be_begun_is_said_at_once(what: str) -> None:
    """The performer raises, say because there is no thread; nobody waits until the time for it is over."""
    rank, (order, answer) = frozen(), BEGUN[what]
    order(rank)
    (failed,) = (act.not_done(action, "no thread") for action in rank.did if act.name_of(action) == what)
    assert failed is not None and answer in rank.event(failed)
    assert "no thread" in str(rank.did) or what == "StandBy"


def test_what_was_kept_of_the_version_before_is_written_as_such() -> None:
    rank = frozen()
    rank.quiet(7, has_preimage=True)
    assert rank.save(6, how=How.UNDO) == "StartSave"
    assert saves(rank) is How.UNDO


def test_nothing_is_unmade_without_what_was_kept() -> None:
    assert frozen().save(6, how=How.UNDO) == ">SaveFailed"


def test_no_update_is_made_for_a_checkpoint_on_request() -> None:
    """A rank that goes on afterwards would have made it twice."""
    for snapshot in (True, False):
        rank = Rank1()
        rank.freeze(snapshot=snapshot)
        rank.quiet(7, has_gradient=True)
        assert rank.sent(m.Frozen).has_gradient is not snapshot


def test_only_who_has_nothing_else_goes_back_for_a_checkpoint_on_request() -> None:
    """Undo is offered only by a rank between two optimizer steps of one version, which then completes it."""
    for phase in (m.Phase.IDLE, m.Phase.TORN):
        rank = Rank1()
        rank.freeze(snapshot=True)
        rank.quiet(7, phase, has_preimage=True)
        assert rank.sent(m.Frozen).has_preimage is (phase is m.Phase.TORN)
    assert rank.save(7, how=How.UNDO) == "StartSave"


def test_another_incident_cancels_what_belongs_to_the_last() -> None:
    rank = frozen()
    rank.save()
    assert rank.freeze("b") == "CancelSave CloseGate"
    assert rank.event(written(0, "a")) == ""
    assert rank.save(incident="a") == ""


def test_a_thaw_cancels_a_save() -> None:
    rank = frozen()
    rank.save()
    assert rank.thaw() == "CancelSave OpenGate"
    assert rank.event(written()) == ""
