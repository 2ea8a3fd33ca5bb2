"""The controller's own host falls silent: a standby saves meanwhile, and leads nobody. Patience as in real jobs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.core.rank_talk import FROZEN, ME, Rank1
from tests.core.talk import Talk
from tests.core.test_simulated_silence import HOSTS, KEEPALIVE_S, play
from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.layout import Rank, Version
from ttp.core.rank import events as ev
from ttp.testing.scenario import Fault

HOME, NEXT = Rank(0), Rank(2)
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
    for seed in range(6):
        at = 0.5 + 0.13 * seed
        played = play(seed, Fault(kind, at, HOME, lasts_s=15), shards=shards, relays=relays)
        took.append(played.when(r"-m\] committed")[0] - at)
        assert played.exits[-1] == [0] * 6
        released = min(played.when(r"\] released"), default=float("inf"))
        assert released >= at + KEEPALIVE_S - 1, "nobody is released before it is sure"
    assert max(took) <= BUDGET_S, took


def second_fault(chance: random.Random, at: float) -> Fault:
    """While the controller is silent, or while it is heard again, something else goes wrong."""
    kind = chance.choice(("silence", "silence", "controller_stop", "stop", "silent"))
    rank = Rank(chance.randrange(len(HOSTS)))
    return Fault(kind, at + chance.uniform(-0.5, 3.5), rank, lasts_s=chance.uniform(0.2, 2.0))


def soak(seeds: range) -> Counter[str]:
    """Healthy jobs: the controller's host is silent for up to three seconds, and more happens around that time."""
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


def test_a_controller_that_is_heard_again_leads_on_and_nobody_is_restarted() -> None:
    seen = soak(range(30))
    assert seen["meanwhile"] == seen["thaws"] > 0


@pytest.mark.slow
def test_many_controllers_that_are_heard_again() -> None:
    seen = soak(range(1000, 6000))
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


# ------------------------------------------------------------------------------------------------ tables: of one rank


def in_doubt(trained: bool = True) -> tuple[Rank1, str]:
    """A rank whose kernel has heard nothing of the controller's host for longer than the doubt takes."""
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


def test_who_stands_in_may_freeze_for_a_checkpoint_and_nothing_else() -> None:
    rank = asked()
    assert rank.event(ev.AsideOrder(m.Freeze(ME, 0, "s", "why", False))) == ""
    assert rank.event(ev.AsideOrder(m.Release(ME, 0, "s", 75, "go"))) == ""


# ------------------------------------------------------------------------------------------- tables: of who stands in


def test_the_others_are_waited_for_a_moment() -> None:
    """Each sees the silence for itself: the first to come says nothing of those that are about to."""
    talk = Talk(formed=False)
    talk.machine.stand_in.job.learn(talk.layout)
    talk.hello(0, meanwhile=True, incarnation=1, version=Version(7))
    (freeze,) = talk.orders(m.Freeze)
    talk.report(0, m.Frozen(Rank(0), freeze.incident, Version(7), m.Phase.IDLE, True))
    assert talk.orders(m.Save) == []
    assert "Save:0" in talk.after(ControllerTimeouts().meanwhile_s)
