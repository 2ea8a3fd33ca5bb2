"""The controller's own host falls silent: a standby saves meanwhile, without leading. With the timeouts of real
jobs.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from tests.core.rank_talk import FROZEN, ME, Rank1
from tests.core.seeds import seeds
from tests.core.talk import PATIENCE, Talk
from tests.core.test_simulated_silence import HOSTS, KEEPALIVE_S, Played, play
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, ControllerTimeouts, Received
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import events as ev
from ttp.core.rank.stand_in import LATE_S, LOOK_S
from ttp.testing import simulation
from ttp.testing.scenario import Fault, grid

HOME, NEXT = Rank(0), Rank(2)
PATIENT_S = 120.0
"""Of launchers where saves take long."""
LONG = 140
"""Steps of a job that does not end meanwhile."""
BUDGET_S = 3.6
"""From the silence to a durable checkpoint: two seconds of doubt, and the others may come up to a second later."""


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["power", "silence"])
def test_what_the_others_hold_is_durable_long_before_the_controller_is_given_up(
    kind: str, shards: int, relays: bool
) -> None:
    took: list[float] = []
    for seed in range(4):
        at = 0.5 + 0.13 * seed
        played = play(seed, Fault(kind, at, HOME, lasts_s=15), shards=shards, relays=relays)
        took.append(played.when(r"-m\] committed")[0] - at)
        assert played.exits[-1] == [0] * 6
        released = min(played.when(r"\] released"), default=float("inf"))
        assert released >= at + KEEPALIVE_S - 1, "nobody is released before it is sure"
    assert max(took) <= BUDGET_S, took


def second_fault(chance: random.Random, at: float) -> Fault:
    """Return a fault at a time when the controller is silent or is heard again."""
    kind = chance.choice(("silence", "silence", "controller_stop", "stop", "silent"))
    rank = Rank(chance.randrange(len(HOSTS)))
    return Fault(kind, at + chance.uniform(-0.5, 3.5), rank, lasts_s=chance.uniform(0.2, 2.0))


def soak(seeds: range) -> Counter[str]:
    """Play healthy jobs whose controller's host is silent for up to three seconds, with more faults at that time."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(f"controller silent {seed}")
        at = chance.uniform(0.6, 2.0)
        first = Fault("silence", at, HOME, lasts_s=chance.uniform(0.2, 3.2))
        more = [second_fault(chance, at) for _ in range(chance.randint(0, 2))]
        played = play(seed, first, *more, shards=chance.choice((1, 2, 3)), steps=LONG, relays=seed % 3 == 0)
        assert played.exits == [[0] * 6], f"seed {seed}: a healthy job was restarted"
        assert not played.when(r"\] released"), f"seed {seed}"
        seen += Counter(jobs=1, meanwhile=len(played.when(r"-m\] opened")), thaws=len(played.when(r"-m\] thawed")))
    return seen


@seeds(15, 6000)
def test_a_controller_that_is_heard_again_leads_on_and_nobody_is_restarted(seeds: range) -> None:
    seen = soak(seeds)
    print(dict(seen))
    assert seen["meanwhile"] == seen["thaws"] > 0


@pytest.mark.parametrize("kind", ["power", "kill", "silence"])
def test_where_the_standby_is_lost_too_what_is_left_is_saved(kind: str) -> None:
    for seed in range(6):
        at = 0.6 + 0.11 * seed
        both = Fault("power", at, HOME), Fault(kind, at + 2.0 + 0.2 * seed, NEXT, lasts_s=15)
        played = play(seed, *both)
        assert played.exits[-1] == [0] * 6
        assert played.when(r"\] committed"), f"seed {seed}"


# --------------------------------------------------------------------------- saves that take longer than the takeover


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers wait as long as ``TTP_OT`` makes them."""
    monkeypatch.setattr(simulation, "PATIENCE_OF_LAUNCHER_S", PATIENT_S)


def slow(seconds: float, ranks: int = len(HOSTS)) -> list[Fault]:
    """Return faults that make each file of these ranks take so many seconds longer."""
    return [Fault("slow", 0.0, Rank(rank), lasts_s=seconds) for rank in range(ranks)]


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["power", "silence"])
def test_a_save_that_takes_long_ends_in_the_middle_of_the_takeover_and_is_taken_over(
    kind: str, shards: int, relays: bool
) -> None:
    long_s = 3.5
    for seed in range(4):
        at = 0.5 + 0.13 * seed
        played = play(seed, Fault(kind, at, HOME, lasts_s=30), *slow(long_s), shards=shards, relays=relays)
        assert played.exits[-1] == [0] * 6
        (durable, *_) = played.when(r"\] committed")
        files, commit = 2, 1  # of the slowest saver
        assert durable <= at + BUDGET_S + (files + commit) * long_s, f"seed {seed}: it was begun again"
        newest = re.findall(r"-m\] committed .*'version': (\d+)", played.trace)
        assert newest, f"seed {seed}: the takeover has saved"
        assert len(played.when(r"-m\] opened")) == 1
        again = re.findall(r"(?<!-m)\] committed .*'version': (\d+)", played.trace)
        cut_off = kind == "silence"  # there the old controller lives, and does what it can with its own host
        assert cut_off or all(int(version) > int(newest[0]) for version in again), (
            "what is on disk is not written again"
        )
        released = min(played.when(r"\] released"), default=float("inf"))
        assert released >= durable


@pytest.mark.parametrize("kind", ["power", "kill", "silence"])
def test_where_the_standby_is_lost_while_it_saves_long_what_is_left_is_saved(kind: str) -> None:
    for seed in range(0, 8, 2):
        at, later_s = 0.6 + 0.11 * seed, 4.0 + 0.9 * seed
        both = Fault("power", at, HOME), Fault(kind, at + later_s, NEXT, lasts_s=30)
        played = play(seed, *both, *slow(1.5))
        assert played.exits[-1] == [0] * 6
        assert played.when(r"\] committed"), f"seed {seed}"


def lose_the_controller(seed: int) -> Played:
    """Play a loss of the controller, for ever or for long, with saves of up to about twelve seconds and more faults."""
    chance = random.Random(f"controller lost {seed}")
    at = chance.uniform(0.6, 2.0)
    first = Fault(chance.choice(("power", "power", "silence")), at, HOME, lasts_s=chance.choice((9.0, 11.0, 30.0)))
    kinds = ("kill", "kill", "silence", "flap", "stop", "controller", "controller_stop", "relay", "partition", "save")
    more = [
        Fault(
            chance.choice(kinds), at + chance.uniform(1.0, 14.0), Rank(chance.randrange(6)),
            lasts_s=chance.uniform(0.1, 3.0),
        )
        for _ in range(chance.choice((0, 1, 1, 2)))
    ]  # fmt: skip
    disks = slow(chance.choice((0.5, 1.0, 2.0, 3.5)), chance.randint(2, 6))
    if chance.random() < 0.2:
        disks.append(Fault(chance.choice(("write", "commit")), 0.0, Rank(chance.randrange(6)), lasts_s=1.0))
    shards, relays = chance.choice((1, 2, 3)), chance.random() < 0.3
    return play(seed, first, *more, *disks, shards=shards, steps=LONG, relays=relays)


def lost(seeds: range) -> Counter[str]:
    """Play these seeds; the simulation checks the invariants."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        played = lose_the_controller(seed)
        assert played.exits[-1] == [0] * 6, f"seed {seed}"
        seen += Counter(jobs=1, deferred=len(played.when(r"(?<!-m)\] waits .*is still being written")))
    return seen


@seeds(15, 5000)
@pytest.mark.usefixtures("patient")
def test_whatever_else_goes_wrong_while_the_controller_is_lost_and_saves_take_long(seeds: range) -> None:
    seen = lost(seeds)
    print(dict(seen))
    assert seen["deferred"] > len(seeds) / 40


# ------------------------------------------------------------------------------------------------ tables: of one rank


def in_doubt(trained: bool = True) -> tuple[Rank1, str]:
    """Return a rank whose kernel has reported silence of the controller's host for longer than the doubt takes."""
    rank = Rank1()
    rank.order(m.Standbys(ME, 1, ("b:1", "c:1")))
    rank.event(ev.Observed(Version(7 if trained else 0), m.Phase.IDLE))
    rank.after(1.0)
    return rank, rank.event(ev.Looked(5.0))


def asked() -> Rank1:
    rank, said = in_doubt()
    assert said == "ConnectAside"
    assert rank.event(ev.AsideUp()) == "SendAside"
    rank.event(ev.AsideOrder(m.Welcome(ME, 0, 1, "1")))
    return rank


def test_a_rank_that_has_nothing_to_lose_asks_nobody() -> None:
    assert in_doubt(trained=False)[1] == ""


def test_a_controller_that_is_heard_again_has_the_rank_hang_up() -> None:
    rank = asked()
    assert FROZEN in rank.event(ev.AsideOrder(m.Freeze(ME, 0, "s", "why", True)))
    said = rank.event(ev.Looked(0.1))
    assert "CloseAside" in said and "OpenGate" in said
    rank = asked()
    rank.event(ev.AsideOrder(m.Freeze(ME, 0, "s", "why", True)))
    assert "OpenGate" in rank.event(ev.AsideDown("broken"))


def test_each_silence_begins_with_the_same_stand_in() -> None:
    """So all ranks come to the same one, whatever each has tried before."""
    rank, _ = in_doubt()
    first = rank.did
    rank.event(ev.Looked(0.1))
    rank.event(ev.Looked(5.0))
    assert rank.did == first
    rank.event(ev.AsideDown("nobody answers"))
    rank.event(ev.Looked(5.0))
    assert rank.did != first, "the next one is tried"


def test_a_rank_that_did_not_run_looks_later() -> None:
    """What the kernel knows is as old as its last heartbeat."""
    rank = Rank1()
    rank.order(m.Standbys(ME, 1, ("b:1",)))
    rank.event(ev.Observed(Version(7), m.Phase.IDLE))
    assert "LookAtController" not in rank.after(1.0 + LATE_S)
    assert "LookAtController" in rank.after(LOOK_S)
    rank.event(ev.Looked(None))
    assert "LookAtController" in rank.after(1.0), "it is not known yet: the name service may be slow"


def test_who_stands_in_may_freeze_for_a_checkpoint_and_nothing_else() -> None:
    rank = asked()
    assert rank.event(ev.AsideOrder(m.Freeze(ME, 0, "s", "why", False))) == ""
    assert rank.event(ev.AsideOrder(m.Release(ME, 0, "s", 75, "go"))) == ""


# ------------------------------------------------------------------------------------------- tables: of who stands in


def test_the_others_are_waited_for_a_moment() -> None:
    """Each rank sees the silence for itself. The first does not report ranks that are about to come."""
    talk = Talk(joined=0)
    talk.machine.stand_in.job.learn(talk.layout)
    talk.hello(0, meanwhile=True, incarnation=1, version=Version(7), term_seen=3)
    (freeze,) = talk.orders(m.Freeze)
    assert freeze.term == 0, "it leads nobody"
    talk.report(0, m.Frozen(Rank(0), freeze.incident, Version(7), m.Phase.IDLE, True))
    assert talk.orders(m.Save) == []
    assert "Save:0" in talk.after(ControllerTimeouts().meanwhile_s)


def test_a_hello_that_comes_late_on_an_older_second_stream_changes_nothing() -> None:
    talk = Talk(joined=0)
    job = talk.machine.stand_in.job
    job.learn(talk.layout)
    late = {"meanwhile": True, "incarnation": 1, "version": Version(7)}
    for stream, said in ((101, "Welcome:0 [opened] Freeze:0 [evidence] [waits]"), (1, "")):
        talk.streams[0] = stream
        assert talk.hello(0, **late) == said
    assert talk.lost(0) == "" and job.live == {0}


def test_a_rank_with_another_layout_is_refused_with_the_reason() -> None:
    talk = Talk(joined=0)
    job = talk.machine.stand_in.job
    job.learn(talk.layout)
    job.learn(grid(3, 1))
    talk.hello(0, meanwhile=True, incarnation=1, version=Version(7))
    other = {"layout_digest": grid(3, 1).digest, "meanwhile": True, "incarnation": 1, "version": Version(7)}
    assert talk.hello(1, **other).startswith("Refused(mismatch):1")
    assert "rank 1 announces another layout than the others" in talk.orders(m.Refused)[0].text
    assert talk.hello(2, **{**other, "run_id": "another"}).startswith("Refused(busy):2")


def test_a_stand_in_records_only_what_it_does_in_an_incident() -> None:
    talk = Talk(joined=0)
    talk.machine.stand_in.job.learn(talk.layout)
    assert talk.hello(0, meanwhile=True, incarnation=1) == "Welcome:0", "there is nothing to save"
    assert talk.hello(1, meanwhile=True, incarnation=1, run_id="another") == "Refused(busy):1"


# --------------------------------------------------------------------------------------- tables: the takeover meanwhile


def saving() -> Rank1:
    """Return a rank that saves for a stand-in controller."""
    rank = asked()
    rank.event(ev.AsideOrder(m.Freeze(ME, 0, "s", "why", True)))
    assert rank.quiet() == "SendAside"
    order = m.SaverOrder(ME, (Shard("s0"),), How.AS_IS, (ME,), True)
    assert "StartSave" in rank.event(ev.AsideOrder(m.Save(ME, 0, "s", 0, Version(7), "draft", order)))
    return rank


def taken_over(rank: Rank1, address: str) -> str:
    """End the stream, and let the controller at this address take over."""
    rank.event(ev.StreamDown("silence"))
    while rank.machine._route.address != address:
        rank.after(1.0)
        rank.event(ev.StreamDown("nobody answers"))
    rank.event(ev.StreamUp())
    assert rank.sent(m.Hello).incident == "", "that is no incident of the job"
    return rank.order(m.Welcome(ME, 2, 1, "1"))


def test_a_save_goes_on_while_the_controller_that_stands_in_takes_over() -> None:
    rank = saving()
    said = taken_over(rank, "b:1") + rank.order(m.Standbys(ME, 2, ("b:1", "c:1"))) + rank.event(ev.Looked(0.0))
    assert not {"OpenGate", "CloseAside", "CancelSave"} & set(said.split())
    assert rank.event(ev.Worked(m.Saved(ME, "s", 0, ()))) == "SendAside"
    said = rank.freeze("b1", term=2)
    assert said.index("CloseAside") < said.index("OpenGate") < said.index("CloseGate")


def test_another_controller_that_takes_over_ends_the_save() -> None:
    assert {"OpenGate", "CloseAside", "CancelSave"} <= set(taken_over(saving(), "c:1").split())


def test_who_stands_in_hears_how_far_the_save_is_while_there_is_no_controller() -> None:
    rank = saving()
    rank.event(ev.StreamDown("silence"))
    assert "SendAside" in rank.after(1.0)


def test_a_rank_that_does_not_save_hangs_up_when_its_controller_is_lost() -> None:
    assert "CloseAside" in asked().event(ev.StreamDown("silence"))


class Takeover(Talk):
    """Ranks 1 and 2 save for a stand-in controller, and connect to the next one meanwhile."""

    def __init__(self) -> None:
        super().__init__(joined=0)
        self.machine.stand_in.job.learn(self.layout)
        for rank in (1, 2):
            self.hello(rank, meanwhile=True, incarnation=1, version=Version(7))
        (freeze, *_) = self.orders(m.Freeze)
        for rank in (1, 2):
            self.report(rank, m.Frozen(Rank(rank), freeze.incident, Version(7), m.Phase.IDLE, True))
        assert "Save:1" in self.after(ControllerTimeouts().meanwhile_s)
        self.meanwhile_id = freeze.incident
        self.aside = dict(self.streams)

    def comes(self, *ranks: int, **more: Any) -> str:
        said = [self.back(r, incarnation=1, version=Version(7), takeover=True, term_seen=1, **more) for r in ranks]
        return " ".join(said)

    def meanwhile(self, rank: int, report: m.Report) -> str:
        return self.event(Received(ConnectionId(self.aside[rank]), report))

    def ends(self) -> str:
        """Make the checkpoint durable."""
        where = self.meanwhile_id, 0
        for rank in (1, 2):
            piece = m.Piece(f"{rank}", 1, "d", "shard", "s0", Rank(rank))
            self.meanwhile(rank, m.Saved(Rank(rank), *where, (piece,)))
        return self.meanwhile(1, m.Committed(Rank(1), *where, "/save/step_7", 1))


def test_a_takeover_freezes_nobody_before_the_checkpoint_has_ended_and_takes_it_over() -> None:
    talk = Takeover()
    assert "Freeze" not in talk.comes(1, 2, broken="a peer is gone")
    assert "Freeze" not in talk.after(PATIENCE.gather_s)
    said = talk.ends()
    assert said.index("Freeze:1,2") < said.index("Thaw:1,2"), "nobody trains in between"
    said = talk.frozen_all(7, 1, 2)
    assert "[nothing_new]" in said and "Release(75):1,2" in said


def test_a_takeover_saves_at_once_when_a_save_has_failed_meanwhile() -> None:
    talk = Takeover()
    talk.comes(1, 2, broken="a peer is gone")
    assert "Freeze:1,2" in talk.meanwhile(1, m.SaveFailed(Rank(1), talk.meanwhile_id, 0, "disk full"))


def test_a_takeover_does_not_wait_for_a_checkpoint_for_which_not_all_of_its_ranks_stand_still() -> None:
    talk = Takeover()
    talk.comes(1, broken="a peer is gone")
    assert "Freeze:0,1" in talk.comes(0)


def test_a_checkpoint_without_the_page_of_a_rank_that_has_come_back_is_made_again() -> None:
    talk = Takeover()
    talk.comes(1, 2, broken="a peer is gone")
    talk.ends()
    talk.comes(0)
    assert "[plan]" in talk.frozen_all(7, 0, 1, 2)


def test_a_takeover_waits_for_a_checkpoint_no_longer_than_for_its_own() -> None:
    talk = Takeover()
    talk.comes(1, 2, broken="a peer is gone")
    assert "Freeze" not in talk.after(PATIENCE.gather_s)
    assert "Release(70):1,2" in talk.after(PATIENCE.rescue_s)
