"""A controller whose timers are late again and again is slow: it was not stopped each time."""

from __future__ import annotations

import pytest

from tests.core.talk import PATIENCE, Talk
from ttp.core.controller.events import LATE_MAX, TIMER_LATE_S, Tick
from ttp.core.layout import Rank


def late(talk: Talk) -> None:
    talk.now += PATIENCE.grace_s + TIMER_LATE_S + 0.1
    talk.event(Tick())


def fenced(talk: Talk, rank: int) -> bool:
    return talk.machine.job.members[Rank(rank)].fenced


@pytest.mark.parametrize("comes", [True, False])
def test_a_lost_rank_is_not_waited_for_without_end(comes: bool) -> None:
    talk = Talk()
    talk.lost(2)
    for _ in range(LATE_MAX):
        late(talk)
        assert not fenced(talk, 2)
    if comes:
        talk.back(2)
    late(talk)
    assert fenced(talk, 2) != comes


def test_each_loss_has_graces_of_its_own() -> None:
    talk = Talk()
    for rank in (2, 1):
        talk.lost(rank)
        for _ in range(LATE_MAX):
            late(talk)
        assert not fenced(talk, rank)
        late(talk)
        assert fenced(talk, rank)
