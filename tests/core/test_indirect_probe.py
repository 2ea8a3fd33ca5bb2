"""Who sees a death first in a world of several hosts: neighbours, the launcher, or a rank of a third host."""

from __future__ import annotations

import pytest

from tests.core.talk import Talk, Wide
from ttp.core import messages as m
from ttp.core.controller.events import Tick
from ttp.core.layout import Rank
from ttp.testing.scenario import grid

# ----------------------------------------------------------------------------------------------------------- neighbours


def died(talk: Talk, witness: int, subject: int, nonce: str = "") -> str:
    nonce = nonce or talk.machine.job.members[Rank(subject)].hello.nonce
    return talk.report(witness, m.Fault(Rank(witness), Rank(subject), m.FaultKind.EXITED, "died", nonce=nonce))


def test_a_neighbour_knows_for_sure() -> None:
    talk = Wide()
    assert died(talk, 2, 3) == "Refused(fenced):3 [opened] Freeze:0,1,2,4,5 [evidence]"
    talk.frozen_all()
    talk.saved(0)
    for rank in (2, 4):
        talk.saved(rank)
    assert talk.committed(0).startswith("[committed] [released] Release(75)"), "nobody waits for a grace"
    assert talk.back(3) == "Release(75):3" or "Refused(fenced):3" in talk.back(3)


def test_only_a_rank_of_the_same_host_can_be_a_neighbour() -> None:
    talk = Wide()
    assert died(talk, 0, 3) == ""
    assert died(talk, 2, 3, nonce="another process") == ""
    assert talk.machine.incident is None


def test_the_launcher_adds_the_signal_to_what_the_neighbour_saw() -> None:
    talk = Wide()
    died(talk, 2, 3)
    assert talk.accuse(3, m.FaultKind.EXITED) == "[evidence]"
    assert talk.machine.incident is not None
    assert talk.machine.incident.cause.endswith("seen from outside")
    assert talk.accuse(3, m.FaultKind.EXITED) == ""


# ------------------------------------------------------------------------------------------------------------ witnesses


def silent_loss(talk: Wide, rank: int) -> str:
    talk.now += 20
    for other in talk.machine.job.live:
        if other // 2 != rank // 2:
            talk.beat(other)
    return talk.lost(rank)


def test_a_silent_host_is_looked_at_by_a_third_one() -> None:
    talk = Wide()
    assert silent_loss(talk, 2).endswith("[evidence] [witness_asked] Probe:4")
    assert talk.orders(m.Probe)[0].address == "10.0.0.1"
    assert talk.incident.cause.endswith("was lost: silent for 20.0 s, then its stream ended without a goodbye")
    assert talk.lost(3).endswith("[evidence]"), "one question for each host"


@pytest.mark.parametrize("early", [True, False], ids=["before the answer", "after it"])
def test_ranks_of_a_host_that_is_still_reached_get_more_time(early: bool) -> None:
    talk = Wide()
    silent_loss(talk, 2)
    if early:
        talk.lost(3)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    if not early:
        talk.lost(3)
    talk.after(3)
    assert talk.machine.job.suspects.keys() == {2, 3}
    talk.back(2)
    talk.back(3)
    talk.frozen_all(0)
    assert talk.machine.incident is None, "a partition that healed is a false alarm"
    assert talk.machine.rescue.false_alarms == 1


def test_a_rank_of_another_host_gets_no_more_time() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.lost(5)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    talk.after(1)
    assert talk.machine.job.suspects.keys() == {2} and talk.machine.job.members[Rank(5)].fenced


def test_a_rank_that_has_more_time_keeps_it_if_the_controller_was_stopped() -> None:
    """The grace of the other rank begins again."""
    talk = Wide()
    silent_loss(talk, 2)
    talk.lost(5)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    talk.now += 3
    talk.event(Tick())
    assert talk.machine.job.suspects.keys() == {2, 5}
    talk.after(2)
    assert talk.machine.job.suspects.keys() == {2} and talk.machine.job.members[Rank(5)].fenced


def test_more_time_ends_too() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.report(4, m.Probed(Rank(4), Rank(2), True, "refuses"))
    assert talk.machine.deadline() is not None
    talk.after(10.1)
    assert not talk.machine.job.suspects
    assert talk.machine.job.members[Rank(2)].fenced


def test_a_host_that_nobody_reaches_gets_the_usual_grace() -> None:
    talk = Wide()
    silent_loss(talk, 2)
    talk.report(4, m.Probed(Rank(4), Rank(2), False, "no answer"))
    talk.after(1.0)
    assert talk.machine.job.members[Rank(2)].fenced


def test_a_process_that_spoke_a_moment_ago_needs_no_witness() -> None:
    talk = Wide()
    talk.beat(2)
    assert "Probe" not in talk.lost(2)


def test_two_hosts_have_no_third() -> None:
    talk = Wide(grid(1, 4))
    assert "Probe" not in silent_loss(talk, 2)
