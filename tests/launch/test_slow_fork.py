"""A launcher waits for a worker that is being forked, but not for a process that cannot fork now."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttp.config import Config
from ttp.launch.warm import starter as module
from ttp.launch.warm import template
from ttp.launch.warm.starter import Ready, WarmStarter

READY = {"state": "ready", "modules": 1, "bytes": 0, "seconds": 0.0, "read": [], "read_all": ""}
COMMAND = [sys.executable, "-u", __file__]


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[WarmStarter]:
    """Return a starter whose process to fork from takes orders and never answers."""
    starter = WarmStarter(Config(), tmp_path)
    starter._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    starter._ready, starter._started_with = Ready(1, 0, 0.0, frozenset(), ""), dict(os.environ)
    with theirs:
        yield starter
    starter.close()


def state(directory: Path) -> str:
    return str(json.loads((directory / "warm.json").read_text())["state"])


def test_no_launcher_waits_for_a_stopped_process(
    silent: WarmStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORK_S", 1e6)
    assert silent._process is not None
    silent._process.send_signal(signal.SIGSTOP)
    assert silent.worker(COMMAND, os.environ, None, None) is None
    assert state(tmp_path) == "the process to fork from gets no further"
    assert not silent.ready, "the next worker is started at once"


def test_a_launcher_waits_no_longer_than_a_while(
    silent: WarmStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORK_S", 0.0)
    assert silent.worker(COMMAND, os.environ, None, None) is None
    assert state(tmp_path) == "the process to fork from gets no further"


def test_time_in_which_the_host_was_suspended_is_no_time_of_waiting(
    silent: WarmStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = itertools.count(0.0, 100.0), iter([False, False, True])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(module, "readable", lambda *_: next(looks))
    assert silent._socket is not None and silent._answers(silent._socket)


def test_time_in_which_both_were_stopped_is_no_time_of_importing(
    silent: WarmStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = itertools.count(0.0, 100.0), iter([False] * 20 + [True])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(module, "readable", lambda *_: next(looks))
    assert silent._socket is not None
    silent._socket.close()
    silent._ready, (silent._socket, theirs) = None, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(json.dumps(READY).encode())
    assert silent._wait_ready()
    theirs.close()


@pytest.mark.parametrize("says", [b"go", b"no"])
def test_a_worker_does_not_count_the_time_in_which_it_was_stopped(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    now, parents, looks = itertools.count(0.0, 100.0), iter([0, 0, 0, 0, 7]), iter([False, True])
    monkeypatch.setattr("ttp.polling.time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(template, "readable", lambda *_: next(looks))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(says)
        assert template._may_go(theirs, 7) == (says == b"go")
        assert int(ours.recv(64)) == os.getpid()


@pytest.mark.parametrize("unread", [b"", b"hurry"])
def test_a_process_that_is_killed_while_it_imports_is_named_with_its_end(
    silent: WarmStarter, tmp_path: Path, unread: bytes
) -> None:
    assert silent._process is not None and silent._socket is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent._socket.close()
    silent._ready, silent._socket = None, ours
    if unread:
        ours.send(unread)
    silent._process.kill()
    theirs.close()  # as the kernel does it then; unread words end the connection with an error
    silent.look()
    assert state(tmp_path) == "the process to fork from has ended with -9; see warm.log in the run directory"


@pytest.mark.parametrize(
    ("ticks", "looks", "warm"),
    [(20, 100, True), (400, 20, True), (400, 100, False), (20, 400, False), (1, 100, False), (0, 20, False)],
)
def test_a_restart_waits_for_imports_that_go_on_however_slowly(
    silent: WarmStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticks: int, looks: int, warm: bool
) -> None:
    """On a busy host a second by the clock brings a fifth of one of processor time: for each worker as well.

    Half a minute by the clock is left to any import. Then it is not waited for if it has used up the time of any
    import, or uses hardly any: it waits itself, perhaps for ever, and looks now and then.
    """
    clock, spent, looked = itertools.count(), itertools.count(step=ticks), itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(module, "_ticks", lambda pid: next(spent))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert silent._socket is not None
    silent._socket.close()
    silent._ready, silent._socket = None, ours
    theirs.send(json.dumps(READY).encode())
    monkeypatch.setattr(module, "readable", lambda descriptor, within_s: next(looked) >= looks)
    assert silent._wait_ready() is warm
    assert (state(tmp_path) == "ready") is warm
    theirs.close()
