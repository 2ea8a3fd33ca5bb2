"""Second copies: which rank copies what, the messages about it, and that all ranks always have a common version."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.talk import Talk, apart
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.copy_messages import Copied, CopyTo, Settled
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.replication import NOBODY, Buddies, OwnCopies, keepers
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

ALONE = grid(4, 1)
"""Four ranks, each with a shard of its own."""


# -------------------------------------------------------------------------------------------------------------- keepers


@given(st.integers(1, 5), st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_every_shard_is_kept_by_one_of_its_group(world: int, drawn: list[set[int]]) -> None:
    groups = {
        Shard(f"s{i}"): tuple(Rank(r % world) for r in sorted({x % world for x in g})) for i, g in enumerate(drawn)
    }
    idle = tuple(Rank(r) for r in range(world) if not any(r in g for g in groups.values()))
    layout = Layout(world, {**groups, **({Shard("rest"): idle} if idle else {})})
    kept = keepers(layout)
    assert sorted(s for shards in kept.values() for s in shards) == sorted(layout.groups)
    for rank, shards in kept.items():
        assert all(rank in layout.groups[s] for s in shards)
    assert {layout.groups[s][0] for s in layout.unreplicated()} <= set(kept)


def test_replicated_shards_go_where_there_is_less_to_keep() -> None:
    layout = Layout(4, {Shard("dense"): tuple(map(Rank, range(4))), Shard("e0"): (Rank(0),), Shard("e1"): (Rank(1),)})
    assert keepers(layout) == {0: ("e0",), 1: ("e1",), 2: ("dense",)}


# ----------------------------------------------------------------------------------------------------------- controller


class Hosts(Talk):
    """Two ranks on each host; all of them keep second copies."""

    def __init__(self, layout: Layout = ALONE, *, per_host: int = 2, **more: Any) -> None:
        super().__init__(layout, joined=0)
        for r in range(layout.world_size):
            said = self.hello(r, host=f"h{r // per_host}", copies_at=f"h{r // per_host}:{7000 + r}", **more)
        self.formed = said

    def copied(self, rank: int, version: int, whole: int = 0, text: str = "") -> str:
        return self.report(rank, Copied(Rank(rank), Version(version), not text, text, Version(whole)))

    def keeps(self, rank: int, *copies: tuple[int, int], version: int = 17) -> str:
        return self.frozen(rank, version, kept=tuple(m.KeptCopy(Rank(of), Version(v)) for of, v in copies))


def test_every_rank_is_told_its_buddy_on_the_next_host() -> None:
    talk = Hosts()
    assert "[buddies] CopyTo:0,1,2,3" in talk.formed
    named = {o.rank: (o.buddy, o.address) for o in talk.orders(CopyTo)}
    assert named == {0: (2, "h1:7002"), 1: (3, "h1:7003"), 2: (0, "h0:7000"), 3: (1, "h0:7001")}
    assert "CopyTo:1" in talk.back(1, host="h0", copies_at="h0:7001")


def test_with_one_host_there_is_nobody_to_send_to() -> None:
    talk = Hosts(per_host=4)
    assert [(o.buddy, o.address) for o in talk.orders(CopyTo)] == [(NOBODY, "")] * 4


@pytest.mark.parametrize("keeping", [0, 3])
def test_not_every_rank_keeps_copies(keeping: int) -> None:
    talk = Talk(ALONE, joined=0)
    for r in range(4):
        said = talk.hello(r, copies_at="h:1" if r == keeping else "")
    assert "[no_buddies]" in said, "whoever came last"
    assert talk.facts("no_buddies")["ranks"] == [r for r in range(4) if r != keeping]
    assert "[no_buddies]" not in talk.back(keeping, copies_at="h:1"), "it is said once"


def test_a_version_is_whole_when_all_have_it() -> None:
    talk = Hosts()
    assert [talk.copied(r, 10) for r in (3, 0, 0, 1)] == ["", "", "", ""]
    assert talk.copied(2, 10) == "[copied] Settled:0,1,2,3"
    assert all(o.whole for o in talk.orders(Settled))
    assert talk.machine.copied_version == 10
    assert talk.copied(1, 10) == "Settled:1", "it did not hear it"


def test_one_that_fails_decides() -> None:
    talk = Hosts()
    talk.copied(0, 10)
    assert talk.copied(1, 10, text="shared memory is full") == "[not_copied] Settled:0,1,2,3"
    assert not any(o.whole for o in talk.orders(Settled))
    assert talk.facts("not_copied") == {"rank": 1, "version": 10, "text": "shared memory is full"}
    assert [talk.copied(r, 10) for r in (2, 3)] == ["Settled:2", "Settled:3"]
    assert not talk.orders(Settled)[0].whole
    assert talk.machine.copied_version == 0


def test_what_is_usual_is_not_recorded() -> None:
    talk = Hosts(grid(2, 1))
    said = [
        talk.copied(r, v, text=text) for v, text in ((10, ""), (20, ""), (30, "x"), (40, "x"), (50, "")) for r in (0, 1)
    ]
    assert [[w for w in line.split() if w.startswith("[")] for line in said[1::2] if "[" in line] == [["[copied]"]] * 2
    assert [line for line in said[0::2] if "[" in line] == ["[not_copied] Settled:0,1"]


def test_a_new_controller_learns_what_was_settled() -> None:
    knows = Hosts()
    assert knows.copied(0, 20, whole=10) == "[copied] Settled:0,1,2,3", "of 10, as it is said"
    assert knows.copied(1, 20, whole=20) == "Settled:0,1,2,3", "another controller has heard all of them"
    assert {(o.version, o.whole) for o in knows.orders(Settled)} == {(20, True)}
    gave_up = Hosts()
    gave_up.copied(0, 20, whole=10)
    assert gave_up.copied(1, 30, whole=10) == "Settled:0,1,2,3", "rank 1 has gone on without it"
    assert {(o.version, o.whole) for o in gave_up.orders(Settled)} == {(20, False)}


# -------------------------------------------------------------------------------------------------------------- rescues


def test_a_lost_rank_comes_back_from_the_copies() -> None:
    talk = Hosts()
    talk.accuse(3, m.FaultKind.EXITED)
    talk.keeps(0, (0, 10), (2, 10), (0, 20), (2, 20))
    talk.keeps(1, (1, 10), (3, 10), (1, 20))
    assert "[plan] Save:0,1,2" in talk.keeps(2, (2, 10), (0, 10), (1, 10), (3, 10), (0, 20))
    plan = talk.facts("plan")
    assert (plan["version"], set(plan["how"].values())) == (10, {"kept"})
    assert plan["reason"].endswith("from kept copies of s0, s1, s2, s3: 7 finished steps are lost")
    orders = {o.rank: o.order for o in talk.orders(m.Save)}
    assert sorted(s for o in orders.values() for s in o.kept) == ["s0", "s1", "s2", "s3"]
    assert not any(o.shards for o in orders.values())
    assert [r for r, o in orders.items() if o.job_state] == [0]
    assert {r: o.pages for r, o in orders.items() if o.pages} == {0: (0, 1), 2: (2, 3)}
    for rank in orders:
        talk.saved(rank)
    assert talk.orders(m.Commit)[0].missing_pages == ()
    assert talk.committed(talk.orders(m.Commit)[0].rank).startswith("[committed]")
    assert talk.incident.outcome == "saved version 10 from kept copies; 7 finished steps are lost"


def test_a_death_that_changes_nothing_of_the_plan_does_not_hide_what_is_lost() -> None:
    talk = Hosts()
    talk.accuse(3, m.FaultKind.EXITED)
    talk.keeps(2)
    talk.keeps(1, (1, 10), (3, 10))
    assert "[plan] Save:0,1" in talk.keeps(0, (0, 10), (2, 10))
    assert "[plan]" in talk.accuse(2, m.FaultKind.EXITED)
    assert talk.facts("plan")["reason"].endswith("from kept copies of s0, s1, s2, s3: 7 finished steps are lost")
    talk.saved(0, generation=1)
    assert "[commit] Commit:0" in talk.saved(1, generation=1)
    talk.committed(0, generation=1)
    assert talk.incident.outcome == "saved version 10 from kept copies; 7 finished steps are lost"


@pytest.mark.parametrize("first", [0, 1], ids=["seen before it was dropped", "said before"])
def test_a_copy_that_its_owner_has_dropped_is_not_asked_for(first: int) -> None:
    talk = Hosts()
    talk.accuse(3, m.FaultKind.EXITED)
    answers = {
        0: lambda: talk.keeps(0, (0, 10), (1, 10), (3, 10), (0, 20), (1, 20), (3, 20), version=27),
        1: lambda: talk.keeps(1, (0, 20), (1, 20), (3, 20), version=27),
    }
    answers[first]()
    answers[1 - first]()
    assert "Release(70)" in talk.keeps(2, (2, 10), version=27)
    assert "s0 [10, 20], s1 [20], s2 [10]" in talk.orders(m.Release)[0].text


def test_who_was_told_to_go_on_is_not_taken_for_the_version_that_it_leaves() -> None:
    talk = Hosts(grid(2, 1))
    talk.fault(0)
    talk.keeps(0, (0, 17), version=18)
    copies = (m.KeptCopy(Rank(0), Version(17)),)
    assert "Save:0,1" in talk.frozen(1, 17, has_gradient=True, kept=copies)
    assert {o.rank: o.order.how for o in talk.orders(m.Save)}[Rank(1)] is How.REDO
    assert "Save" not in talk.save_failed(0), "version 17 of shard 1 may be gone at any moment"
    assert "Save" not in talk.frozen(1, 17, has_gradient=True, kept=copies), "said before it was told"
    assert "Release(70)" in talk.frozen(1, 18, kept=copies)


def test_who_was_told_to_go_on_and_comes_back_on_another_stream_is_told_again() -> None:
    talk = Hosts(grid(2, 1))
    talk.fault(0)
    talk.frozen(0, 18)
    talk.frozen(1, 17, has_gradient=True)
    assert "Save:1" in talk.back(1, host="h0", copies_at="h0:7001", incident=talk.id)
    talk.saved(0)
    talk.frozen(1, 17, has_gradient=True)
    talk.frozen(1, 18)
    assert "Commit" in talk.saved(1)


def test_a_lost_host_comes_back_from_its_buddies() -> None:
    talk = Hosts()
    for rank in (2, 3):
        talk.accuse(rank, m.FaultKind.EXITED)
    talk.keeps(0, (0, 10), (2, 10))
    talk.keeps(1, (1, 10), (3, 10))
    orders = {o.rank: o.order for o in talk.orders(m.Save)}
    assert {r: (o.kept, o.pages) for r, o in orders.items()} == {0: (("s0", "s2"), (0, 1, 2)), 1: (("s1", "s3"), (3,))}


def test_a_suspect_that_comes_back_saves_the_steps() -> None:
    talk = Hosts()
    talk.lost(3)
    for rank in range(3):
        assert "[plan]" not in talk.keeps(rank, *((of, 10) for of in range(4))), "the fourth may still come back"
    talk.ask()
    talk.back(3, host="h1", incident=talk.id, version=17)
    assert "[plan] Save:0,1,2,3" in talk.keeps(3)
    assert (talk.facts("plan")["version"], talk.facts("plan")["how"]) == (17, {})


def test_a_saver_of_copies_is_replaced_by_one_that_has_them_too() -> None:
    talk = Hosts(per_host=4)
    talk.accuse(3, m.FaultKind.EXITED)
    for rank in range(3):
        talk.keeps(rank, *((of, 10) for of in range(4)))
    first = {o.rank: o.order.kept for o in talk.orders(m.Save)}
    talk.saved(0)
    talk.save_failed(1)
    again = {o.rank: o.order.kept for o in talk.orders(m.Save)}
    assert set(first[Rank(1)]) <= {s for kept in again.values() for s in kept}
    assert 1 not in again
    assert not set(first[Rank(0)]) & {s for kept in again.values() for s in kept}


# -------------------------------------------------------------------------------------------------------- fates, played


class Played:
    """Ranks with their machines and copies, a controller that may be replaced, and a network that reorders messages.

    Invariant: after a version was copied by all, every rank holds at every moment a copy of one common version.
    """

    def __init__(self, seed: int, world: int, every: int) -> None:
        self.rng = random.Random(seed)
        self.world, self.every = world, every
        self.layout = grid(world, 1)
        self.terms = 0
        self.machines = [ProcessorMachine(hello(r, self.layout), ev.RankTimeouts(), 0.0) for r in range(world)]
        self.copies = [OwnCopies() for _ in range(world)]
        self.held: list[set[Version]] = [set() for _ in range(world)]  # copies that are stored and not dropped
        self.making: list[Version | None] = [None] * world
        self.versions = [0] * world
        self.ups: list[deque[Copied]] = []
        self.downs: list[deque[m.Order]] = []
        self.had_whole = False
        self.take_over()

    def take_over(self) -> None:
        """Lose all messages; then ranks join another controller, or the same one after its streams broke."""
        self.terms += 1
        self.job = Membership()
        self.outbox = Outbox(self.job)
        self.buddies = Buddies(self.job, self.outbox)
        self.ups = [deque() for _ in range(self.world)]
        self.downs = [deque() for _ in range(self.world)]
        for r, machine in enumerate(self.machines):
            more = {"incarnation": machine.incarnation, "copies_at": "x:1"}
            said = hello(r, self.layout, **more)
            if not self.job.members:
                self.job.learn(self.layout)
                self.job.start_incarnation(said)
            self.job.term = self.terms
            self.job.join(ConnectionId(r + 1), said, 0.0)
            if self.terms > 1:
                self.event(r, ev.StreamDown("broken"))
            self.event(r, ev.StreamUp())
            self.event(r, ev.OrderReceived(m.Welcome(Rank(r), self.terms, 1, "1")))

    def event(self, r: int, event: ev.Event) -> None:
        for action in self.machines[r].on_event(event, 0.0):
            if isinstance(action, act.Send) and isinstance(action.report, Copied):
                self.ups[r].append(action.report)
            elif isinstance(action, act.SettleCopy):
                gone = self.copies[r].settle(action.version, whole=action.whole)
                self.held[r] -= {gone}

    def step(self, calm: bool = False) -> None:
        moves: list[tuple[str, int]] = [("up", r) for r in range(self.world) if self.ups[r]]
        moves += [("down", r) for r in range(self.world) if self.downs[r]]
        moves += [("made", r) for r in range(self.world) if self.making[r] is not None]
        moves += [("train", r) for r in range(self.world) if self.versions[r] == min(self.versions)]
        move, r = self.rng.choice(moves)
        if not calm and self.rng.random() < 0.01:
            self.take_over()
        else:
            getattr(self, move)(r, calm)
        self.check()

    def up(self, r: int, _: bool) -> None:
        self.buddies.copied(self.ups[r].popleft())
        for action in apart(self.outbox.take()):
            order = getattr(action, "order", None)
            if order is not None:
                self.downs[order.rank].append(order)

    def down(self, r: int, _: bool) -> None:
        self.event(r, ev.OrderReceived(self.downs[r].popleft()))

    def made(self, r: int, calm: bool) -> None:
        version, self.making[r] = self.making[r], None
        assert version is not None
        stored = calm or self.rng.random() < 0.8
        if stored:
            self.held[r].add(version)
        self.event(r, ev.CopyMade(version, stored, "" if stored else "no space"))

    def train(self, r: int, _: bool) -> None:
        self.versions[r] += 1
        version = Version(self.versions[r])
        if version % self.every == 0:
            if self.copies[r].begin(version):
                self.making[r] = version
            else:
                self.event(r, ev.CopySkipped(version))

    def check(self) -> None:
        assert all(len(held) <= 2 for held in self.held)
        common = set.intersection(*self.held)
        self.had_whole = self.had_whole or bool(common)
        assert common or not self.had_whole, (self.held, self.versions)


@pytest.mark.parametrize("seed", range(60))
def test_there_is_always_a_version_that_all_hold(seed: int) -> None:
    played = Played(seed, world=2 + seed % 3, every=1 + seed % 4)
    for _ in range(400):
        played.step()
    before = played.versions[0]
    for _ in range(3000):
        played.step(calm=True)
        if any(version > before for version in set.intersection(*played.held)):
            return
    raise AssertionError("no copy ever becomes whole again")


def test_a_turn_is_skipped_while_the_last_one_is_open() -> None:
    machine = ProcessorMachine(hello(1, ALONE), ev.RankTimeouts(), 0.0)
    said: list[Copied] = []

    def event(event: ev.Event) -> list[str]:
        did = machine.on_event(event, 0.0)
        said.extend(a.report for a in did if isinstance(a, act.Send) and isinstance(a.report, Copied))
        return [type(a).__name__ for a in did]

    event(ev.StreamUp())
    event(ev.OrderReceived(m.Welcome(Rank(1), 1, 1, "1")))
    event(ev.CopySkipped(Version(20)))
    assert said == [], "version 10 is being copied"
    event(ev.CopyMade(Version(10), True))
    assert event(ev.OrderReceived(Settled(Rank(1), 1, Version(10), True))) == ["SettleCopy", "Send"]
    assert [(c.version, c.stored, c.whole) for c in said] == [(10, True, 0), (20, False, 10)]
    assert said[1].text == "the copy of version 10 was not finished yet"
    assert event(ev.OrderReceived(Settled(Rank(1), 1, Version(20), False))) == []


def test_orders_of_kept_copies_need_no_state_of_that_version() -> None:
    machine = ProcessorMachine(hello(1, ALONE), ev.RankTimeouts(), 0.0)
    for event in (
        ev.StreamUp(),
        ev.OrderReceived(m.Welcome(Rank(1), 1, 1, "1")),
        ev.OrderReceived(m.Freeze(Rank(1), 1, "i", "why", False)),
    ):
        machine.on_event(event, 0.0)
    copies = (m.KeptCopy(Rank(1), Version(10)), m.KeptCopy(Rank(3), Version(10)))
    quiet = ev.Quiet(Version(17), m.Phase.TORN, False, True, kept=copies)
    frozen = [a.report for a in machine.on_event(quiet, 0.0) if isinstance(a, act.Send)]
    assert isinstance(frozen[0], m.Frozen) and frozen[0].kept == copies
    order = m.SaverOrder(Rank(1), (), How.AS_IS, (Rank(1),), True, kept=(Shard("s1"),))
    save = m.Save(Rank(1), 1, "i", 0, Version(10), "draft", order)
    assert act.StartSave(save) in machine.on_event(ev.OrderReceived(save), 0.0)


def test_buddies_are_even() -> None:
    talk = Hosts(grid(6, 1), per_host=4)
    load = Counter(o.buddy for o in talk.orders(CopyTo))
    assert load == {4: 2, 5: 2, 0: 1, 1: 1}
