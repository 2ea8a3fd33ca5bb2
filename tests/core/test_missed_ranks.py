"""A rank that is refused before the job forms: the others do not wait for it in ``restore()``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.core.restore_messages import Candidate, RestoreDecision, RestoreView

OTHERWISE: list[dict[str, Any]] = [{"save_dir": "/elsewhere"}, {"protocol_major": 9}]


def view(rank: int) -> RestoreView:
    return RestoreView(Rank(rank), (Candidate(Version(7), "d", "step_7"),), ())


def forming() -> Talk:
    talk = Talk(joined=2)
    talk.report(0, view(0))
    return talk


@pytest.mark.parametrize("change", OTHERWISE)
def test_who_waits_and_who_asks_later_is_told(change: dict[str, Any]) -> None:
    talk = forming()
    assert talk.hello(2, **change).endswith(":2 [refused] RestoreDecision:0")
    (decision,) = talk.orders(RestoreDecision)
    assert "rank 2 on h was refused: " in decision.error and decision.version and not decision.unread
    talk.lost(0)
    assert talk.report(1, view(1)) == "RestoreDecision:1", "although all who had asked have left"
    assert talk.hello(2, **change).endswith(":2 [refused]"), "once"


def test_processes_that_are_started_after_all_have_left_look_anew() -> None:
    talk = forming()
    talk.hello(2, **OTHERWISE[0])
    talk.lost(0)
    talk.lost(1)
    for rank in range(3):
        talk.streams[rank] += 10
        talk.hello(rank, nonce="again")
        said = talk.report(rank, view(rank))
    assert "[restore]" in said and {order.error for order in talk.orders(RestoreDecision)} == {""}


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (2, {"run_id": "b", "save_dir": "/elsewhere"}),
        (2, {"launch": 3, "save_dir": "/elsewhere"}),
        (1, {"nonce": "b"}),
        (1, {"nonce": "b", "save_dir": "/elsewhere"}),
    ],
    ids=["another job", "another start", "a rank that is here", "one that is here and differs"],
)
def test_a_stranger_stops_nobody(rank: int, change: dict[str, Any]) -> None:
    talk = forming()
    assert "[restore]" not in talk.hello(rank, **change) and talk.machine.job.live
    talk.streams[2] += 10
    talk.hello(2)
    talk.report(1, view(1))
    assert "[restore]" in talk.report(2, view(2)) and not talk.orders(RestoreDecision)[0].error


def test_jobs_that_were_given_no_run_id_are_not_told_apart() -> None:
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank, run_id="none")
    talk.report(0, view(0))
    assert talk.hello(2, run_id="none", save_dir="/elsewhere").endswith(":2 [refused]")
    assert not talk.orders(RestoreDecision)


def test_a_job_that_trains_does_not_end() -> None:
    talk = forming()
    for version in (1, 2):
        talk.report(0, m.Heartbeat(Rank(0), Version(version), m.Phase.IDLE))
    assert talk.machine.job.formed
    assert talk.hello(2, **OTHERWISE[0]).endswith(":2 [refused]")
