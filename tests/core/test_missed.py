"""A rank that was lost before the last one joined is missed once the job trains, unless it may still come."""

from __future__ import annotations

import pytest

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid


def beat(talk: Talk, rank: int, version: int) -> str:
    return talk.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE))


def forming(*, launches: tuple[int, int] = (0, 0), leaves: m.GoodbyeReason | None = None) -> Talk:
    """Return a job of two ranks, of which rank 1 was gone before rank 0 joined."""
    talk = Talk(grid(1, 2), joined=0)
    talk.hello(1, launch=launches[1])
    if leaves is not None:
        talk.goodbye(1, leaves)
    talk.lost(1)
    talk.now += 10
    talk.hello(0, launch=launches[0])
    return talk


def test_a_rank_that_was_lost_before_the_last_one_joined_is_missed_once_the_job_trains() -> None:
    """The program may have no collectives, so that it trains without the others."""
    talk = forming()
    assert beat(talk, 0, 20) == ""
    assert beat(talk, 0, 29) == "[formed] [opened] Freeze:0 [evidence]"
    assert talk.facts("formed")["unprotected_ranks"] == ""
    assert talk.facts("evidence")["text"] == (
        "rank 1 on h (pid 101) was lost before all ranks had joined: its stream ended without a goodbye"
    )
    talk.frozen(0, 29)
    talk.after(1)
    talk.write()
    assert talk.orders(m.Release)[0].exit_code == 75
    assert "[incarnation] Welcome:1" in talk.hello(1, nonce="again")


def test_it_is_missed_too_if_the_others_have_trained_to_the_end_between_two_heartbeats() -> None:
    talk = forming()
    assert talk.goodbye(0) == "[done] [formed] [opened] Freeze:0 [evidence]"


def test_it_may_come_back_on_another_stream() -> None:
    talk = forming()
    beat(talk, 0, 20)
    beat(talk, 0, 29)
    talk.frozen(0, 29)
    assert "Thaw:0,1" in talk.back(1)


@pytest.mark.parametrize("leaves", [m.GoodbyeReason.DONE, m.GoodbyeReason.LEFT])
def test_a_rank_that_left_on_purpose_before_others_joined_is_not_missed(leaves: m.GoodbyeReason) -> None:
    talk = forming(leaves=leaves)
    beat(talk, 0, 1)
    beat(talk, 0, 2)
    assert talk.machine.incident is None
    assert "[finished]" in talk.goodbye(0)


def test_a_rank_of_an_earlier_launch_may_still_come_with_this_one() -> None:
    talk = forming(launches=(1, 0))
    assert talk.goodbye(0) == "[done]"
    assert talk.hello(1, nonce="again", launch=1) == "Welcome:1 [joined] [formed]"


def test_a_rank_that_is_restarted_while_the_job_forms_is_not_missed() -> None:
    talk = forming()
    talk.streams[1] += 10
    assert talk.hello(1, nonce="again") == "Welcome:1 [joined] [formed]"
    beat(talk, 0, 1)
    assert beat(talk, 0, 2) == "" and talk.machine.stage == "training"
