"""Another controller leads the job, or its next launch: what ranks tell it again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.core.talk import PATIENCE, Talk, all_at_7
from ttp.core import messages as m
from ttp.core.controller.events import Remembered
from ttp.core.controller.fault_targets import fault_targets
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid


def test_a_takeover_in_the_steady_state_changes_nothing() -> None:
    talk = Talk(incarnation=2, resume=True, term_seen=1, version=7)
    assert (talk.machine.job.term, talk.machine.job.incarnation, talk.machine.stage) == (2, 2, "training")
    assert talk.lost(0).startswith("[opened] Freeze:1,2")


def test_a_dead_rank_that_never_says_hello_again_is_missed() -> None:
    talk = Talk(joined=2, incarnation=2, resume=True, term_seen=1, version=7)
    assert talk.after(4) == ""
    assert talk.after(1) == "[opened] Freeze:0,1 [evidence]"
    assert talk.facts("evidence")["text"] == "rank 2 did not come back to the new controller"


def test_a_dead_rank_that_is_missed_is_accused_with_the_host_that_the_controller_before_had_recorded() -> None:
    talk = Talk(joined=2, incarnation=2, resume=True, term_seen=1, version=7)
    talk.event(Remembered(0, False, hosts={Rank(1): "elsewhere", Rank(2): "a"}))
    talk.after(5)
    told = talk.facts("evidence")
    assert (told["text"], told["host"]) == ("rank 2 on a did not come back to the new controller", "a")


def test_a_dead_rank_that_is_missed_died_as_its_launcher_has_told_the_new_controller() -> None:
    talk = Talk(joined=2, incarnation=2, resume=True, term_seen=1, version=7)
    told = [fault_targets(talk.machine.job, [Rank(r)], "", exited=True).ranks for r in (2, 3)]
    assert told == [(2,), ()] and not fault_targets(talk.machine.job, [Rank(2)], "").ranks
    assert talk.accuse(2, m.FaultKind.EXITED) == "", "it may be about an earlier process"
    talk.after(5)
    assert talk.incident.cause == "rank 2 did not come back to the new controller: seen from outside"


def test_a_rank_that_never_comes_back_explains_why_the_collectives_of_the_others_failed() -> None:
    talk = Talk(joined=2, incarnation=2, resume=True, term_seen=1, version=7, broken="a collective failed")
    talk.after(5)
    assert talk.incident.cause == "rank 2 did not come back to the new controller"


def test_a_job_that_never_trained_is_still_waited_for() -> None:
    talk = Talk(joined=2, incarnation=2, resume=True, term_seen=1)
    assert talk.after(5) == ""
    assert talk.after(5) == ""
    assert talk.hello(2) == "Welcome:2 [joined] [formed]"


def test_nothing_is_decided_while_ranks_are_coming_back() -> None:
    talk = Talk(joined=0)
    talk.hello(0, incarnation=2, resume=True, term_seen=1, version=7)
    talk.fault(0, m.FaultKind.COLLECTIVE)
    assert talk.frozen(0, 7) == "[answer]"
    talk.hello(1, incarnation=2, resume=True, term_seen=1, version=8)
    assert talk.frozen(1, 8) == "[answer]"
    assert talk.after(5) == "[evidence] [plan] Save:1"
    assert talk.facts("plan")["version"] == 8


def test_an_incident_is_taken_over_and_thawed_when_nothing_is_broken() -> None:
    talk = Talk(joined=0)
    assert "[opened] Freeze:0" in talk.hello(0, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
    talk.frozen(0, 7)
    talk.hello(1, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
    assert talk.hello(2, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1").endswith(
        "Thaw:0,1,2 [thawed]"
    )


def test_an_incident_is_taken_over_and_finished_when_somebody_is_broken() -> None:
    talk = Talk(joined=0)
    for rank in (0, 1):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7, incident="old-1")
        talk.frozen(rank, 7)
    assert talk.after(5) == "[evidence] [plan] Save:0"
    save = talk.orders(m.Save)[0]
    assert (save.incident, save.term, save.generation) == ("old-1", 2, 1 << 16)  # no file name is used twice


def test_a_rank_that_missed_the_thaw_is_thawed() -> None:
    talk = all_at_7(Talk.ask, 0, 1, 2)
    talk.write()
    assert talk.back(1, incident="i1") == "Welcome:1 [reconnected] Thaw:1"


def test_a_rank_that_is_frozen_for_nothing_is_thawed() -> None:
    talk = Talk()
    assert talk.report(0, m.Frozen(Rank(0), "gone", Version(7), m.Phase.IDLE, True)) == "Thaw:0"


def test_a_rank_that_missed_the_release_is_released() -> None:
    talk = all_at_7(lambda talk: talk.fault(0), 0, 1, 2)
    talk.write()
    assert talk.machine.stage == "released"
    for rank in range(3):
        talk.lost(rank)
    assert talk.back(2, incident="i1").endswith("Release(75):2")


def test_a_checkpoint_that_the_controller_before_committed_counts_after_a_takeover() -> None:
    """The rank with the only other copy of a shard died once that was written, and the controller after the commit."""
    talk = Talk(grid(2, 1), joined=0)
    talk.hello(0, incarnation=1, resume=True, term_seen=1, version=7, incident="old-1", takeover=True)
    talk.frozen(0, 7)
    talk.event(Remembered(0, True, (Version(7), "step_7")))
    talk.event(Remembered(0, True, (Version(5), "step_5")))  # read slowly
    assert talk.after(PATIENCE.gather_s).endswith("[evidence] [nothing_new] [released] Release(75):0")
    assert talk.facts("released")["text"] == "version 7 is on disk already; a restart goes on with step 8"


@pytest.mark.parametrize("read_after", [1, 3])
def test_a_host_that_was_drained_before_the_takeover_is_still_left(read_after: int) -> None:
    """The operator has told a controller that was lost before the job was saved."""
    talk = Talk(joined=0)
    said = []
    for rank, host in enumerate("aab"):
        said.append(talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=7, host=host))
        if rank + 1 == read_after:
            said.append(talk.event(Remembered(0, False, drained=frozenset({"b"}))))
    assert said[-1].endswith("[opened] Freeze:0,1,2 [evidence]")
    assert talk.facts("evidence")["text"] == "b is drained"
    assert talk.frozen_all(7, 0, 1, 2) == "[answer] [plan] Save:0,2"
    assert talk.machine.drained_hosts == ["b"]


@pytest.mark.parametrize(
    ("recorded", "version", "found_s"), [(True, 11, 30), (False, 30, None), (True, 10, None)], ids=str
)
def test_a_job_that_hangs_as_its_controller_is_lost_is_found_to_hang_by_the_next_one(
    recorded: bool, version: int, found_s: int | None
) -> None:
    """No rank moves any more, so the pace cannot be learnt again. The history has the longest wait, of 10 s here."""
    talk = Talk(joined=0)
    talk.machine = ControllerMachine(replace(PATIENCE, hang_s=5.0), lambda n: f"i{n}", 0.0, host="h")
    for rank in range(3):
        talk.hello(rank, incarnation=2, resume=True, term_seen=1, version=version, base_version=1)
    talk.event(Remembered(0, True, stood_s=10.0, present=recorded))
    for talk.now, rank in itertools.product(range(1, 200), range(3)):
        talk.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE))
        if rank == 2 and (said := talk.after(0)):
            break
    assert said == ("[opened] Freeze:0,1,2 [evidence] [stood_still]" if found_s else "")
    assert talk.now == (found_s or 199)
