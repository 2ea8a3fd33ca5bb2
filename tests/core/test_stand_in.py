"""The controller's own host falls silent: a standby saves meanwhile, and leads nobody. Patience as in real jobs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.core.test_simulated_silence import HOSTS, KEEPALIVE_S, play
from ttp.core.layout import Rank
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
        played = play(
            seed, first, *more, shards=chance.choice((1, 2, 3)), steps=140, relays=seed % 3 == 0
        )  # it does not end
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
