"""What a launcher does when the store by which hosts agree to go on does not answer: its host has lost its power."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore] # in torch, not in its types

from tests.waiting import until
from ttp.launch import going_on
from ttp.launch.going_on import GoingOn
from ttp.launch.rendezvous import SILENT

SERVER = """
import signal
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a store whose process is stopped: as if its host had lost its power, it answers nothing."""
    monkeypatch.setattr(going_on, "ANSWER_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
            server.send_signal(signal.SIGSTOP)
            until(lambda: _state(server.pid) == "T")
            yield client
        finally:
            server.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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


def test_a_store_that_does_not_answer_is_a_reason_not_to_go_on(store: Any) -> None:
    closed = SimpleNamespace(is_closed=lambda: False, num_nodes_waiting=lambda: 0)
    group = SimpleNamespace(store=store, group_world_size=2, master_port=1)
    hosts = GoingOn(group, closed, 0)
    assert in_time(hosts.why_not) == SILENT
    assert in_time(lambda: hosts.others_go(patience_s=60.0)) is False
    assert in_time(hosts.starts_anew) is None
    for action in (lambda: hosts.goes(("h", 1)), lambda: hosts.place(lambda: "")):
        assert isinstance(in_time(action), TimeoutError | RuntimeError)
