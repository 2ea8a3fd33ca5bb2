"""Which ranks a report from outside accuses."""

from __future__ import annotations

import pytest

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.controller.events import Accused
from ttp.core.controller.fault_targets import HOSTS_SHOWN, FaultTargets, fault_targets
from ttp.core.layout import Rank
from ttp.testing.scenario import grid

HOSTS = ["n16.a.example", "n17.a.example", "n17.b.example", "n18"]
ADDRESSES = ["10.0.0.16", "10.0.0.17", "10.0.1.17", "10.0.0.18"]


def job(ranks: int = 8) -> Talk:
    """Return a job with two ranks on each host."""
    talk = Talk(grid(1, 8), joined=0)
    for rank in range(ranks):
        talk.hello(rank, host=HOSTS[rank // 2], address=ADDRESSES[rank // 2])
    return talk


def meant(talk: Talk, *ranks: int, host: str = "") -> tuple[tuple[int, ...], str]:
    found = fault_targets(talk.machine.job, [Rank(r) for r in ranks], host)
    return found.ranks, found.problem


@pytest.mark.parametrize(
    ("host", "ranks"),
    [
        ("n16.a.example", (0, 1)),
        ("n16", (0, 1)),
        ("N16", (0, 1)),
        ("N16.A.example", (0, 1)),
        ("n18", (6, 7)),
        ("n18.cluster.example", (6, 7)),
        ("10.0.1.17", (4, 5)),
    ],
)
def test_a_host(host: str, ranks: tuple[int, ...]) -> None:
    assert meant(job(), host=host) == (ranks, "")


def test_ranks_and_a_host() -> None:
    assert meant(job(), 5, 0, host="n16") == ((0, 1, 5), "")


def test_a_short_name_of_two() -> None:
    ranks, problem = meant(job(), host="n17")
    assert ranks == () and "n17.a.example, n17.b.example: give the full name; nothing was done" in problem


@pytest.mark.parametrize("host", ["n19", "n16.b.example", "10.0.0.1", "10", "n1", "."])
def test_a_host_that_nobody_knows(host: str) -> None:
    ranks, problem = meant(job(), host=host)
    assert ranks == () and problem.startswith("no such rank") and ", ".join(HOSTS) in problem


def test_many_hosts_are_not_listed() -> None:
    talk = Talk(grid(1, 20), joined=0)
    for rank in range(20):
        talk.hello(rank, host=f"n{rank:02}")
    assert meant(talk, host="x")[1].endswith(f"n{HOSTS_SHOWN - 1:02}, ...; nothing was done")


def test_a_rank_that_is_none() -> None:
    assert meant(job(), 8, 9) == ((), "no such rank: 8-9 (this job has 8 ranks, from 0); nothing was done")
    assert meant(job(), -1)[0] == ()


def test_the_others_are_accused_all_the_same() -> None:
    assert meant(job(), 2, 9) == ((2,), "no such rank: 9 (this job has 8 ranks, from 0)")
    assert meant(job(), 2, host="n19")[0] == (2,)


def test_one_that_has_left() -> None:
    talk = job()
    talk.goodbye(1, m.GoodbyeReason.LEFT)
    assert meant(talk, host="n16") == ((0,), "already gone: 1")


def test_one_that_is_lost_may_be_accused() -> None:
    talk = job()
    talk.lost(1)
    assert meant(talk, host="n16") == ((0, 1), "")


def test_before_it_is_formed() -> None:
    assert meant(job(7), 0) == (
        (),
        "the job is still forming (7 of 8 ranks) and has nothing to lose yet: no such rank can be accused, and nothing "
        "was done. Report it again once `ttp status` shows its ranks as live",
    )


def test_before_anybody_is_there_and_after_everybody_was() -> None:
    assert "no job has joined" in meant(Talk(joined=0), 0)[1]
    talk = job()
    for rank in range(8):
        talk.goodbye(rank)
    assert meant(talk, 0)[1] == "the job is over: no such rank can be accused, and nothing was done"
    between = fault_targets(talk.machine.job, [Rank(0)], "", between=True).problem
    assert "between two launches" in between and between.endswith("once `ttp status` shows its ranks as live")


def test_how_a_rank_died_is_recorded_when_the_others_have_left_already() -> None:
    """The kernel frees the memory of a large process while the others save, and only then does its launcher know."""
    talk = Talk(grid(1, 2))
    talk.accuse(0, m.FaultKind.EXITED, pid=100)
    talk.frozen(1, 7)
    talk.write()
    talk.goodbye(1, m.GoodbyeReason.RELEASED)
    talk.lost(1)
    job = talk.machine.job
    assert job.ended
    assert fault_targets(job, [Rank(0), Rank(1)], "", exited=True) == FaultTargets((Rank(0),), "already gone: 1")
    assert fault_targets(job, [Rank(0)], "").ranks == ()
    killed = Accused((Rank(0),), m.FaultKind.EXITED, "out of memory", (100,))
    assert talk.event(killed).endswith("[evidence]")
    assert talk.machine.rescue.last is not None and talk.machine.rescue.last.cause.endswith("out of memory")
