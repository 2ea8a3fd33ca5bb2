"""Hosts that fall silent: looked at, doubted, saved without them, and never released for a doubt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import PATIENCE, Talk, line
from ttp.core import messages as m
from ttp.core.controller.events import TIMER_LATE_S, Action, LookAt, LookedAt
from ttp.core.controller.incident import Stage
from ttp.core.controller.page_collectors import AGAIN_MIN_S, PAGES_S
from ttp.core.controller.saving import LATE_S as LATE_VOTES_S
from ttp.core.controller.silence import LOOK_S
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

assert PATIENCE.quiet_s is not None
QUIET_S: float = PATIENCE.quiet_s
DOUBT_S = PATIENCE.doubt_s


class Hosts(Talk):
    """Three hosts of two ranks; the controller is on the first. Its clock stops at every deadline, like a real one."""

    def __init__(self, layout: Layout | None = None, **more: Any) -> None:
        super().__init__(layout or grid(1, 6), joined=0)
        self.down: set[str] = set()
        self.down_at = 0.0
        for r in range(self.layout.world_size):
            self.hello(r, host=self.host(r), **more)

    def host(self, rank: int) -> str:
        return "h" if rank < 2 else f"h{rank // 2}"

    def beat(self, rank: int, version: int = 0) -> str:
        return self.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE, 0, "", 0))

    def cut(self, *hosts: str) -> None:
        self.down, self.down_at = set(hosts), self.now

    def passes(self, seconds: float, *silent: str) -> list[Action]:
        """Let time pass. Other hosts' ranks beat unless ``silent``; the kernel reports the hosts that are ``down``."""
        said: list[Action] = []
        end, beat_at = self.now + seconds, self.now + 1.0
        while True:
            due = self.machine.deadline()
            self.now = min(end, beat_at, max(self.now, due) if due is not None else end)
            if self.now == beat_at:
                beat_at += 1.0
                for rank in sorted(self.machine.job.live):
                    if self.host(rank) not in self.down | set(silent):
                        self.beat(rank)
                        said += self.said
            if due is not None and due <= self.now:
                self.after(0)
                said += self.said
            for look in [action for action in self.said if isinstance(action, LookAt)]:
                age_s = self.now - self.down_at if look.host in self.down else 0.0
                self.event(LookedAt(look.host, age_s))
                said += self.said
            if self.now >= end:
                return said


def looks(said: list[Action]) -> list[str]:
    return [action.host for action in said if isinstance(action, LookAt)]


def test_a_job_that_beats_is_not_looked_at() -> None:
    talk = Hosts()
    assert looks(talk.passes(10)) == []
    assert talk.machine.incident is None


def in_doubt(layout: Layout | None = None, **more: Any) -> Hosts:
    """Return a job of which the second host is cut off, for long enough to be noticed."""
    talk = Hosts(layout, **more)
    talk.passes(3)
    talk.cut("h1")
    talk.passes(DOUBT_S + LOOK_S)
    return talk


def test_a_host_that_is_cut_off_is_in_doubt_and_the_others_save_at_once() -> None:
    talk = in_doubt()
    assert talk.machine.incident is not None
    assert (
        "rank 2 on h1" in talk.machine.incident.cause
        and "nothing has come from its host" in talk.machine.incident.cause
    )
    assert talk.machine.job.silent == {2, 3}
    talk.frozen_all(7, 0, 1, 4, 5)
    assert talk.machine.stage == "saving", "nobody waits for those of whom nothing comes"
    savers = [order.rank for order in talk.orders(m.Save)]
    assert savers and not {2, 3} & set(savers)
    talk.write()
    assert talk.machine.incident.stage is Stage.SAVED
    talk.passes(6)
    assert talk.incident.stage is Stage.SAVED, "a doubt releases nobody"


def saved_in_doubt() -> Hosts:
    talk = in_doubt()
    talk.frozen_all(7, 0, 1, 4, 5)
    talk.write()
    return talk


def test_when_it_is_heard_again_all_go_on() -> None:
    talk = saved_in_doubt()
    talk.cut()
    assert "[heard_again]" in (said := talk.beat(2)) and "[thawed]" in said and "Thaw:0,1,2,3,4,5" in said
    assert talk.machine.incident is None and not talk.machine.job.silent
    assert talk.machine.rescue.false_alarms == 1
    assert talk.frozen(3, 7) == "Thaw:3", "its answer came late"


def test_one_word_is_enough_for_all_ranks_of_the_host() -> None:
    talk = saved_in_doubt()
    talk.beat(3)
    assert talk.machine.incident is None


def broken_and_saved_in_doubt() -> Hosts:
    """Return a job that has to end, and of which the second host comes back after the commit."""
    talk = in_doubt()
    talk.fault(0)
    talk.frozen_all(7, 0, 1, 4, 5)
    talk.write()
    talk.cut()
    assert talk.beat(2) == "[heard_again] [retracted] Freeze:2 [retracted] Freeze:3"
    return talk


def test_pages_that_come_back_after_the_commit_are_saved_before_the_release() -> None:
    """Its ranks live, but the checkpoint was made while they were cut off: their random streams would begin anew."""
    talk = broken_and_saved_in_doubt()
    assert talk.frozen(2, 7) == "[answer]", "rank 3 is still asked"
    assert talk.frozen(3, 7) == "[answer] [plan] Save:1,2,4"
    orders = talk.orders(m.Save)
    assert {order.rank: order.order.pages for order in orders} == {1: (0, 1), 2: (2, 3), 4: (4, 5)}
    for order in orders:
        talk.saved(order.rank, order.generation)
    (commit,) = talk.orders(m.Commit)
    assert (commit.version, commit.missing_pages) == (7, ())
    assert "Release(75):0,1,2,3,4,5" in talk.committed(commit.rank, commit.generation)


def test_if_they_cannot_be_saved_the_checkpoint_without_them_will_do() -> None:
    talk = broken_and_saved_in_doubt()
    talk.frozen_all(7, 2, 3)
    said = [talk.save_failed(order.rank, order.generation, may_pass=True) for order in talk.orders(m.Save)]
    assert "Release(75)" in "".join(said)


def test_who_comes_back_without_the_version_or_does_not_answer_is_not_waited_for() -> None:
    talk = broken_and_saved_in_doubt()
    talk.frozen(2, 6)
    assert "Release(75)" in talk.frozen(3, 6)
    talk = broken_and_saved_in_doubt()
    assert any(isinstance(getattr(said, "order", None), m.Release) for said in talk.passes(PATIENCE.answer_s + 0.1))


def saved_with_one_behind(talk: Hosts, *ranks: int) -> None:
    """Let a job save that has to end. With its two versions the newest one is known, whatever others answer."""
    talk.fault(ranks[0])
    orders: list[m.Save] = []
    for rank in ranks:
        talk.frozen(rank, 7 - (rank == ranks[0]))
        orders += talk.orders(m.Save)
    for order in orders:
        talk.saved(order.rank, order.generation)
    talk.write()


def test_a_rank_that_is_asked_later_than_others_has_its_own_time_to_answer() -> None:
    talk = in_doubt()
    saved_with_one_behind(talk, 0, 1, 4, 5)
    talk.cut()
    assert "Freeze:2 [retracted] Freeze:3" in talk.beat(2)
    talk.passes(0.8 * PAGES_S)
    talk.lost(3)
    assert "Freeze:3" in talk.back(3, host="h1", incident=talk.id)
    talk.passes(0.8 * PAGES_S)
    assert talk.machine.stage == "saved"
    assert "Release(75)" in line(talk.passes(0.3 * PAGES_S))


@pytest.mark.parametrize("committing", [False, True])
def test_a_save_with_their_pages_takes_no_longer_than_all_before_it(*, committing: bool) -> None:
    """The checkpoint exists: a storage that has become slow may not keep the job from its restart for ``TTP_OT``."""
    talk = broken_and_saved_in_doubt()
    talk.frozen_all(7, 2, 3)
    if committing:
        for order in talk.orders(m.Save):
            talk.saved(order.rank, order.generation)
    lasted_s = talk.now - talk.incident.opened_at
    assert "Release(75)" in line(talk.passes(max(lasted_s, AGAIN_MIN_S) + 0.1))


def test_a_save_that_took_too_long_is_not_begun_once_more_for_another_host() -> None:
    talk = Hosts()
    talk.passes(3)
    talk.cut("h1", "h2")
    talk.passes(DOUBT_S + LOOK_S)
    saved_with_one_behind(talk, 0, 1)
    talk.cut()
    for rank in (2, 4):
        talk.beat(rank)
    talk.frozen_all(7, 4, 5)
    talk.passes(PAGES_S)
    for rank, order in sorted(talk.incident.draft.pending.items()):
        talk.saved(rank, order.generation)
    talk.passes(LATE_VOTES_S)
    assert talk.machine.stage == "committing"
    talk.frozen_all(7, 2, 3)
    lasted_s = talk.now - talk.incident.opened_at
    assert "Release(75)" in line(talk.passes(max(lasted_s, AGAIN_MIN_S) + 0.1))


def test_a_storage_that_takes_no_more_is_not_left_for_the_fallback_directory() -> None:
    talk = in_doubt(fallback_dir="/fallback")
    talk.fault(0)
    talk.frozen_all(7, 0, 1, 4, 5)
    talk.write()
    talk.cut()
    talk.beat(2)
    talk.frozen_all(7, 2, 3)
    for order in talk.orders(m.Save):
        talk.saved(order.rank, order.generation)
    said = ""
    while commits := talk.orders(m.Commit):
        said += talk.commit_failed(commits[0].rank, commits[0].generation, may_pass=True)
    assert "[fallback]" not in said and "[retry]" not in said and "Release(75)" in said


def test_a_rank_that_came_back_in_an_update_is_waited_for_a_moment_if_it_cannot_have_a_newer_version() -> None:
    talk = in_doubt()
    saved_with_one_behind(talk, 0, 1, 4, 5)
    talk.cut()
    talk.beat(2)
    for rank in (2, 3):
        talk.frozen(rank, 6, m.Phase.UPDATING)
    assert talk.machine.stage == "saved"
    assert "Release(75)" in line(talk.passes(PAGES_S + 0.1))


def test_when_its_streams_end_the_grace_decides() -> None:
    talk = saved_in_doubt()
    talk.lost(2)
    assert talk.machine.job.silent == {3}, "one is known to be lost, of the other it is not known"
    talk.lost(3)
    assert talk.incident.stage is Stage.SAVED
    said = talk.passes(PATIENCE.grace_s)
    assert any(isinstance(getattr(action, "order", None), m.Release) for action in said)


def test_streams_that_end_and_come_back_leave_nothing() -> None:
    talk = saved_in_doubt()
    for rank in (2, 3):
        talk.lost(rank)
    for rank in (2, 3):
        talk.back(rank, host="h1")
        talk.frozen(rank, 7)
    assert talk.machine.incident is None


def test_a_version_that_only_the_silent_have_is_waited_for() -> None:
    talk = in_doubt(Layout(6, {Shard("a"): tuple(map(Rank, (0, 1, 4, 5))), Shard("b"): (Rank(2), Rank(3))}))
    talk.frozen_all(7, 0, 1, 4, 5)
    talk.passes(6)
    assert talk.machine.stage == "freezing", "nothing is given up for a doubt"
    talk.cut()
    talk.beat(2)
    assert talk.machine.stage == "training", "everybody is there"


def test_another_fault_is_saved_without_waiting_for_the_silent() -> None:
    talk = in_doubt()
    talk.fault(0)
    talk.frozen_all(7, 0, 1, 4, 5)
    talk.write()
    talk.passes(2)
    assert talk.machine.stage == "saved"
    talk.cut()
    talk.beat(2)
    assert talk.machine.stage == "saved", "they are asked for what they have"
    talk.frozen_all(7, 2, 3)
    assert talk.machine.stage == "saving", "their pages were not at hand before"
    talk.write()
    assert talk.machine.stage == "released"


def test_a_saver_that_falls_silent_is_replaced() -> None:
    talk = Hosts()
    talk.passes(3)
    talk.fault(0)
    talk.frozen_all(7, 1, 2, 3, 4, 5)
    talk.frozen_all(7, 0)
    asked = {order.rank for order in talk.orders(m.Save)}
    silent = next(rank for rank in asked | {Rank(2)} if rank > 1)
    talk.cut(talk.host(silent))
    talk.passes(DOUBT_S + LOOK_S)
    assert talk.machine.incident is not None
    assert talk.host(silent) not in {talk.host(rank) for rank in talk.machine.incident.draft.pending}


def test_ranks_that_say_nothing_on_a_host_that_answers_are_no_evidence() -> None:
    talk = Hosts()
    talk.passes(3)
    said = talk.passes(60, "h1")
    assert set(looks(said)) == {"h1"}
    assert talk.machine.incident is None


def test_where_nothing_can_be_known_nothing_is_believed() -> None:
    talk = Hosts()
    talk.now += QUIET_S
    assert [action.host for action in (talk.after(0), talk.said)[1] if isinstance(action, LookAt)] == ["h1", "h2"]
    talk.event(LookedAt("h1", None))
    talk.event(LookedAt("h2", 0.0))
    assert set(looks(talk.passes(20, "h1", "h2"))) == {"h2"}
    assert talk.machine.incident is None


@pytest.mark.parametrize("quiet", [(), ("h1",)], ids=["all are heard", "one is looked at"])
def test_a_controller_that_was_stopped_gives_everybody_time(quiet: tuple[str, ...]) -> None:
    talk = Hosts()
    talk.passes(3, *quiet)
    talk.now += QUIET_S + TIMER_LATE_S + 10
    talk.after(0)
    due = talk.machine.deadline()
    assert looks(talk.said) == [] and due is not None and due >= talk.now + QUIET_S
    assert looks(talk.passes(QUIET_S, "h1")) == ["h1"], "later"
    talk.event(LookedAt("h1", 12.0))
    assert talk.machine.incident is None, "nobody has asked"


@pytest.mark.parametrize("comes", [True, False])
def test_a_controller_that_was_stopped_reads_what_has_come_before_it_ends_a_doubt(comes: bool) -> None:
    talk = saved_in_doubt()
    talk.now += PATIENCE.doubt_max_s + TIMER_LATE_S + 5
    assert talk.after(0) == "" and talk.machine.job.silent == {2, 3}
    assert "[thawed]" in talk.beat(2) if comes else "[released]" in talk.after(LOOK_S)


def test_a_controller_that_was_stopped_does_not_shorten_a_doubt() -> None:
    talk = saved_in_doubt()
    talk.now += QUIET_S + TIMER_LATE_S + 0.1
    talk.after(0)
    talk.passes(2 * LOOK_S)
    assert talk.machine.job.silent == {2, 3} and talk.machine.stage == "saved"


@pytest.mark.parametrize("lost", [True, False])
def test_an_answer_about_a_host_that_was_heard_or_lost_meanwhile_is_out_of_date(lost: bool) -> None:
    talk = Hosts()
    talk.now += QUIET_S
    talk.after(0)
    assert looks(talk.said) == ["h1", "h2"]
    for rank in (2, 3):
        talk.lost(rank) if lost else talk.beat(rank)
    assert talk.event(LookedAt("h1", 99.0)) == "" and not talk.machine.job.silent


def test_a_doubt_has_an_end() -> None:
    talk = saved_in_doubt()
    talk.passes(PATIENCE.doubt_max_s)
    assert talk.machine.stage == "released"


def test_a_job_that_forms_has_nothing_to_lose() -> None:
    talk = Hosts()
    other = Talk(grid(1, 3), joined=0)
    other.hello(0, host="far")
    other.after(0)
    other.now = QUIET_S
    other.after(0)
    other.event(LookedAt("far", 50.0))
    assert other.machine.incident is None and talk.machine.incident is None


def test_a_doubt_that_is_over_before_it_is_saved_costs_an_answer() -> None:
    talk = in_doubt()
    talk.cut()
    said = talk.beat(2)
    assert "Freeze:2" in said and "Freeze:3" in said
    assert talk.machine.stage == "training"


def test_the_rank_says_hello_from_another_host() -> None:
    talk = Hosts()
    for rank in (2, 3):
        talk.streams[rank] += 100
        talk.report(rank, hello(rank, talk.layout, host="h9", incarnation=1, resume=True, term_seen=1))
    assert {*looks(talk.passes(QUIET_S + 1, "h1"))} == {"h9"}, "nobody is left on its former host"
