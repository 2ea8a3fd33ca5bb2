"""When a host that stands by takes a place."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from tests.waiting import until
from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch import moved_ranks, rendezvous, stand_by
from ttp.launch.agent import TtpAgent
from ttp.launch.run import _parse
from ttp.launch.stand_by import LATE_S, VACANT_S, Rescheduling, StandBy, vacancies


@dataclass(frozen=True)
class Node:
    """A host in torch's rendezvous."""

    addr: str
    pid: int


@pytest.mark.parametrize(
    ("round_number", "complete", "there", "waiting", "expected"),
    [
        (0, False, "", "", 0),  # nobody has come yet
        (0, False, "a", "", 0),  # the job has not formed: whoever it lacks may be on the way
        (0, True, "ab", "", 0),
        (0, True, "b", "a", 0),  # a meets again, b still saves
        (0, True, "", "a", 1),  # b is silent
        (1, False, "a", "", 1),
        (1, False, "ab", "", 0),
        (1, False, "", "", 0),  # between the last that leaves a round and the first that enters the next
        (1, True, "a", "", 0),  # b is silent, and nobody waits for it: its ranks may train
        (2, True, "ab", "", 0),
    ],
)
def test_a_place_is_empty_when_others_meet_without_a_host(
    round_number: int, complete: bool, there: str, waiting: str, expected: int
) -> None:
    state = SimpleNamespace(
        round=round_number, complete=complete, participants=dict.fromkeys(there, 0), wait_list=set(waiting)
    )
    assert vacancies(state, hosts=2) == expected


def test_a_rendezvous_that_lets_nobody_in_later_is_refused() -> None:
    static = SimpleNamespace(get_backend=lambda: "static")
    with pytest.raises(ConfigError, match=r"--stand-by needs .* and static is not one: start all hosts .* c10d"):
        StandBy(static, 1.0, lambda store: None)


class Turns:
    """A fake of the store in which standby hosts count."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def add(self, key: str, by: int) -> int:
        self.counted[key] += by
        return self.counted[key]


def test_of_two_the_first_takes_a_place_at_once_and_the_second_the_next_one() -> None:
    store, state = Turns(), SimpleNamespace(round=0, complete=True)
    inner = SimpleNamespace(_state_holder=SimpleNamespace(state=state), _get_store=lambda: store)
    first, second = (StandBy(inner, 1.0, lambda store: None) for _ in range(2))
    assert first._may_enter(1, VACANT_S)
    state.round, state.complete = 1, False  # the last host has left the round before
    assert not second._may_enter(1, VACANT_S), "there is one place only"
    assert second._may_enter(1, LATE_S), "the first one does not come"
    state.round, state.complete = 1, True
    assert not second._may_enter(1, 0.0), "hosts that restart leave a place for a moment"
    assert second._may_enter(1, VACANT_S), "another place: it is the first one now"


def test_a_rendezvous_that_has_gone_lets_a_host_leave_that_was_not_needed() -> None:
    def is_closed() -> bool:
        raise RendezvousConnectionError("the connection has failed")

    inner = SimpleNamespace(_state_holder=None, is_closed=is_closed, settings=SimpleNamespace(max_nodes=2))
    with pytest.raises(RendezvousGracefulExitError):
        StandBy(inner, 1.0, lambda store: None).next_rendezvous()


def test_a_job_that_ends_while_a_host_enters_lets_it_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may have entered because the first was slow, or a host that was taken for lost has come again."""

    def meet() -> None:
        raise RendezvousClosedError

    lost = SimpleNamespace(round=1, complete=False, participants={"a": 0}, wait_list=set())
    monkeypatch.setattr(stand_by, "VACANT_S", 0.0)
    inner = SimpleNamespace(
        _state_holder=SimpleNamespace(state=lost), is_closed=lambda: False, next_rendezvous=meet,
        _get_store=Turns, settings=SimpleNamespace(max_nodes=2, timeout=RendezvousTimeout()),
    )  # fmt: skip
    with pytest.raises(RendezvousGracefulExitError):
        StandBy(inner, 1.0, lambda store: None).next_rendezvous()


@pytest.mark.parametrize(
    ("seated", "wait_s", "limit"),
    [
        (True, 270.0, "within TTP_RESCHEDULE_S=270 s"),
        (False, 270.0, "within --rdzv-conf join_timeout=600 s"),  # the hosts meet for the first time
        (True, 0.0, "within --rdzv-conf join_timeout=600 s"),
    ],
)
def test_the_limit_that_ended_a_meeting_is_named(
    seated: bool, wait_s: float, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    met: list[Any] = [None] if seated else []

    def meet() -> Any:
        if not met:
            raise RendezvousTimeoutError
        return met.pop()

    timeouts = SimpleNamespace(timeout=RendezvousTimeout())
    inner = SimpleNamespace(settings=timeouts, next_rendezvous=meet, num_nodes_waiting=lambda: 0)
    rendezvous = Rescheduling(inner, wait_s)
    for _ in met[:]:
        rendezvous.next_rendezvous()
    with pytest.raises(RendezvousTimeoutError):
        rendezvous.next_rendezvous()
    assert limit in caplog.text


@pytest.mark.parametrize(
    ("complete", "here"),
    [(False, "3 of 4 are here (10.0.0.1, 10.0.0.2)"), (True, "1 of 4 are here (10.0.0.1)")],
)
def test_a_host_that_waits_says_for_how_long_and_who_is_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, complete: bool, here: str
) -> None:
    """Its launcher was silent for ``TTP_RESCHEDULE_S`` seconds after the loss of a host.

    The lost host stays in the complete round until its keep-alives are missed; the others wait for the next round. Two
    launchers may run on one machine.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    one, other, beside = Node("10.0.0.1", 1), Node("10.0.0.2", 2), Node("10.0.0.2", 3)
    there = [other, beside] if complete else [other, beside, one]
    state = SimpleNamespace(
        complete=complete, participants=dict.fromkeys(there, 0), wait_list={one}, redundancy_list=set()
    )
    inner = SimpleNamespace(
        settings=SimpleNamespace(timeout=RendezvousTimeout(), max_nodes=4),
        _this_node=one,
        _state_holder=SimpleNamespace(state=state),
        next_rendezvous=lambda: until(lambda: caplog.messages),
        num_nodes_waiting=lambda: 0,
    )
    meeting = Rescheduling(inner, 270.0)
    for within in ("--rdzv-conf join_timeout=600 s", "TTP_RESCHEDULE_S=270 s"):
        meeting.next_rendezvous()
        (said,) = caplog.messages
        assert said.endswith(f"other hosts (0 s so far): {here}; the wait ends after {within}")
        caplog.clear()
    state.redundancy_list.add(one)
    meeting.next_rendezvous()
    assert "all 4 places are taken (10.0.0." in caplog.text and "and this host stands by" in caplog.text
    meeting.shutdown()  # ``inner`` has no such method: a host without a place does not close it for the others


def test_a_host_that_waits_in_vain_names_the_missing_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log said how many were missing and who was here: of 125 hosts the reader had to find the one that was not."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    one, lost = Node("10.0.0.1", 1), Node("10.0.0.2", 2)
    state = SimpleNamespace(
        complete=True, participants={one: 0, lost: 1}, wait_list={one}, redundancy_list=set(), round=0
    )
    rounds = iter([SimpleNamespace(world_size=2)])

    def meet() -> Any:
        for info in rounds:
            return info
        until(lambda: caplog.messages)
        raise RendezvousTimeoutError

    inner = SimpleNamespace(
        settings=SimpleNamespace(timeout=RendezvousTimeout(), max_nodes=2),
        _this_node=one,
        _state_holder=SimpleNamespace(state=state),
        next_rendezvous=meet,
        num_nodes_waiting=lambda: 0,
    )
    meeting = Rescheduling(inner, 15.0)
    meeting.next_rendezvous()
    assert meeting.num_nodes_waiting() == 0
    caplog.clear()
    with pytest.raises(RendezvousTimeoutError):
        meeting.next_rendezvous()
    assert "1 of 2 are here (10.0.0.1; missing: 10.0.0.2); the wait ends after" in caplog.text
    assert "a host is missing (10.0.0.2), and none has come within TTP_RESCHEDULE_S=15 s" in caplog.text


@pytest.mark.parametrize("answers", [True, False])
def test_a_launcher_that_ends_by_a_signal_keeps_no_place_alive(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keep-alive that was under way aborted Python at its end: the exit code was 134 instead of 75."""
    asked, signal = threading.Event(), SignalException("SIGTERM", Signals.SIGTERM)

    def stop() -> None:
        asked.set()
        threading.Event().wait(0 if answers else None)

    agent: Any = object.__new__(TtpAgent)
    spec = SimpleNamespace(rdzv_handler=Rescheduling(SimpleNamespace(_stop_heartbeats=stop), 1.0))
    agent._worker_group, agent._pcontext = SimpleNamespace(spec=spec, group_world_size=1, workers=[]), None
    agent._host, agent._token = Mock(), Mock(made_here=False)
    monkeypatch.setattr(stand_by, "LEAVE_S", 0.1)
    monkeypatch.setattr(LocalElasticAgent, "run", Mock(side_effect=signal))
    with pytest.raises(SignalException):
        agent.run()
    assert asked.is_set()


def test_a_launcher_says_that_it_waits_for_others_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was killed does not come: torch waits for five minutes, and says nothing."""
    caplog.set_level(logging.INFO, "ttp.launch")
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    monkeypatch.setattr(LocalElasticAgent, "_exit_barrier", lambda _: until(lambda: caplog.messages))
    agent: Any = object.__new__(TtpAgent)
    agent._worker_group, agent._exit_barrier_timeout = SimpleNamespace(spec=Mock()), 300
    agent._exit_barrier()
    assert "the ranks of this host have ended; the wait ends after 300 s" in caplog.text


TEN_S = "keep_alive_interval=1,keep_alive_max_attempt=10"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ""),
        (["--rdzv-backend", "c10d"], TEN_S),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=9"], f"join_timeout=9,{TEN_S}"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "keep_alive_interval=4"], "keep_alive_interval=4"),
        (["--rdzv-backend", "c10d", "--nnodes", "1:65"], ""),
    ],
)
def test_a_lost_host_is_noticed_sooner_than_by_torch(flags: list[str], expected: str) -> None:
    assert _parse([*flags, "x.py"]).rdzv_conf == expected


@pytest.mark.parametrize(("forms", "there", "again"), [
    (True, "ab", 3), (True, "abc", 0), (True, "bcd", 3), (True, "", 3), (False, "ab", 0)
])  # fmt: skip
def test_a_host_that_is_lost_while_ranks_start_has_all_started_again(
    forms: bool, there: str, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The others would wait for its ranks until torch's time-out. Those that have joined the job are saved first.

    A host that torch took for lost because it was busy learns it so, too, after the others have left the round. But a
    host that is often too busy must not keep the job from starting.
    """
    inner = Mock(_this_node="a")
    inner.settings.timeout.join.total_seconds.return_value = 600.0
    inner.num_nodes_waiting.return_value = 0
    inner.next_rendezvous.return_value.world_size = 3
    inner._state_holder.state = SimpleNamespace(participants=there)
    starting = [forms]
    meeting = Rescheduling(inner, 0, lambda: starting[0])
    meeting.next_rendezvous()
    for _ in range(2):
        assert [meeting.num_nodes_waiting() for _ in range(5)] == [1] * again + [0] * (5 - again)
        starting[0] = False
        assert meeting.num_nodes_waiting() == 0
        starting[0] = forms
    assert caplog.text.count("a host is lost, or seemed to be") == 2 * again


def test_a_launcher_that_was_killed_is_told_of_by_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ranks train on, but nobody starts them again, which only `ttp status` on that host said.

    A launcher that was silent for too long is dropped by the others, and lives: it does not tell of itself.
    """
    monkeypatch.setattr(stand_by, "ALONE_S", 0.0)
    one, other, next_one = (Node(f"10.0.0.{number}", number) for number in (1, 2, 3))
    inner = Mock(_this_node=one)
    inner.settings.timeout.join.total_seconds.return_value = 600.0
    inner.num_nodes_waiting.return_value = 0
    inner.next_rendezvous.return_value.world_size = 2
    inner._state_holder.state = SimpleNamespace(participants={one: 0, other: 1})
    meeting = Rescheduling(inner, 0)
    meeting.next_rendezvous()
    assert not meeting.num_nodes_waiting() and not caplog.messages
    inner._state_holder.state.participants = {one: 0}
    assert [meeting.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert ["10.0.0.2 " in text for text in caplog.messages] == [True]
    meeting.next_rendezvous()
    inner._state_holder.state.participants = {one: 0, next_one: 1}
    meeting.num_nodes_waiting()
    inner._state_holder.state.participants = {next_one: 0}
    assert [meeting.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    meeting.next_rendezvous()
    inner._state_holder.state.participants = {one: 0}
    assert [meeting.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert len(caplog.messages) == 1, "the host of the round before is not missing in this one"


KEEPS = "is_host=1"


@pytest.mark.parametrize(
    ("endpoint", "conf", "known", "expected"),
    [
        ("train-0.train:29500", "", False, f"{TEN_S},{KEEPS}"),
        ("TRAIN-0.train.ns", "", False, f"{TEN_S},{KEEPS}"),
        ("train-0.train:29500", "is_host=0", False, f"is_host=0,{TEN_S}"),
        ("train-0.train:29500", "", True, TEN_S),  # torch finds out by itself
        ("train-1.train:29500", "", False, TEN_S),
        ("train-0.tr:29500", "", False, TEN_S),
        ("10.0.0.7:29500", "", False, TEN_S),
    ],
)
def test_a_pod_keeps_the_rendezvous_before_the_name_service_knows_it(
    endpoint: str, conf: str, known: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record comes late, or still has the address of the pod before. Then no host would keep the rendezvous."""
    monkeypatch.setattr("socket.getfqdn", lambda: "train-0.train.ns.svc.cluster.local")
    monkeypatch.setattr("ttp.launch.run.is_local", lambda name: known)
    flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf]
    assert _parse([*flags, "--nnodes", "2", "x.py"]).rdzv_conf == expected


@pytest.mark.parametrize("kind", [None, Rescheduling, StandBy])
def test_a_launcher_says_that_it_waits_for_others(
    kind: type | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a static rendezvous the host that serves it may be gone for good, and torch waits for minutes.

    It is no warning: the hosts of a healthy job may start minutes apart. A dynamic rendezvous tells it by itself.
    """

    def meet(*_: object) -> None:
        if kind is None:
            until(lambda: caplog.messages)

    caplog.set_level(logging.INFO)
    agent: Any = object.__new__(TtpAgent)
    handler: Any = SimpleNamespace() if kind is None else object.__new__(kind)
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    agent._rendezvous(SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)))
    said = [(record.levelno, record.getMessage().partition(" (")[0]) for record in caplog.records]
    assert said == [(logging.INFO, "waiting for the launchers of other hosts")] * (kind is None)


def test_moved_ranks_run_on_while_a_certificate_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launcher cannot offer its host then: the files of the new certificate do not fit each other yet."""
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"TTP_TLS_{name}", str(tmp_path / name))
    monkeypatch.setattr(moved_ranks, "ANSWER_S", 0.0)
    host: Any = SimpleNamespace(wait_for_a_death=time.sleep)
    moved = moved_ranks.MovedRanks(SimpleNamespace(), host)
    job = Config(port=1)
    worker = subprocess.Popen(["sleep", "1"])
    moved._look_after({0: worker}, lambda: moved._offer(job, "127.0.0.1"))
    assert worker.wait() == 0
