"""Torch's static rendezvous at a restart, with stores of this process; clocks in its dynamic one."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
import time
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests.forking import fork
from tests.processor.fake_source import no_thread
from tests.waiting import until
from ttp.launch import job_verdict, rendezvous, ring
from ttp.launch.rendezvous import FreshStoreRendezvous, OwnTime, keep_own_time, missing_nodes

TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # not in its stubs
HOST = "127.0.0.1"
TIMEOUTS = dynamic_rendezvous.RendezvousTimeout()


def nodes(count: int) -> tuple[Any, list[FreshStoreRendezvous]]:
    """Return the store of a static rendezvous and the rendezvous of each node."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    where = RendezvousStoreInfo(HOST, store.port)
    met = [RendezvousInfo(store, node, count, where) for node in range(count)]
    inner = [SimpleNamespace(next_rendezvous=lambda info=info: info) for info in met]
    return store, [FreshStoreRendezvous(each, HOST) for each in inner]


def test_a_restart_to_which_another_launcher_does_not_come_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its launcher was stopped. Torch's agents do not wait for one another, and the ranks wait for half an hour."""
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    caplog.set_level(logging.INFO, "ttp.launch")
    _, both = nodes(2)
    for each in both:
        assert each.next_rendezvous().bootstrap_store_info is not None
    assert not caplog.messages, "torch's agents wait for one another in the first attempt"
    both[0].next_rendezvous()
    until(lambda: caplog.messages)
    assert "node 1 (--node-rank) has not started its ranks again" in caplog.messages[0]


def test_nodes_that_have_come_are_not_missing() -> None:
    store, all_of_them = nodes(3)
    for _ in range(3):
        ports = {getattr(each.next_rendezvous().bootstrap_store_info, "master_port", None) for each in all_of_them}
        assert len(ports) == 1
    assert [missing_nodes(store, attempt, 3) for attempt in (1, 2)] == ["", ""]
    assert "node 0, 1, 2 (" in missing_nodes(store, 3, 3)
    for each in all_of_them:
        each._late.cancel()


def test_a_launcher_without_room_for_a_thread_waits_for_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks after its ranks once in a second: an error would end a healthy job."""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert rendezvous.asked_aside(lambda: 3).result(0) == 3
    assert list(ring.ask_everybody(["a:1", "b:2"], lambda host, port: (host, port), lambda: 0.0)) == [
        ("a:1", ("a", 1)), ("b:2", ("b", 2))
    ]  # fmt: skip
    rendezvous.tell_later(lambda: "").cancel()
    said = Mock()
    monkeypatch.setattr(job_verdict, "_ask", said)
    job_verdict.say_start(["a:1"], "", "host")
    said.assert_called_once()


def test_a_store_that_is_gone_is_nothing_to_tell() -> None:
    gone = SimpleNamespace(check=lambda _: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
    assert missing_nodes(gone, 1, 2) == ""


def clock(ahead_s: float) -> type[datetime]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=ahead_s)

    return Clock


def meets(port: int, ahead_s: float, conf: str, test: Connection) -> None:
    """Meet the other host, with a clock that is so many seconds ahead, and say for how long the two see each other."""
    cast(Any, dynamic_rendezvous).datetime = clock(ahead_s)
    cast(Any, OwnTime).now = lambda zone: OwnTime.fromtimestamp(time.time() + ahead_s, zone)
    settings: dict[str, Any] = dict(each.split("=") for each in conf.split(","))
    place = ("c10d", f"{HOST}:{port}", "job", 2, 2, HOST)
    meeting: Any = get_rendezvous_handler(RendezvousParameters(*place, is_host="no", **settings))
    keep_own_time(meeting)
    test.send(meeting.next_rendezvous().world_size)
    while True:
        meeting.num_nodes_waiting()
        test.send(len(meeting._state_holder.state.participants))
        time.sleep(0.05)


def test_hosts_meet_whose_clocks_differ_and_one_that_is_lost_is_noticed() -> None:
    """torch compares the time of a keep-alive with the clock of the host that reads it."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3"
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    hosts = [fork(meets, (store.port, s, conf, theirs)) for s, (_, theirs) in zip((0, 3600), pipes, strict=True)]
    try:
        assert [ours.poll(100) and ours.recv() for ours, _ in pipes] == [2, 2]
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            assert [ours.recv() for ours, _ in pipes] == [2, 2]
        hosts[0].kill()
        until(lambda: pipes[1][0].recv() == 1)
    finally:
        for host in hosts:
            host.kill()
            host.join()


class Backend:
    """A backend of torch's rendezvous, in memory."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> tuple[bytes, int]:
        return pickle.dumps(self.state), 0

    def set_state(self, state: bytes, token: int) -> tuple[bytes, int, bool]:
        self.state = pickle.loads(state)
        return state, token, True


@pytest.mark.parametrize("zone", [timezone.utc, None])
@pytest.mark.parametrize("off_s", [-3600, 3600])
def test_times_of_another_host_are_those_of_this_one_here_and_its_own_there(
    zone: timezone | None, off_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older torch notes UTC without a zone. A host that is silent must not seem to live because others say so."""
    now = datetime.now(timezone.utc).replace(tzinfo=zone)
    theirs = now + timedelta(seconds=off_s)
    state: Any = dynamic_rendezvous._RendezvousState()
    state.last_heartbeats, state.deadline = {"b": theirs}, theirs
    backend, settings = Backend(state), SimpleNamespace(run_id="job", min_nodes=1)
    held: Any = dynamic_rendezvous._BackendRendezvousStateHolder(cast(Any, backend), cast(Any, settings), 0)
    judged: list[dict[str, datetime]] = []
    monkeypatch.setattr(held, "_sanitize", lambda: judged.append(dict(held.state.last_heartbeats)))
    keep_own_time(SimpleNamespace(_state_holder=held, settings=SimpleNamespace(timeout=TIMEOUTS)))
    held.sync()
    assert abs(judged[0]["b"] - now) < timedelta(seconds=20)
    assert abs(held.state.deadline - now - TIMEOUTS.last_call) < timedelta(seconds=20)
    held.state.last_heartbeats["a"] = now
    held.mark_dirty()
    held.sync()
    assert backend.state.last_heartbeats == {"a": now, "b": theirs} and backend.state.deadline == theirs
    assert type(backend.state.last_heartbeats["b"]) is type(backend.state.deadline) is datetime, "hosts may lack ttp"
    assert judged[1]["b"] - judged[0]["b"] < timedelta(milliseconds=1), "it has sent nothing new"
    held.state.last_heartbeats.pop("b")
    held.state.deadline = None
    held.mark_dirty()
    held.sync()
    assert backend.state.last_heartbeats.keys() == {"a"} and backend.state.deadline is None
