"""The controller in a world of several hosts: neighbours, witnesses, standbys, mirrors, another directory, hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import PATIENCE, Talk, hello, line
from ttp.core import messages as m
from ttp.core.controller.events import Accused, ConnectionId, Received
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.saving import REPLAN_MAX_S
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Version
from ttp.testing.scenario import grid


class Wide(Talk):
    """Two ranks on each host: h0, h1, ...; the controller runs on h0."""

    def __init__(self, layout: Layout | None = None, **patience: Any) -> None:
        super().__init__(layout or grid(1, 6), formed=False)
        self.machine = ControllerMachine(replace(PATIENCE, **patience), lambda n: f"i{n}", 0.0, host="h0")
        self.lines = [self.hello(r) for r in range(self.layout.world_size)]

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"host": f"h{rank // 2}", "address": f"10.0.0.{rank // 2}", **more})

    def beat(self, rank: int, version: int = 0, **more: Any) -> None:
        self.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE, **more))

    def frozen_all(self, version: int = 7, **more: Any) -> str:
        said = ""
        for rank in sorted(self.machine.job.live):
            said = self.frozen(rank, version, **more)
        return said


# -------------------------------------------------------------------------------------------------------- neighbours


def died(talk: Talk, witness: int, subject: int, nonce: str = "") -> str:
    nonce = nonce or talk.machine.job.members[Rank(subject)].hello.nonce
    return talk.report(witness, m.Fault(Rank(witness), Rank(subject), m.FaultKind.EXITED, "died", nonce=nonce))


def test_a_neighbour_knows_for_sure() -> None:
    talk = Wide()
    assert died(talk, 2, 3) == "Refused(fenced):3 [opened] Freeze:0,1,2,4,5 [evidence]"
    talk.frozen_all()
    talk.saved(0)
    for rank in (2, 4):
        talk.saved(rank)
    assert talk.committed(0).startswith("[committed] [released] Release(75)"), "nobody waits for a grace"
    assert talk.back(3) == "Release(75):3" or "Refused(fenced):3" in talk.back(3)


def test_only_a_rank_of_the_same_host_can_be_a_neighbour() -> None:
    talk = Wide()
    assert died(talk, 0, 3) == ""
    assert died(talk, 2, 3, nonce="another process") == ""
    assert talk.machine.incident is None


def test_the_launcher_adds_the_signal_to_what_the_neighbour_saw() -> None:
    talk = Wide()
    died(talk, 2, 3)
    assert talk.accuse(3, m.FaultKind.EXITED) == "[evidence]"
    assert talk.machine.incident is not None
    assert talk.machine.incident.cause.endswith("seen from outside")
    assert talk.accuse(3, m.FaultKind.EXITED) == ""


# --------------------------------------------------------------------------------------------------------- witnesses


def silent_loss(talk: Wide, rank: int) -> str:
    talk.now += 20
    for other in talk.machine.job.live:
        if other // 2 != rank // 2:
            talk.beat(other)
    return talk.lost(rank)


def test_a_silent_host_is_looked_at_by_a_third_one() -> None:
    talk = Wide()
    assert silent_loss(talk, 2).endswith("[evidence] [witness_asked] Probe:4")
    assert talk.orders(m.Probe)[0].address == "10.0.0.1"
    assert "after 20.0 s of silence" in talk.incident.cause
    assert talk.lost(3).endswith("[evidence]"), "one question for each host"


def test_a_host_that_is_still_reached_gets_more_time() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.lost(3)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    talk.after(3)
    assert talk.machine.job.suspects.keys() == {2, 3}
    talk.back(2)
    talk.back(3)
    talk.frozen_all(0)
    assert talk.machine.incident is None, "a partition that healed is a false alarm"
    assert talk.machine.false_alarms == 1


def test_more_time_ends_too() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    assert talk.machine.deadline() is not None
    talk.after(10.1)
    assert not talk.machine.job.suspects
    assert talk.machine.job.members[Rank(2)].fenced


def test_a_host_that_nobody_reaches_gets_the_usual_grace() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.report(4, m.Probed(Rank(4), Rank(2), False, "no answer"))
    talk.after(1.0)
    assert talk.machine.job.members[Rank(2)].fenced


def test_a_process_that_spoke_a_moment_ago_needs_no_witness() -> None:
    talk = Wide()
    talk.beat(2)
    assert "Probe" not in talk.lost(2)


def test_two_hosts_have_no_third() -> None:
    talk = Wide(grid(1, 4))
    assert "Probe" not in silent_loss(talk, 2)


# ---------------------------------------------------------------------------------------------------------- standbys


def test_other_hosts_are_asked_to_stand_by_and_everybody_is_told() -> None:
    talk = Wide()
    asked = [line for line in talk.lines if "StandBy" in line]
    assert asked == [f"Welcome:{r} StandBy:{r} [joined]" for r in (2, 4)], "as soon as they come"
    assert not talk.machine.standbys
    assert talk.report(4, m.StandbyUp(Rank(4), "10.0.0.2:9")) == "[standby] Standbys:0,1,2,3,4,5"
    talk.report(2, m.StandbyUp(Rank(2), "10.0.0.1:9"))
    assert talk.orders(m.Standbys)[0].addresses == ("10.0.0.1:9", "10.0.0.2:9")
    assert talk.machine.standbys == ("10.0.0.1:9", "10.0.0.2:9")
    talk.lost(1)
    assert "Standbys:1" in talk.back(1)


def test_who_is_asked_is_announced_before_it_is_there() -> None:
    talk = Wide()
    talk.machine = ControllerMachine(PATIENCE, lambda n: f"i{n}", 0.0, host="h0", port=77)
    assert talk.hello(0) == "[incarnation] Welcome:0 [joined]"
    assert talk.hello(2) == "Welcome:2 StandBy:2 Standbys:0,2 [joined]"
    assert talk.orders(m.Standbys)[0].addresses == ("10.0.0.1:77",)
    assert talk.hello(4, address="fe80::1") == "Welcome:4 Standbys:4 StandBy:4 Standbys:0,2,4 [joined]"
    assert talk.orders(m.Standbys)[-1].addresses == ("10.0.0.1:77", "[fe80::1]:77")
    assert talk.report(2, m.StandbyUp(Rank(2), "")) == "[no_standby] Standbys:0,2,4"
    assert talk.orders(m.Standbys)[-1].addresses == ("[fe80::1]:77",)


def test_a_host_that_cannot_is_replaced_by_another() -> None:
    talk = Wide(grid(1, 8), standbys=1)
    assert "StandBy:2" in talk.lines[2]
    assert talk.report(2, m.StandbyUp(Rank(2), "")) == "[no_standby] StandBy:4"
    assert talk.report(4, m.StandbyUp(Rank(4), "")) == "[no_standby] StandBy:6"
    assert talk.report(6, m.StandbyUp(Rank(6), "")) == "[no_standby]"


def test_nobody_stands_by_where_that_was_not_asked_for() -> None:
    assert "StandBy" not in "".join(Wide(standbys=0).lines)
    unasked = Wide(standbys=0)
    assert unasked.report(2, m.StandbyUp(Rank(2), "x:1")) == ""


class Successor(Wide):
    """A controller that knows nothing yet of a job that runs."""

    def __init__(self, **patience: Any) -> None:
        super().__init__(**patience)
        self.machine = ControllerMachine(replace(PATIENCE, **patience), lambda n: f"j{n}", 0.0, host="h1")

    def comes(self, rank: int, **more: Any) -> str:
        known = {"incarnation": 1, "resume": True, "term_seen": 1, "standbys": ("10.0.0.1:9",), "takeover": True}
        self.streams[rank] += 100
        return self.hello(rank, **{**known, "version": 3, **more})


def test_a_controller_that_was_just_started_sends_ranks_to_those_who_stand_by() -> None:
    talk = Successor()
    assert talk.comes(0, takeover=False) == "Refused(moved):0 [refused]"
    assert "10.0.0.1:9 stands by" in talk.orders(m.Refused)[0].text
    assert talk.comes(0, takeover=False, standbys=()).startswith("[incarnation] Welcome:0")


def test_one_who_stands_by_takes_over() -> None:
    talk = Successor()
    assert talk.comes(0) == "[incarnation] Welcome:0 StandBy:0 [reconnected]"
    assert talk.orders(m.Welcome)[0].term == 2
    for rank in range(1, 5):
        talk.comes(rank)
    assert talk.comes(5) == "Welcome:5 [reconnected] [formed]"


def test_a_minority_is_sent_on_once_and_then_it_is_believed() -> None:
    talk = Successor()
    talk.comes(4)
    talk.comes(5)
    assert talk.after(3) == "", "ranks see the loss of a controller seconds apart"
    assert talk.after(0.5) == "[abdicated] Refused(moved):-1,-1", "while a majority elsewhere still waits for them"
    talk.comes(4)
    talk.comes(5)
    assert "Freeze:4,5" in talk.after(5)


def test_of_a_job_that_never_trained_the_others_are_looked_for_again_and_again() -> None:
    """A host was cut off while the job formed: it has found a controller of its own, and the others wait at theirs."""
    talk = Successor(forming_s=20, abandoned_s=1e6)
    talk.now += 19  # it stands by for long

    def half_of_them_come() -> None:
        for rank in (3, 4, 5):
            talk.comes(rank, version=0)

    half_of_them_come()
    assert talk.after(3.5) == "[abdicated] Refused(moved):-1,-1,-1", "they lose nothing by it"
    half_of_them_come()
    assert talk.after(5) == "", "who comes back is not sent on at once"
    assert talk.after(3.5) == "[abdicated] Refused(moved):-1,-1,-1"
    half_of_them_come()
    assert talk.after(5) == ""
    talk.after(3.5)
    half_of_them_come()
    assert "[opened]" in talk.after(5), "not for ever: then only a restart brings them together"


def test_who_was_sent_on_long_ago_is_not_held_against_who_comes_now() -> None:
    talk = Successor(forming_s=20, abandoned_s=1e6)
    talk.comes(4, version=0)
    assert "[abdicated]" in talk.after(3.5)
    talk.now += 41
    talk.comes(4, version=0)
    assert "[abdicated]" in talk.after(3.5), "this one has not been looked for elsewhere yet"


def test_a_job_that_is_forming_takes_in_who_was_elsewhere() -> None:
    """Nothing is known here that could be of the past, so nobody has to go anywhere else."""
    talk = Wide()
    talk.machine = ControllerMachine(PATIENCE, lambda n: f"j{n}", 0.0, host="h1")
    for rank in range(5):
        talk.hello(rank)
    assert talk.hello(5, incarnation=1, resume=True, term_seen=7, takeover=True).startswith("Welcome:5")
    assert (talk.machine.term, talk.machine.stage) == (8, "training")


def test_a_frozen_minority_is_not_sent_away() -> None:
    talk = Successor()
    talk.comes(4, incident="i1")
    assert "abdicated" not in talk.after(5)
    assert talk.machine.incident is not None


def test_two_controllers_with_one_incident_have_drafts_of_their_own() -> None:
    first, second = Successor(), Successor()
    second.machine._rescue._new_id = lambda n: f"k{n}"  # every process makes its own
    drafts = []
    for talk in (first, second):
        for rank in range(5):
            talk.comes(rank, incident="i1")
        talk.fault(0)
        talk.comes(5, incident="i1")
        talk.frozen_all()
        drafts.append(talk.incident.draft)
    assert drafts == [".draft-step_7-i1-j1", ".draft-step_7-i1-k1"]


def test_who_was_passed_over_forgets_what_it_knew() -> None:
    talk = Wide()
    for rank in range(6):
        talk.lost(rank)
    talk.after(2)
    talk.streams[0] += 100
    said = talk.hello(0, incarnation=1, resume=True, term_seen=5, takeover=True, version=3)
    assert said.startswith("[abdicated]")
    assert "Welcome:0" in said
    assert talk.machine.term == 6


# ----------------------------------------------------------------------------------------------------------- mirrors


def page(rank: int, incarnation: int = 1) -> m.Mirror:
    return m.Mirror(Rank(rank), Version(7), True, incarnation, b"page")


class Mirrored(Wide):
    """Four ranks on two hosts, with TTP_MIRROR."""

    def __init__(self) -> None:
        super().__init__(grid(1, 4))

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"pages_at": f"10.0.0.{rank // 2}:{rank}", **more})


def test_each_rank_is_told_who_keeps_its_page_and_pages_are_used_when_a_host_is_lost() -> None:
    talk = Mirrored()
    assert "MirrorTo:0,1,2,3" in talk.lines[-1]
    assert all("MirrorTo" not in said for said in talk.lines[:-1]), "not before all are there"
    talk.accuse(2, m.FaultKind.EXITED)
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen_all()
    pages = {order.rank: order.order.pages for order in talk.orders(m.Save)}
    assert pages == {0: (0, 1, 2), 1: (3,)}
    talk.saved(0)
    talk.saved(1)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_a_keeper_that_comes_back_is_where_it_says_it_is() -> None:
    """And the rank itself is told again, by whatever controller it has."""
    talk = Mirrored()
    talk.back(1, pages_at="10.0.0.0:99")
    assert talk.orders(m.MirrorTo) == [
        m.MirrorTo(Rank(1), 1, Rank(3), "10.0.0.1:3"),
        m.MirrorTo(Rank(3), 1, Rank(1), "10.0.0.0:99"),
    ]


def test_on_one_host_and_without_the_switch_nobody_is_told() -> None:
    assert not any("MirrorTo" in said for said in Wide(grid(1, 4)).lines)
    assert not any("MirrorTo" in said for said in Mirrored().lines[:1])
    alone = Wide(grid(1, 2))
    assert not any("MirrorTo" in alone.hello(rank, pages_at="h:1") for rank in range(2))


def test_what_a_dead_rank_has_left_on_its_host_goes_to_one_that_lives() -> None:
    """The launcher of that host hands it over with the news."""
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    said = talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(2), page(3))))
    assert said.endswith("Keep:0,0")
    assert talk.orders(m.Keep)[1] == m.Keep(Rank(0), 1, Rank(3), Version(7), True, 1, b"page")
    talk.frozen_all()
    assert {order.rank: order.order.pages for order in talk.orders(m.Save)} == {0: (0, 1, 2, 3)}
    talk.saved(0)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_it_comes_before_the_commit_though_after_the_plan() -> None:
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.lost(3)
    talk.frozen_all()
    talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(2), page(3))))
    talk.saved(0)
    (late,) = talk.orders(m.Save)
    assert late.order.pages == (2, 3)
    talk.saved(late.rank, late.generation)
    assert talk.orders(m.Commit)[0].missing_pages == ()


@pytest.mark.parametrize("wrong", [page(1), page(2, incarnation=9), page(99)], ids=["lives", "incarnation", "nobody"])
def test_nobody_else_is_inherited_from(wrong: m.Mirror) -> None:
    talk = Wide(grid(1, 4))
    assert "Keep" not in talk.event(Accused((Rank(2),), m.FaultKind.EXITED, "seen", (102,), (wrong,)))


def test_what_a_launcher_hands_over_goes_to_who_has_the_earlier_pages() -> None:
    talk = Mirrored()
    assert talk.event(Accused((Rank(3),), m.FaultKind.EXITED, "seen", (103,), (page(3),))).endswith("Keep:1")


def planned_before_all_have_answered() -> Wide:
    """Rank 5 is dead, rank 4 of the same host has not answered; the newest version is known and saved meanwhile."""
    talk = Wide(grid(1, 6))
    talk.accuse(5, m.FaultKind.EXITED)
    talk.frozen(0, 7)
    assert "[plan] Save:" in talk.frozen(1, 8)
    saves = talk.orders(m.Save)
    for rank in (2, 3):
        talk.frozen(rank, 8)
    while saves:
        order = saves.pop()
        talk.saved(order.rank, order.generation)
        saves += talk.orders(m.Save)
    return talk


def test_pages_of_a_host_that_answers_late_are_collected_before_the_commit() -> None:
    talk = planned_before_all_have_answered()
    assert talk.machine.incident is not None and talk.machine.incident.stage.value == "saving"
    talk.frozen(4, 8)
    (late,) = talk.orders(m.Save)
    assert (late.rank, late.order.pages) == (4, (4, 5))
    talk.saved(4, late.generation)
    assert talk.orders(m.Commit)[0].missing_pages == ()


def test_a_commit_does_not_wait_for_long() -> None:
    talk = planned_before_all_have_answered()
    assert "Commit" in talk.after(1.0)
    assert talk.orders(m.Commit)[0].missing_pages == (4, 5)


def test_without_mirror_pages_of_a_lost_host_are_missing() -> None:
    talk = Wide(grid(1, 4))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen_all()
    talk.saved(0)
    assert talk.orders(m.Commit)[0].missing_pages == (2, 3)


# ------------------------------------------------------------------------------------------------- another directory


def fallback_world(**patience: Any) -> Wide:
    talk = Wide(**patience)
    for rank, member in talk.machine.job.members.items():
        member.hello = replace(member.hello, fallback_dir="/spare")
        del rank
    return talk


def nobody_can_write(talk: Wide) -> tuple[list[m.Save], str]:
    """Whoever is asked fails. Returns the orders before the last answer and what was said to that."""
    ordered: list[m.Save] = []
    for _ in range(6):
        pending = talk.incident.pending
        rank = min(pending)
        said = talk.save_failed(rank, pending[rank].generation)
        if "fallback" in said or "Release" in said:
            return ordered, said
        ordered += talk.orders(m.Save)
    raise AssertionError("six ranks have failed, and it goes on")


def test_when_nobody_can_write_everything_goes_to_the_fallback() -> None:
    talk = fallback_world()
    talk.fault(5)
    talk.frozen_all()
    before, said = nobody_can_write(talk)
    assert before
    assert {order.directory for order in before} == {""}
    assert "[fallback] [plan] Save" in said
    orders = talk.orders(m.Save)
    assert orders[0].directory == "/spare"
    for order in orders:
        talk.saved(order.rank, order.generation)
    commit = talk.orders(m.Commit)[0]
    assert commit.directory == "/spare"
    assert talk.committed(commit.rank, commit.generation).startswith("[committed] [released] Release(75)")


def test_the_fallback_is_tried_once() -> None:
    talk = fallback_world()
    talk.fault(5)
    talk.frozen_all()
    nobody_can_write(talk)
    _, said = nobody_can_write(talk)
    assert "Release(70)" in said
    assert "disk full" in talk.orders(m.Release)[0].text


def test_without_a_fallback_it_is_said() -> None:
    talk = Wide()
    talk.fault(5)
    talk.frozen_all()
    _, said = nobody_can_write(talk)
    assert "Release(70)" in said


def everybody_fails(talk: Talk) -> str:
    """Until nobody is asked any more."""
    said = ""
    while (incident := talk.machine.incident) is not None and incident.pending:
        rank = min(incident.pending)
        said = talk.save_failed(rank, incident.pending[rank].generation, may_pass=True)
    return said


def test_storage_that_refuses_everybody_is_asked_again_later() -> None:
    talk = Wide(rescue_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    waited = []
    for _ in range(9):
        assert everybody_fails(talk).endswith("[retry]")
        waited.append(talk.facts("retry")["after_s"])
        assert talk.after(waited[-1] - 0.01) == "", "not before"
        assert "[plan] Save" in talk.after(0.02)
    assert waited == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    for order in talk.orders(m.Save):
        talk.saved(order.rank, order.generation)
    commit = talk.incident.committer
    assert commit is not None
    said = talk.committed(commit, talk.incident.generation)
    assert said.startswith("[committed] [released] Release(75)")


def test_who_failed_of_something_else_is_not_asked_again() -> None:
    talk = Wide(rescue_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    first = min(talk.incident.pending)
    talk.save_failed(first, may_pass=False)
    assert everybody_fails(talk).endswith("[retry]")
    while (incident := talk.machine.incident) is not None and incident.retries < 3:
        talk.after(11)
        assert first not in {order.rank for order in talk.orders(m.Save) if order.order.shards}
        everybody_fails(talk)
    assert talk.machine.incident is not None


def test_when_time_is_up_what_refused_is_said() -> None:
    talk = Wide(rescue_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    everybody_fails(talk)
    assert "Release(70)" in talk.after(61)
    text = talk.orders(m.Release)[0].text
    assert "rank 0: disk full" in text and "TTP_OT" in text


def test_both_places_are_asked_again_and_what_is_durable_there_counts() -> None:
    talk = fallback_world(rescue_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    for order in talk.orders(m.Save):
        talk.saved(order.rank, order.generation)  # all is durable in save_dir, and nobody can rename it
    refused: list[str] = []
    for _ in range(40):
        incident = talk.machine.incident
        assert incident is not None
        if incident.pending:
            refused.append(incident.directory)
            everybody_fails(talk)
        elif incident.committer is not None and not incident.retries:
            talk.commit_failed(incident.committer, incident.generation, may_pass=True)
        elif incident.committer is not None:
            break
        else:
            talk.after(0.05)
    assert refused == ["/spare"], "the pieces in save_dir were not written a second time"
    assert incident is not None and incident.committer is not None and incident.directory == ""
    assert "Release(75)" in talk.committed(incident.committer, incident.generation)


def test_a_checkpoint_on_request_is_not_tried_again() -> None:
    """The job is healthy and would stand still meanwhile."""
    talk = Wide()
    talk.ask()
    talk.frozen_all()
    said = everybody_fails(talk)
    assert "Thaw" in said and "[retry]" not in said


def test_storage_that_takes_nothing_has_failed() -> None:
    talk = Wide(stall_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    (first,) = {order.rank for order in talk.orders(m.Save) if order.order.shards}
    talk.now += 59
    for rank in range(6):
        talk.beat(rank, written=5)
    assert talk.after(59) == "", "bytes were written: it is slow, it does not hang"
    said = talk.after(1)
    assert "[save_failed]" in said
    assert "[replan] [plan] Save" in said
    assert "took no byte for 60 s (TTP_STALL_S)" in talk.facts("save_failed")["text"]
    assert first in talk.incident.failures


@pytest.mark.parametrize("stage", ["saving", "committing"])
def test_storage_that_hangs_is_not_tried_by_one_rank_after_the_other(stage: str) -> None:
    """Where there is another place."""
    talk = fallback_world(stall_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    for order in talk.orders(m.Save) if stage == "committing" else ():
        talk.saved(order.rank)
    assert talk.machine.stage == stage
    said = talk.after(60)
    assert "[fallback] [plan] Save" in said and "[replan]" not in said
    assert {order.directory for order in talk.orders(m.Save)} == {"/spare"}
    talk.after(60)
    assert "[fallback]" not in line(talk.said), "there is no third place"
    assert {order.directory for order in talk.orders(m.Save)} == {"/spare"}


def test_a_commit_that_hangs_is_given_to_another() -> None:
    talk = Wide(stall_s=60.0)
    talk.fault(5)
    talk.frozen_all()
    for order in talk.orders(m.Save):
        said = talk.saved(order.rank)
    assert "Commit:0" in said
    assert "[commit_failed]" in talk.after(60)
    assert talk.orders(m.Commit)[0].rank != 0


# ------------------------------------------------------------------------------------------------------ redo and undo


def test_updates_are_redone_where_a_finished_version_is_not_whole_otherwise() -> None:
    talk = Talk(grid(2, 2))  # s0: 0 and 2, s1: 1 and 3
    talk.accuse(3, m.FaultKind.EXITED)
    talk.frozen(0, 8)
    talk.frozen(2, 8)
    said = talk.frozen(1, 7, has_gradient=True)
    assert "[plan] Save:0,1" in said
    orders = {o.rank: o for o in talk.orders(m.Save)}
    assert {r: (o.version, o.order.how) for r, o in orders.items()} == {0: (8, How.AS_IS), 1: (8, How.REDO)}


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
    """Version 7 is whole, 8 is finished and may be: who stands in the barrier answers at once, then from the gate."""
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


# -------------------------------------------------------------------------------------------------- replicas disagree


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


# ------------------------------------------------------------------------------------------------------------- hangs


class Hanging(Wide):
    """A job of one step a second, learnt, in which rank 3 stops in front of its forward pass."""

    def __init__(self) -> None:
        super().__init__(grid(1, 4), hang_s=10.0)
        for version in range(1, 31):
            self.now += 1
            for rank in range(4):
                self.beat(rank, version)
        self.hung_at = self.now
        for _ in range(3):
            self.now += 1
            for rank in range(4):
                self.beat(rank, 30, mark=0 if rank == 3 else 2)

    def go_on(self) -> str:
        """Beats until something is said."""
        for _ in range(40):
            self.now += 1
            for rank in sorted(self.machine.job.live):
                self.beat(rank, 30, mark=0 if rank == 3 else 2)
            due = self.machine.deadline()
            if due is not None and due <= self.now and (said := self.after(0)):
                return said
        return ""


def test_the_one_that_the_others_wait_for_is_named_and_its_stack_is_taken() -> None:
    talk = Hanging()
    assert talk.go_on() == "[opened] Freeze:0,1,2,3 [evidence] TakeStack:2"
    order = talk.orders(m.TakeStack)[0]
    assert (order.subject, order.pid) == (3, talk.machine.job.members[Rank(3)].hello.pid)
    assert talk.facts("evidence")["rank"] == 3
    assert talk.now - talk.hung_at < 20
    assert talk.report(2, m.StackTaken(Rank(2), talk.id, Rank(3), "File x")) == "[stack]"


def test_a_hang_that_is_real_ends_with_a_release() -> None:
    talk = Hanging()
    talk.go_on()
    talk.frozen_all(30, main_thread_blocked=True)
    for order in talk.orders(m.Save):
        talk.saved(order.rank)
    said = talk.committed(0)
    assert said == "[committed]", "a slow rank may still come to the gate"
    assert "Release(75):0,1,2,3" in talk.after(5)


def test_a_slow_rank_that_comes_to_the_gate_was_a_false_alarm() -> None:
    talk = Hanging()
    talk.go_on()
    talk.frozen_all(30, main_thread_blocked=True)
    for order in talk.orders(m.Save):
        talk.saved(order.rank)
    talk.committed(0)
    assert talk.frozen(3, 30) == "[retracted] [answer] Thaw:0,1,2,3 [thawed]"
    assert talk.machine.false_alarms == 1


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


# ------------------------------------------------------------------------------------------------------------- forged


@pytest.mark.parametrize("report", [m.StandbyUp(Rank(0), "x:1"), page(0), m.Probed(Rank(0), Rank(99), True, "")])
def test_what_nobody_asked_for_does_nothing(report: m.Report) -> None:
    talk = Talk(grid(1, 2))
    talk.report(0, report)
    stranger = Received(ConnectionId(77), report)
    assert talk.event(stranger) == ""
    assert talk.machine.incident is None
    assert hello(0, talk.layout).rank == 0


def test_savers_that_die_one_after_the_other_are_replaced_together() -> None:
    """A power cut takes hundreds of hosts, and their streams end within a second: a plan costs tens of milliseconds."""
    ranks = 202
    talk = Talk(grid(ranks // 2, 2))
    talk.fault(ranks - 1)
    for rank in range(ranks):
        talk.frozen(rank, 7)
    incident = talk.machine.incident
    assert incident is not None and incident.plan is not None
    plans = 0
    for rank in range(ranks // 2 - 1):
        plans += "[plan]" in talk.accuse(rank, m.FaultKind.EXITED)
        plans += "[plan]" in talk.after(0.005)
    assert plans < 16
    due = talk.machine.deadline()
    assert due is not None and due <= talk.now + REPLAN_MAX_S
    talk.after(due - talk.now)
    assert not incident.dropped and incident.stage.value == "saving"
    assert all(rank >= ranks // 2 - 1 for rank in incident.pending), "whoever is dead is asked for nothing"


def test_ten_thousand_answers_are_given_the_time_to_be_read() -> None:
    """They wait in the queue of one controller; who has not been read is not silent."""
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
