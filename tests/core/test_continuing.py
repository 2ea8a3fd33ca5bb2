"""When survivors go on in their processes instead of leaving with 75, as transcripts of the controller's machine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.rank_talk import ME, Rank1
from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY, SEAT_S
from ttp.core.controller.events import Accused, ConnectionId, RankWasWrong, Received, SaveRequested
from ttp.core.layout import Rank, Version
from ttp.core.rank import events as ev
from ttp.testing.toy import hello


class Keep(Talk):
    """Three ranks that can go on; rank 0 dies."""

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"can_continue": True, **more})

    def dies(self, seat: str = SEAT_READY) -> str:
        return self.event(Accused((Rank(0),), m.FaultKind.EXITED, "killed", (100,), (), seat))

    def save(self) -> str:
        self.frozen_all(7, 1, 2)
        self.saved(self.orders(m.Save)[0].rank)
        return self.committed(self.orders(m.Commit)[0].rank)

    def ends(self) -> tuple[bool, str]:
        """Return whether the last release lets survivors go on, and the reason if not."""
        facts = self.facts("released")
        assert {order.again for order in self.orders(m.Release)} == {facts["again"]}
        return facts["again"], facts["why_not_again"]


def test_survivors_of_a_death_go_on_when_the_checkpoint_exists() -> None:
    talk = Keep()
    talk.dies()
    assert talk.save() == "[committed] [released] Release(75):1,2"
    assert talk.ends() == (True, "")
    text = "saved version 7; a restart goes on with step 8. Cause: rank 0 on h (pid 100): killed"
    assert talk.orders(m.Release)[0].text == text


def test_the_launcher_is_waited_for_where_a_neighbour_was_faster() -> None:
    talk = Keep()
    talk.report(1, m.Fault(Rank(1), Rank(0), m.FaultKind.EXITED, "its process died", nonce="n0"))
    assert talk.save() == "[committed]"
    assert talk.dies() == "[evidence] [released] Release(75):1,2"
    assert talk.ends()[0]


def test_it_is_not_waited_for_for_long() -> None:
    talk = Keep()
    talk.report(1, m.Fault(Rank(1), Rank(0), m.FaultKind.EXITED, "its process died", nonce="n0"))
    talk.save()
    assert talk.after(SEAT_S / 2) == ""
    talk.after(SEAT_S)
    why = "rank 0 cannot be started alone: its launcher has not reported"
    assert talk.ends() == (False, why)
    assert talk.orders(m.Release)[0].text == (  # for the log of each rank
        "saved version 7; a restart goes on with step 8. Cause: rank 0 on h (pid 100): its process died. "
        f"No rank goes on in its process: {why}"
    )


@pytest.mark.parametrize("seat", ["before", "after"])
def test_nobody_goes_on_once_the_next_launch_has_begun(seat: str) -> None:
    """The launcher saw the other ranks die, too, and restarted all before the controller heard of it."""
    talk = Keep()
    if seat == "before":
        talk.dies()
    else:
        talk.report(1, m.Fault(Rank(1), Rank(0), m.FaultKind.EXITED, "its process died", nonce="n0"))
    talk.frozen_all(7, 1, 2)
    if seat == "before":
        assert "Refused(busy)" in talk.event(relaunched(talk, 1))
        talk.write()
    else:
        talk.write()
        assert talk.event(relaunched(talk, 1)) == "Refused(busy):1 [refused] [released] Release(75):1,2"
    assert talk.ends() == (False, "the whole job was started again already")


def relaunched(talk: Talk, rank: int) -> Received:
    """Let a process of the next launch say hello."""
    return Received(ConnectionId(90 + rank), hello(rank, talk.layout, launch=1, nonce="next", can_continue=True))


def test_a_rank_that_missed_its_release_hears_the_same() -> None:
    talk = Keep()
    talk.dies()
    talk.save()
    talk.lost(1)
    assert "Release(75):1" in talk.back(1, incident=talk.id)
    assert talk.orders(m.Release)[0].again


def test_nobody_goes_on_where_one_cannot() -> None:
    talk = Keep(joined=0)
    for rank in range(3):
        talk.hello(rank, can_continue=rank != 2)
    talk.dies()
    talk.save()
    assert "again" not in talk.facts("released") and not talk.orders(m.Release)[0].again


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda talk: talk.dies("no restart is left"), "rank 0 cannot be started alone: no restart is left"),
        (lambda talk: (talk.dies(), talk.fault(1)), "exception of 1; ranks go on only after deaths"),
        (
            lambda talk: (talk.dies(), talk.fault(2, m.FaultKind.PREEMPTED)),
            "preempted of 2; ranks go on only after deaths",
        ),
        (lambda talk: (talk.dies(), talk.accuse(1, m.FaultKind.OUTSIDE)), "ranks go on only after deaths"),
        (
            lambda talk: (talk.goodbye(2, version=7), talk.dies()),  # which trains no more
            "some rank is neither known to train nor known to be dead",
        ),
        (lambda talk: (talk.event(RankWasWrong("the program is wrong")), talk.dies()), "the program is wrong"),
    ],
)
def test_whatever_else_happened_ends_as_ever(what: Any, why: str) -> None:
    talk = Keep()
    what(talk)
    talk.save()
    again, said = talk.ends()
    assert not again and why in said


def test_replicas_that_differ_are_not_continued() -> None:
    talk = Keep()
    (shard,) = talk.layout.groups
    talk.dies()
    for rank, digest in ((1, "x"), (2, "y")):
        talk.frozen(rank, 7, digests=(m.ShardDigest(shard, digest),))
    talk.saved(talk.orders(m.Save)[0].rank)
    talk.committed(talk.orders(m.Commit)[0].rank)
    again, why = talk.ends()
    assert not again and "replicas differ" in why


def test_a_collective_that_broke_is_what_a_death_looks_like() -> None:
    talk = Keep()
    talk.dies()
    talk.fault(1, m.FaultKind.COLLECTIVE)
    talk.save()
    assert talk.ends()[0]


def test_the_seat_of_a_rank_that_was_only_lost_is_not_filled() -> None:
    talk = Keep()
    talk.dies()
    talk.lost(2)
    talk.after(2)
    talk.frozen(1, 7)
    talk.write()
    talk.after(2)
    again, why = talk.ends()
    assert not again and why == "rank 2 cannot be started alone: its launcher has not reported"


def test_a_launch_that_finished_no_step_is_not_continued() -> None:
    talk = Keep(base_version=Version(7), version=Version(7))
    talk.dies()
    talk.frozen_all(7, 1, 2)
    assert talk.ends() == (False, "no step was finished since the last start, at step 7")


@pytest.mark.parametrize("bad", [("weight",), ()])
def test_a_state_with_nan_is_not_continued(bad: tuple[str, ...]) -> None:
    talk = Keep()
    talk.dies()
    talk.frozen(1, 7, bad=bad)
    talk.frozen(2, 7)
    talk.saved(talk.orders(m.Save)[0].rank)
    talk.committed(talk.orders(m.Commit)[0].rank)
    assert talk.ends()[0] == (not bad)


def test_a_rank_whose_launcher_has_ended_keeps_nobody_waiting() -> None:
    talk = Keep()
    talk.dies()
    talk.frozen(1, 7, cannot_continue="its launcher has ended")
    talk.frozen(2, 7)
    talk.saved(talk.orders(m.Save)[0].rank)
    talk.committed(talk.orders(m.Commit)[0].rank)
    assert talk.ends() == (False, "rank 1 cannot go on: its launcher has ended")


# ------------------------------------------------------------------------------------------------------------- a rank


def released(kind: m.FaultKind | None = None, *, able: bool = True) -> str:
    rank = Rank1(can_continue=able)
    if kind is not None:
        rank.event(ev.Raised(kind, "x"))
    rank.freeze()
    said = rank.order(m.Release(ME, 1, "a", 75, "saved", again=True))
    assert rank.machine.gone
    return said


def test_a_rank_that_is_released_to_go_on_says_goodbye_and_stays() -> None:
    assert released() == ">Goodbye GoOn"
    assert released(m.FaultKind.COLLECTIVE) == ">Goodbye GoOn"


def test_a_rank_that_raised_or_never_could_leaves() -> None:
    assert released(m.FaultKind.EXCEPTION) == released(m.FaultKind.PREEMPTED) == ">Goodbye Exit(75)"
    assert released(able=False) == ">Goodbye Exit(75)"


# ------------------------------------------------------------------------------------------------- without any death


def trial(*, base: int = 0, able: bool = True) -> Keep:
    talk = Keep(can_continue=able, base_version=Version(base), version=Version(7))
    talk.event(SaveRequested(1, "a trial", again=True))
    talk.frozen_all(7, *range(3))
    talk.saved(talk.orders(m.Save)[0].rank)
    return talk


def test_ranks_go_on_without_any_death_where_that_is_asked_for() -> None:
    talk = trial()
    assert "Release(75):0,1,2" in talk.committed(talk.orders(m.Commit)[0].rank)
    assert talk.ends() == (True, "")
    assert "all ranks go on from it" in talk.facts("released")["text"]


def test_those_that_cannot_train_on_where_they_are() -> None:
    talk = trial(able=False)
    said = talk.committed(talk.orders(m.Commit)[0].rank)
    assert "Thaw" in said and "Release" not in said


def test_a_death_meanwhile_is_one_like_any_other() -> None:
    talk = trial()
    talk.dies("no restart is left")
    talk.committed(talk.orders(m.Commit)[0].rank)
    assert talk.ends() == (False, "rank 0 cannot be started alone: no restart is left")
