"""Which ranks may join a job, as transcripts: messages of ranks, and the answers of the controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import PATIENCE, Talk
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.testing.scenario import grid
from ttp.testing.toy import hello


def test_a_job_forms() -> None:
    talk = Talk(joined=0)
    assert talk.hello(1) == "[incarnation] Welcome:1 [joined]"
    assert talk.hello(0) == "Welcome:0 [joined]"
    assert talk.machine.stage == "forming"
    assert talk.hello(2) == "Welcome:2 [joined] [formed]"
    assert talk.machine.stage == "training"
    assert talk.hello(2) == "Welcome:2 [joined]"  # the welcome was lost


other = grid(1, 4)
wrong: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol_major": 9}, "protocol", f"rank 1 speaks 9.{m.PROTOCOL_MINOR}"),
    ({"rank": Rank(7)}, "malformed", "rank 7 is not in a world of 3"),
    ({"world_size": 4}, "malformed", "layout and digest do not match"),
    ({"run_id": "b"}, "other_job", "two jobs share TTP_PORT"),
    ({"nonce": "b"}, "rank_taken", "rank 1 is already held by pid 101 on h"),
    ({"incarnation": -1}, "fenced", "which was given up"),
]


@pytest.mark.parametrize(("change", "code", "text"), wrong, ids=[w[1] + str(i) for i, w in enumerate(wrong)])
def test_who_does_not_belong_is_refused_in_words(change: dict[str, Any], code: str, text: str) -> None:
    talk = Talk()
    stranger = replace(hello(1, talk.layout), **change)
    assert talk.event(Received(ConnectionId(50), stranger)) == f"Refused({code}):{stranger.rank} [refused]"
    assert text in talk.orders(m.Refused)[0].text
    assert talk.facts("refused")["code"] == code
    assert talk.machine.incident is None


EARLIER = {"nonce": "old", "resume": True, "term_seen": 1}
"""A process that is left over from an earlier start of the job."""


@pytest.mark.parametrize("incarnation", [1, 4], ids=["equal", "higher"])
def test_a_process_that_is_left_of_an_earlier_start_waits_while_a_job_forms(incarnation: int) -> None:
    talk = Talk(joined=2)
    assert talk.hello(2, incarnation=incarnation, version=7, **EARLIER) == "Refused(busy):2 [refused]"
    assert "a new one is forming" in talk.orders(m.Refused)[0].text
    assert talk.hello(2, nonce="new") == "Welcome:2 [joined] [formed]"
    assert "Welcome" not in talk.hello(2, incarnation=incarnation, version=7, **EARLIER)
    assert talk.machine.job.live == {0, 1, 2} and talk.machine.job.incarnation == 1


@pytest.mark.parametrize("incarnation", [1, 4], ids=["equal", "higher"])
def test_a_new_process_takes_the_place_of_one_of_an_earlier_start(incarnation: int) -> None:
    """The old one has made no update, or the last new one took long to come."""
    for version in (0, 7):
        talk = Talk(joined=2)
        talk.now += PATIENCE.gather_s
        assert "Welcome:2 [reconnected]" in talk.hello(2, incarnation=incarnation, version=version, **EARLIER)
        talk.streams[2] += 100
        assert talk.hello(2, nonce="new").startswith("Refused(fenced):2 Welcome:2")
        assert talk.machine.job.live == {0, 1, 2} and talk.machine.stage == "training"


@pytest.mark.parametrize("number", [1, 4], ids=["equal", "higher"])
def test_survivors_that_come_to_a_new_process_on_a_new_controller_are_saved(number: int) -> None:
    """Rank 0 died with the controller, and its launcher has started both again."""
    talk = Talk(joined=1)
    come = {"incarnation": number, "resume": True, "term_seen": 1, "version": 7}
    for rank in (1, 2):
        assert talk.hello(rank, **come) == f"Refused(busy):{rank} [refused]"
    talk.now += PATIENCE.gather_s
    for rank in (1, 2):
        assert f"Welcome:{rank} [reconnected]" in talk.hello(rank, **come)
    assert "Freeze:0,1,2" in talk.fault(1, m.FaultKind.COLLECTIVE)
    talk.frozen(0, 0)
    assert "[plan] Save:1" in talk.frozen(1, 7) + talk.frozen(2, 7)


def test_a_survivor_of_a_launch_that_was_given_up_does_not_wait_while_the_next_one_forms() -> None:
    talk = Talk()
    for rank in range(3):
        talk.lost(rank)
    talk.after(100)
    talk.streams[0] += 100
    assert "[incarnation]" in talk.hello(0, launch=1, nonce="new")
    talk.streams[1] += 100
    assert talk.hello(1, incarnation=1, version=7, resume=True, term_seen=1) == "Refused(fenced):1 [refused]"


def test_what_an_earlier_start_holds_is_saved_before_the_new_one_begins() -> None:
    """One of its processes reaches the new controller first: it may be a survivor."""
    talk = Talk(joined=0)
    talk.hello(2, incarnation=2, version=7, **EARLIER)
    old = talk.streams[2]
    talk.streams[2] += 100
    for rank in range(3):
        assert talk.hello(rank, nonce=f"new {rank}") == f"Refused(busy):{rank} [refused]"
        assert "rank 2 on h (pid 102) of an earlier start of this job" in talk.orders(m.Refused)[0].text
    talk.after(PATIENCE.gather_s)
    talk.streams[2] = old
    assert "Save:2" in talk.frozen(2, 7)
    assert "Release(75):2" in talk.write()
    talk.streams[2] += 100
    said = [talk.hello(rank, nonce=f"new {rank}") for rank in range(3)]
    assert "[incarnation] Welcome:0" in said[0] and said[1:] == ["Welcome:1 [joined]", "Welcome:2 [joined] [formed]"]


@pytest.mark.parametrize("version", [0, 7], ids=["untrained", "trained"])
def test_a_rank_whose_stream_breaks_while_the_job_forms_is_of_this_start(version: int) -> None:
    """It may have trained alone, in a program without collectives. Nobody takes its place, either."""
    talk = Talk(joined=2)
    talk.lost(1)
    assert "Welcome:1 [reconnected]" in talk.back(1, version=version)
    talk.streams[1] += 100
    assert talk.hello(1, nonce="new") == "Refused(rank_taken):1 [refused]"


def test_a_new_process_does_not_take_the_place_of_one_whose_job_is_complete() -> None:
    talk = Talk(incarnation=2, resume=True, term_seen=1)
    assert talk.hello(1, nonce="b") == "Refused(rank_taken):1 [refused]"


def test_a_new_process_takes_an_open_seat_while_the_fault_is_repaired() -> None:
    talk = Talk()
    talk.lost(2)
    assert talk.machine.incident is not None
    talk.machine.job.seats.add(Rank(2))
    talk.streams[2] += 100
    assert talk.hello(2, nonce="new").startswith("Welcome:2")


def test_nobody_takes_the_place_of_a_lost_rank() -> None:
    talk = Talk()
    talk.lost(1)
    assert talk.hello(1, nonce="b") == "Refused(fenced):1 [refused]"
    assert "a new process joins with the restarted job" in talk.orders(m.Refused)[0].text


def test_a_stray_rank_of_another_job_does_not_end_a_living_job() -> None:
    talk = Talk()
    stray = replace(hello(1, talk.layout), run_id="b", nonce="b", incarnation=2, resume=True, version=Version(9))
    assert talk.event(Received(ConnectionId(50), stray)) == "Refused(other_job):1 [refused]"
    assert talk.machine.job.live == {0, 1, 2}


@pytest.mark.parametrize("seen", [{"term_seen": 1}, {"term_seen": 2, "takeover": True}])
def test_a_process_that_is_left_of_an_earlier_start_does_not_end_the_job(seen: dict[str, Any]) -> None:
    """Its host stood still for minutes, say. It had been restarted twice, and the new controller counts from 1."""
    talk = Talk()
    old = replace(hello(1, talk.layout), nonce="old", incarnation=3, resume=True, version=Version(9), **seen)
    assert talk.event(Received(ConnectionId(50), old)) == "Refused(rank_taken):1 [refused]"
    assert talk.machine.job.live == {0, 1, 2} and talk.machine.job.incarnation == 1
    talk.lost(2)
    said = talk.event(Received(ConnectionId(50), old))
    assert said == "Refused(rank_taken):1 [refused]", "nor does it keep it from a save"
    assert talk.machine.stage == "freezing" and talk.machine.job.live == {0, 1}


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (other, "rank 2 on h has WORLD_SIZE=4, and rank 0 on h (pid 100), which came first, has 3: start all hosts"),
        (
            Layout(3, {Shard("w"): (Rank(0), Rank(1)), Shard("v"): (Rank(2),)}),
            "rank 2 announces another layout than the others: 2 shards (v: 2, w: 0-1) against 1 shards (s0: 0-2): "
            "shards 'v', 'w' only in the first; shard 's0' only in the second. "
            "Every rank must wrap the same model in the same way",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(layout: Layout, text: str) -> None:
    talk = Talk(joined=0)
    talk.hello(0)
    talk.hello(1)
    talk.machine.job.learn(layout)
    assert talk.report(2, hello(2, layout)) == "Refused(mismatch):2 [refused]"
    assert text in talk.orders(m.Refused)[0].text


def test_ranks_of_a_host_with_different_directories_are_refused() -> None:
    talk = Talk(joined=0)
    talk.hello(0)
    talk.hello(2, save_dir="/elsewhere", host="another host")
    assert talk.report(1, replace(hello(1, talk.layout), save_dir="/1")) == "Refused(mismatch):1 [refused]"
    assert "rank 1 saves to /1, but rank 0 of the same host to /" in talk.orders(m.Refused)[0].text


def beat(talk: Talk, rank: int, version: int) -> str:
    return talk.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE))


def three_of_four() -> Talk:
    """Return a job whose rank 3 could not join, and trains without protection."""
    return Talk(grid(1, 4), joined=3)


def test_an_update_proves_that_every_rank_exists() -> None:
    talk = three_of_four()
    assert beat(talk, 0, 7) == "", "the first change may be a restore"
    assert talk.ask() == "answer: not saved"
    assert beat(talk, 0, 8) == "[formed]"
    assert talk.facts("formed")["unprotected_ranks"] == "3"
    assert talk.machine.stage == "training"
    assert beat(talk, 1, 9) == ""
    assert talk.lost(1).startswith("[opened] Freeze:0,2 [evidence]")
    assert talk.facts("opened")["newest"] == 9, "also if no rank is left that could answer"
    talk.frozen(0, 9)
    assert "[plan] Save" in talk.frozen(2, 9)


def test_a_job_with_a_rank_that_never_joined_is_saved_on_request_and_ends() -> None:
    talk = three_of_four()
    for version in (1, 2):
        beat(talk, 0, version)
    assert talk.ask() == "[opened] Freeze:0,1,2 [evidence]"
    talk.frozen_all(2, *range(3))
    talk.saved(0)
    assert "Thaw:0,1,2" in talk.committed(0)
    said = [talk.goodbye(rank) for rank in range(3)]
    assert said[-1] == "[done] Finished:0,1,2 [finished]"


def test_a_rank_that_joins_late_is_protected_from_then_on() -> None:
    talk = three_of_four()
    for version in (1, 2):
        beat(talk, 0, version)
    assert talk.hello(3, version=Version(2)) == "Welcome:3 [joined] [formed]"
    assert talk.lost(3).startswith("[opened] Freeze:0,1,2 [evidence]")


def test_a_rank_that_dies_before_the_job_is_formed_is_replaced() -> None:
    talk = Talk(joined=0)
    talk.hello(0)
    talk.hello(1)
    assert talk.lost(0) == "[gone]"
    assert talk.hello(0, nonce="again", launch=1) == "Welcome:0 [joined]"
    assert (
        talk.hello(1, nonce="again", launch=1) == "Refused(fenced):1 Welcome:1 [joined]"
    )  # its death is not known yet
    assert talk.hello(2, nonce="again", launch=1) == "Welcome:2 [joined] [formed]"
    assert talk.machine.job.incarnation == 1


def test_a_launch_that_came_to_nothing_is_followed_by_the_next_incarnation() -> None:
    """All ranks left before the job formed, and may have trained elsewhere, so their pages may be old."""
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank)
        talk.lost(rank)
    assert "[incarnation]" not in talk.hello(2), "somebody who has not been there goes on forming it"
    talk.lost(2)
    assert "[incarnation]" not in talk.hello(1, incarnation=1, resume=True), "and so does who was there"
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank)
        talk.lost(rank)
    assert "[incarnation]" in talk.hello(1, nonce="b", launch=1)
    assert talk.machine.job.incarnation == 2


def test_a_new_launch_opens_the_next_incarnation() -> None:
    talk = Talk()
    assert "Refused(fenced):0,1,2 [incarnation] Welcome:1" in talk.hello(1, nonce="b", launch=1)
    assert talk.machine.job.incarnation == 2
    assert talk.back(0, incarnation=1) == "Refused(fenced):0 [refused]"


def test_a_restarted_job_waits_while_the_last_one_is_saved() -> None:
    talk = Talk()
    talk.lost(0)
    assert talk.hello(0, nonce="b", launch=1) == "Refused(busy):0 [refused]"
    talk.frozen_all(7, 1, 2)
    talk.write()
    assert "Release(75):1,2" in talk.after(1)
    assert "[incarnation] Welcome:0" in talk.hello(0, nonce="b", launch=1)


def test_incarnations_go_on_when_the_controller_that_counted_is_gone() -> None:
    talk = Talk(joined=0)
    talk.hello(0, launch=4)
    assert talk.machine.job.incarnation == 5


def test_a_hello_that_comes_late_on_an_old_stream_changes_nothing() -> None:
    talk = Talk()
    talk.back(1)
    late = hello(1, talk.layout, incarnation=1, resume=True)
    assert talk.event(Received(ConnectionId(2), late)) == ""
    assert talk.event(StreamEnded(ConnectionId(2))) == ""
    assert talk.machine.job.live == {0, 1, 2}


def named(*ranks: tuple[str, str], local_ranks: int = 1, **more: Any) -> list[str]:
    """Let ranks with these hosts and addresses join, ``local_ranks`` on each machine; return the records of names."""
    talk = Talk(grid(1, len(ranks)), joined=0)
    lines = [
        talk.hello(rank, host=host, address=address, local_rank=rank % local_ranks, **more)
        for rank, (host, address) in enumerate(ranks)
    ]
    return [line for line in lines if "[one_name]" in line]


@pytest.mark.parametrize(("one", "two"), [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"), ("fe80::1%a", "fe80::1%b")])
def test_two_machines_with_one_name_are_told_once(one: str, two: str) -> None:
    """Cloned images, containers with one name: only one rank of them would collect pages, for all."""
    talk = Talk(grid(1, 8), joined=0)
    lines = [talk.hello(rank, host="node", address=(one, two)[rank // 2 % 2], local_rank=rank % 2) for rank in range(8)]
    assert [rank for rank, line in enumerate(lines) if "[one_name]" in line] == [2]


def test_a_process_of_an_earlier_start_that_made_no_update_ends_no_launch_that_forms() -> None:
    """It came first, like a rank after a takeover, and dies before the new process of its rank is here."""
    talk = Talk(grid(1, 3), joined=0)
    talk.hello(1, incarnation=1, resume=True, term_seen=1, nonce="left over")
    talk.hello(0)
    assert talk.lost(1) == "[gone]"
    talk.streams[1] += 10
    talk.hello(1)
    assert talk.hello(2) == "Welcome:2 [joined] [formed]"


def test_it_says_what_to_set() -> None:
    talk = Talk(grid(1, 2), joined=0)
    talk.hello(0, host="node", address="10.0.0.1", local_rank=0)
    talk.hello(1, host="node", address="10.0.0.2", local_rank=0)
    facts = talk.facts("one_name")
    assert facts["host"] == "node" and "set TTP_HOST to another name on each" in facts["text"]
    assert "ranks 0 and 1 " in facts["text"] and "10.0.0.1 and 10.0.0.2" in facts["text"]
    assert talk.machine.job.shared_names == ["node"]


@pytest.mark.parametrize(
    "addresses",
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "fd00::1"),
        ("127.0.0.1", "127.0.0.2"),
        ("::1", "fd00::1"),
        ("127.0.1.1", "10.0.0.1"),
        ("node0", "10.0.0.1"),
        ("node0", "node0.example"),
        ("", "10.0.0.1"),
    ],
)
def test_one_machine_may_have_several_addresses(addresses: tuple[str, str]) -> None:
    assert not named(*(("node", address) for address in addresses))


def test_ranks_of_one_launcher_may_have_several_addresses() -> None:
    """A name of the first node with several addresses leads over several ways."""
    assert not named(*(("node", f"10.0.{rank}.1") for rank in range(4)), local_ranks=4)


def test_names_are_not_compared_with_ranks_that_were_led_elsewhere_or_are_gone() -> None:
    assert not named(("node", "10.0.0.1"), ("node", "10.0.0.2"), resume=True, incarnation=3, term_seen=2)
    talk = Talk(grid(1, 3), joined=0)
    talk.hello(0, host="node", address="10.0.0.1", local_rank=0)
    talk.hello(2, host="other", address="10.0.0.3", local_rank=0)
    talk.lost(0)
    assert "[one_name]" not in talk.hello(1, host="node", address="10.0.0.2", local_rank=0), "a pod that was replaced"
    talk.streams[0] += 10
    assert "[one_name]" in talk.hello(0, host="node", address="10.0.0.1", local_rank=0, nonce="back", launch=1)


def test_a_new_process_may_take_the_place_of_a_lost_rank_on_the_host_of_another_one() -> None:
    talk = Talk(grid(1, 2), joined=0)
    for rank, host in enumerate(("node", "other")):
        talk.hello(rank, host=host, address=f"10.0.0.{rank}", local_rank=0)
    for rank in range(2):
        talk.machine.job.detach(Rank(rank))
    talk.machine.job.seats |= {Rank(0), Rank(1)}
    talk.streams[1] += 10
    line = talk.hello(1, host="node", address="10.0.0.3", local_rank=0, nonce="new")
    assert "Welcome:1" in line and "[one_name]" not in line
