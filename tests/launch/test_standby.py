"""Standby controllers, as ranks start them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import until
from ttp.config import Config
from ttp.core import messages as m
from ttp.core.layout import Rank
from ttp.errors import ConfigError
from ttp.launch import presence, standby
from ttp.launch.controller_process import start_controller
from ttp.launch.presence import controller_pid
from ttp.launch.ring import job_is_busy
from ttp.processor import errands
from ttp.wire.address import split
from ttp.wire.v1.controller_pb2 import GetStatusResponse


def test_one_that_cannot_be_asked_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a port, and nobody would know of it. Certificates cannot be read while they are renewed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    def ask(*_: Any) -> bool:
        raise ConfigError("TTP_TLS_CERT cannot be read")

    monkeypatch.setattr(standby, "start_controller", start)
    monkeypatch.setattr(standby, "wait_until_serving", ask)
    try:
        with pytest.raises(ConfigError, match="cannot be read"):
            standby.start_standby(Config(token="secret"), tmp_path, "127.0.0.1", "")
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The controllers that the test starts; they are ended after it."""
    children: list[subprocess.Popen[bytes]] = []

    def noted(*place: Any, **settings: Any) -> subprocess.Popen[bytes]:
        children.append(start_controller(*place, **settings))
        return children[-1]

    monkeypatch.setattr(standby, "start_controller", noted)
    yield children
    for child in children:
        child.kill()
        child.wait()


def test_one_that_runs_is_used_again(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """Each takeover, and each launch in which this process goes on, orders a standby controller again."""
    config = Config(token="secret")
    first = standby.start_standby(config, tmp_path, "127.0.0.1", "")
    assert standby.start_standby(config, tmp_path, "127.0.0.1", "") == first
    assert controller_pid(*split(first), "secret") == started[0].pid and len(started) == 1
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    second = standby.start_standby(config, tmp_path, "127.0.0.1", "")
    assert controller_pid(*split(second), "secret") == started[1].pid


def test_one_that_does_not_start_or_ends_is_started_again(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs it until the controller is lost, so nobody else would notice."""
    monkeypatch.setattr(errands, "LOOK_S", 0.05)
    monkeypatch.setattr(standby, "START_S", 0.0)  # this host is busy
    config = Config(token="secret", run_dir=str(tmp_path), address="127.0.0.1")
    job: Any = SimpleNamespace(config=config, env=SimpleNamespace(master_addr="127.0.0.1"), save_dir=tmp_path)
    told: Queue[Any] = Queue()
    kept = errands.Errands(job, told.put)
    kept.run(m.StandBy(Rank(2), 1))
    assert told.get(timeout=60).address == ""
    monkeypatch.setattr(standby, "START_S", 60.0)
    first = until(lambda: told.get(timeout=60).address, 60)
    started[-1].send_signal(signal.SIGKILL)
    started[-1].wait()
    second = told.get(timeout=60).address
    assert first and controller_pid(*split(second), "secret") == started[-1].pid
    kept.end()
    until(lambda: all(thread.name != "ttp-standby" for thread in threading.enumerate()))


def test_one_whose_rank_has_ended_makes_way(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end seconds later, and hold the one port meanwhile that a firewall may let through."""
    config = Config(token="secret", port=free_port())
    gone = subprocess.Popen(["true"])
    gone.wait()
    with monkeypatch.context() as earlier:
        earlier.setattr(os, "getpid", lambda: gone.pid)
        first = standby.start_standby(config, tmp_path, "127.0.0.1", "")
    assert first == f"127.0.0.1:{config.port}"
    assert standby.start_standby(config, tmp_path, "127.0.0.1", "") == first
    assert started[0].wait(60) == 0 and controller_pid(*split(first), "secret") == started[1].pid


def test_who_looks_for_a_controller_does_not_ask_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand launchers look at once when a job restarts, and a list of ten thousand ranks takes 30 ms."""
    asked: list[Any] = []

    def ask(_address: str, _port: int, _token: str, _method: str, request: Any, _timeout_s: float) -> Any:
        asked.append(request)
        return GetStatusResponse(world_size=10_000, attached=True)

    monkeypatch.setattr(presence, "ask", ask)
    assert job_is_busy(["127.0.0.1:5"], "secret")
    assert controller_pid("127.0.0.1", 5, "secret") == 0
    assert [request.brief for request in asked] == [True, True]
