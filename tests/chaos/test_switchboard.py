"""Ranks report their points over a real socket, and wait there for the fault that hits them."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttp.chaos.rank_connection import SOCKET, RankConnection
from ttp.chaos.switchboard import NAME, PREFIX, RankEnded, RankStarted, RankSwitchboard, RankWaits, remove_abandoned
from ttp.inbox import Inbox

PATIENCE_S = 20


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox[Any]]:
    calls: Inbox[Any] = Inbox()
    switchboard = RankSwitchboard(calls)
    switchboard.open()
    monkeypatch.setenv(SOCKET, str(switchboard.path))
    yield calls
    switchboard.close()
    assert not switchboard.path.parent.exists()


def test_a_rank_waits_at_its_points_and_nowhere_else(inbox: Inbox[Any]) -> None:
    said: list[str] = []

    def rank() -> None:
        line = RankConnection(2, (0, 3))
        said.extend([line.at(4, "data"), line.at(5, "data"), line.at(6, "end")])
        line.close()

    thread = threading.Thread(target=rank)
    thread.start()
    down = inbox.get(timeout=PATIENCE_S)
    assert isinstance(down, RankStarted)
    rank_process = down.rank_process
    assert (rank_process.rank, rank_process.life, rank_process.pid) == (2, (0, 3), os.getpid())
    rank_process.reply({"points": [[5, "data"]], "phases": ["end"]})
    first = inbox.get(timeout=PATIENCE_S)
    assert isinstance(first, RankWaits)
    assert (first.step, first.phase) == (5, "data")  # it did not ask at step 4
    rank_process.reply({"do": "raise"})
    second = inbox.get(timeout=PATIENCE_S)
    assert (second.step, second.phase) == (6, "end")
    rank_process.reply({"do": "go"})
    thread.join(PATIENCE_S)
    assert said == ["go", "raise", "go"]
    assert inbox.get(timeout=PATIENCE_S) == RankEnded(rank_process)


def test_without_a_socket_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    assert RankConnection(0, (0, 0)).at(0, "data") == "go"


def test_what_a_killed_desk_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}dead"
    left.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(left / NAME))
    switchboard = RankSwitchboard(Inbox())
    switchboard.open()
    assert remove_abandoned() == [left]
    assert not left.exists() and switchboard.path.exists()
    switchboard.close()
