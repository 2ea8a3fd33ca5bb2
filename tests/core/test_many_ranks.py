"""What many ranks cost the controller: it may not do for each of them what takes time for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.core.talk import PATIENCE, Talk, Wide
from ttp.core import messages as m
from ttp.core.answer import Answer
from ttp.core.controller import planning
from ttp.core.controller.copy_counts import CopyCounts
from ttp.core.controller.events import LauncherSaid
from ttp.core.controller.frozen_ranks import FrozenRanks
from ttp.core.controller.membership import Member
from ttp.core.decide import NoPlan, Plan, decide
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.testing.scenario import grid


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry with each call of ``decide``, which counts more surely than seconds."""
    calls: list[int] = []

    def counted(layout: Layout, said: Iterable[Answer], *more: Any) -> Plan | NoPlan:
        calls.append(1)
        return decide(layout, said, *more)

    monkeypatch.setattr(planning, "decide", counted)
    return calls


def test_a_thousand_ranks_cost_constant_time_per_event(decided: list[int]) -> None:
    """No plan may be made after every answer of a thousand ranks."""
    talk = Talk(grid(10, 100))
    talk.lost(0)
    for rank in range(1, 1000):
        talk.frozen(rank, 8 if rank < 500 and rank % 10 else 7)
    assert talk.machine.stage == "saving"
    assert len(decided) <= 2


def test_no_plan_is_made_again_for_each_of_a_thousand_streams_that_end(decided: list[int]) -> None:
    """Half of a cluster is lost, with all copies of some shards: the streams end one by one, and each may come back."""
    talk = Talk(grid(500, 2))  # ranks 0 and 500 hold s0
    talk.lost(0)
    talk.lost(500)
    for rank in range(1, 1000):
        talk.frozen(rank, 7)
    assert talk.incident.waits_for == "a lost or silent rank may come back and complete a version"
    for rank in range(1, 400):
        talk.lost(rank)
    assert len(decided) <= 2
    due = talk.machine.deadline()
    assert due is not None and due <= talk.now + 0.05, "but soon"
    for rank in range(400):
        talk.back(rank, incident=talk.id, version=7)
        talk.frozen(rank, 7)
    assert "[plan]" in talk.after(0.05)
    assert len(decided) <= 4


def test_no_plan_is_made_again_for_each_of_a_thousand_newer_versions(decided: list[int]) -> None:
    """The ranks that were one update ahead were cut off, and come back while the older version is being saved."""
    talk = Talk(grid(500, 2))
    talk.fault(999)
    for rank in range(1000):
        talk.frozen(rank, 8 if rank < 500 else 7, together=True, has_preimage=True)
    talk.all_said()
    assert talk.incident.draft.plan and talk.incident.draft.plan.version == 8
    for rank in range(1, 500):
        talk.lost(rank)
    talk.after(0.05)
    assert talk.incident.draft.plan.version == 7
    for rank in range(1, 500):
        talk.back(rank, incident=talk.id, version=8)
    before = len(decided)
    for rank in range(1, 500):
        talk.frozen(rank, 8, together=True, has_preimage=True)
    talk.all_said()
    assert talk.incident.draft.plan.version == 8
    assert len(decided) - before <= 4


def test_no_rank_is_given_up_while_others_that_were_lost_with_it_come_back() -> None:
    """A controller on a busy host needs longer for their hellos than the grace lasts. Rank 0 has died."""
    talk = Talk(grid(1, 300))
    for rank in range(250):
        talk.lost(rank)
    for rank in range(1, 250):
        talk.now += 0.01
        talk.back(rank)
    assert not talk.machine.job.broken
    due = talk.machine.deadline()
    assert due == talk.now + PATIENCE.grace_s
    assert "[evidence]" not in talk.after(0.9) and not talk.machine.job.broken
    talk.after(0.2)
    assert talk.machine.job.broken == {0}


def test_ranks_that_are_known_to_be_dead_have_not_come_back() -> None:
    """Their launchers tell so one after the other. Those of hosts without power cannot, and have died as well."""
    talk = Talk(grid(1, 300))
    for rank in range(250):
        talk.lost(rank)
    for rank in range(100, 250):
        talk.now += 0.01
        talk.accuse(rank, m.FaultKind.EXITED)
    assert talk.machine.job.broken == {*range(250)}


def test_ranks_that_come_and_go_keep_no_dead_rank_alive() -> None:
    talk = Talk(grid(1, 300))
    for rank in range(250):
        talk.lost(rank)
    while not talk.machine.job.broken:
        talk.now += 0.5
        assert talk.now < 2 * PATIENCE.partition_s
        talk.back(1)
        talk.lost(1)


def test_savers_that_the_storage_refuses_at_once_are_replaced_together(decided: list[int]) -> None:
    """A plan for each of five thousand would take longer than TTP_OT, and the fallback directory would not be tried."""
    talk = Talk(grid(500, 2))
    talk.fault(0)
    talk.frozen_all(7, *range(1000))
    refused = {order.rank for order in talk.orders(m.Save)}
    for rank in refused:
        talk.save_failed(rank)
    talk.after(0.02)
    assert len(decided) <= 4
    pending = talk.incident.draft.pending
    assert len(pending) == len(refused) == 500 and pending.keys().isdisjoint(refused)


def calls_in(what: Callable[[], object]) -> int:
    """Return the number of calls of functions while ``what`` runs."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(before)
    return calls


def calls_of_a_burst(ranks: int) -> int:
    """Return the number of calls in the machine when every stream breaks and returns, and all is saved."""
    talk = Talk(Layout(ranks, grid(1, ranks).groups))

    def burst() -> None:
        for rank in range(ranks):
            talk.lost(rank)
        for rank in range(ranks):
            talk.back(rank)
        talk.fault(0)
        talk.frozen_all(7, *range(ranks))
        talk.after(0.01)
        talk.write()

    calls = calls_in(burst)
    assert talk.machine.stage == "released"
    return calls


def test_a_burst_of_returning_ranks_costs_each_of_them_the_same() -> None:
    """What runs after every event may not iterate over all lost, accused or writing ranks."""
    assert calls_of_a_burst(400) < 2.2 * calls_of_a_burst(200)


def calls_of_a_decision(shards: int) -> int:
    """Return the number of calls in a decision about shards of which the third copies differ and hold NaN."""
    layout = grid(shards, 3)
    answers = [
        Answer(Rank(r), Version(7), digests={Shard(f"s{r % shards}"): f"{r // (2 * shards)}"}, bad=r >= 2 * shards)
        for r in range(3 * shards)
    ]
    plans: list[Plan | NoPlan] = []
    calls = calls_in(lambda: plans.append(decide(layout, answers)))
    (plan,) = plans
    assert isinstance(plan, Plan) and len(plan.odd) == len(plan.assignments) == shards and "NaN" in plan.reason
    return calls


def test_a_decision_costs_each_shard_the_same() -> None:
    assert calls_of_a_decision(200) < 2.2 * calls_of_a_decision(100)


def calls_of_lost_savers(shards: int) -> int:
    """Return the number of calls in the machine when every saver is lost while it saves, the last one first."""
    talk = Talk(grid(shards, 2))
    talk.fault(0)
    for rank in range(2 * shards):
        talk.frozen(rank, 7)
    savers = sorted(talk.incident.draft.pending, reverse=True)
    assert len(savers) == shards

    def lose() -> None:
        for rank in savers:
            talk.lost(rank)

    return calls_in(lose)


def test_savers_that_are_lost_one_by_one_cost_each_the_same() -> None:
    assert calls_of_lost_savers(200) < 2.2 * calls_of_lost_savers(100)


def test_a_launcher_that_asks_for_the_verdict_costs_nothing_for_each_rank() -> None:
    """Each of a thousand launchers asks, within a second, and leaves with its own code if it gets no answer."""

    class Counted(dict[Rank, Member]):
        passes = 0

        def values(self) -> Any:
            self.passes += 1
            return super().values()

    talk = Wide(grid(1, 6))
    for rank in range(4):
        talk.goodbye(rank, m.GoodbyeReason.LEFT)
    talk.machine.job.members = counted = Counted(talk.machine.job.members)
    talk.event(LauncherSaid("h0", False, 75))
    assert talk.machine.unheard_hosts == ["h1"]
    assert counted.passes == 0


def test_the_text_that_all_ranks_get_does_not_grow_with_their_number() -> None:
    """A disk that is full fails every rank, and thousands of copies of a megabyte would not fit into memory."""
    talk = Talk(grid(1, 50))
    talk.fault(0)
    talk.frozen_all(7, *range(50))
    for _ in range(50):
        (order,) = talk.orders(m.Save)[:1]
        talk.save_failed(order.rank, order.generation)
    text = talk.orders(m.Release)[0].text
    assert "rank 0: disk full; rank 1: disk full; " in text and "; and 34 more ranks; shard 's0'" in text
    assert "rank 16" not in text


def test_the_newer_version_of_a_rank_that_cannot_save_ends_no_wait() -> None:
    ranks = FrozenRanks(CopyCounts(grid(1, 3)))
    ranks.fail(Rank(0), "disk full")
    for rank, version in (0, 8), (1, 7):
        ranks.accept([Rank(rank)], m.Frozen(Rank(rank), "i", Version(version), m.Phase.IDLE, final=True))
    assert not ranks.counts.newest_is_whole(dict)
