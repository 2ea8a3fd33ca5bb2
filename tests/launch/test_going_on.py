"""The agreement of launchers that their ranks go on, by the store of the rendezvous."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed

from tests.waiting import until
from ttp.launch import going_on
from ttp.launch.going_on import GoingOn
from ttp.launch.rendezvous import SILENT

dist: Any = torch.distributed


class Hosts:
    """Launchers of several hosts, their store and their rendezvous."""

    def __init__(self, count: int, store: Any = None) -> None:
        self.closed, self.waiting = False, 0
        self.state = SimpleNamespace(participants=dict.fromkeys(range(count)))
        rendezvous = SimpleNamespace(
            is_closed=lambda: self.closed,
            num_nodes_waiting=lambda: self.waiting,
            _inner=SimpleNamespace(_state_holder=SimpleNamespace(state=self.state)),
        )
        group = SimpleNamespace(store=store or dist.HashStore(), group_world_size=count, master_port=4711)
        self.launchers = [GoingOn(group, rendezvous, 0) for _ in range(count)]
        self.later = GoingOn(group, rendezvous, 1)


@pytest.fixture(autouse=True)
def then(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Return a function that names what another host does while a launcher waits for the first time."""
    jobs: list[Callable[[], Any]] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert sum(slept) < 60, "it waits on"
        if jobs:
            jobs.pop()()

    timing = SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep)
    monkeypatch.setattr(going_on, "time", timing)  # other threads of this process sleep, too
    return jobs.append


def test_all_hosts_meet_where_the_first_one_says(then: Any) -> None:
    """Its address may be one of IPv6. The next continuation has another place."""
    first, second = (hosts := Hosts(2)).launchers
    then(lambda: first.goes(("fd00::1", 4242)))
    second.goes(None)
    assert second.place(lambda: "") == ("fd00::1", 4242)
    assert second.why_not() == "" and not hosts.later._said("place")


def test_a_host_that_waits_for_the_place_hears_that_another_starts_anew(then: Any) -> None:
    first, second = Hosts(2).launchers
    then(first.starts_anew)
    with pytest.raises(RuntimeError, match="another host restarts all of its ranks"):
        second.place(lambda: "")


@pytest.mark.parametrize("reason", ["closed", "waiting"])
def test_a_rendezvous_that_begins_again_ends_the_waiting(reason: str) -> None:
    """A host that joins anew, or a job that was closed, needs all ranks of the others to end."""
    hosts = Hosts(2)
    setattr(hosts, reason, 1)
    with pytest.raises(RuntimeError, match="another host restarts"):
        hosts.launchers[1].place(lambda: "")


def test_a_host_whose_ranks_cannot_go_on_does_not_wait() -> None:
    with pytest.raises(RuntimeError, match="a rank has ended meanwhile"):
        Hosts(2).launchers[1].place(lambda: "a rank has ended meanwhile")


def test_a_store_that_is_gone_does_not_keep_a_launcher_from_starting_anew() -> None:
    """The others notice it by the end of the rendezvous."""

    def fail(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    alone = Hosts(2).launchers[0]
    alone._store = SimpleNamespace(set=fail)
    alone.starts_anew()


def test_a_host_without_a_living_rank_waits_until_others_go_on(then: Any) -> None:
    first, second = Hosts(2).launchers
    then(lambda: first.goes(None))
    assert second.others_go(600)


@pytest.mark.parametrize("end", ["all are dead", "a host starts anew", "a host is lost", "time is up"])
def test_a_host_without_a_living_rank_starts_anew_when_nobody_goes_on(end: str, then: Any) -> None:
    hosts = Hosts(2)
    first, second = hosts.launchers
    if end == "all are dead":
        then(lambda: first.others_go(0))
    elif end == "a host starts anew":
        then(first.starts_anew)
    elif end == "a host is lost":
        then(hosts.state.participants.popitem)
    assert not second.others_go(0 if end == "time is up" else 600)


# ------------------------------------------------------------------- a store whose host has lost its power


SERVER = """
import signal
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a store whose process is stopped: as if its host had lost its power, it answers nothing."""
    monkeypatch.setattr(going_on, "ANSWER_S", 0.3)
    monkeypatch.setattr(going_on, "time", time)
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
            server.send_signal(signal.SIGSTOP)
            until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
            yield client
        finally:
            server.kill()


def in_time(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or the exception that it raised. It fails the test if it hangs."""
    results: list[Any] = []

    def act() -> None:
        try:
            results.append(action())
        except Exception as problem:
            results.append(problem)

    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    acting.join(30.0)
    assert results, "it waits for a store that does not answer"
    return results[0]


def test_a_store_that_does_not_answer_is_a_reason_not_to_go_on(silent: Any) -> None:
    (hosts, _) = Hosts(2, silent).launchers
    assert in_time(hosts.why_not) == SILENT
    assert in_time(lambda: hosts.others_go(patience_s=60.0)) is False
    assert in_time(hosts.starts_anew) is None
    for action in (lambda: hosts.goes(("h", 1)), lambda: hosts.place(lambda: "")):
        assert isinstance(in_time(action), TimeoutError | RuntimeError)
