"""The seats of dead ranks that a launcher fills, and signals of an operator meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ttp.config import Config
from ttp.launch.again import Again
from ttp.launch.seats import Seats


@pytest.mark.parametrize("problem", [SignalException("stop", signal.SIGTERM), RuntimeError("no memory")])
def test_a_signal_that_comes_while_seats_are_filled_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """torch's agent receives signals as exceptions. After any other exception all ranks are restarted."""
    ended: list[str] = []
    group = SimpleNamespace(group_world_size=1, spec=SimpleNamespace(max_restarts=1))
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=1)
    host: Any = SimpleNamespace(stops=SimpleNamespace(stop_going_on=lambda workers, why: ended.append(why)))
    worker: Any = SimpleNamespace(poll=lambda: None)
    seats = Seats(agent, host, Config(continuity="keep"))

    def fill(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(seats, "_fill", fill)
    if isinstance(problem, SignalException):
        with pytest.raises(SignalException):
            seats.fill({0: worker})
        assert not ended
    else:
        seats.fill({0: worker})
        assert ended == ["RuntimeError('no memory')"]


def test_ranks_that_go_on_once_more_before_anybody_looks_are_seen_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They fail again so soon that the launcher has not looked in between."""
    group = SimpleNamespace(group_world_size=1, spec=SimpleNamespace(max_restarts=1))
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=1, _pcontext=object())
    failed: list[str] = []
    again = Again(tmp_path)
    leases = SimpleNamespace(sweep=lambda: None)
    stops = SimpleNamespace(stop_going_on=lambda _, why: failed.append(why))
    host: Any = SimpleNamespace(again=again, leases=leases, stops=stops)
    workers: Any = {0: SimpleNamespace(poll=lambda: None, pid=os.getpid())}
    seats = Seats(agent, host, Config(continuity="keep"))
    filled: list[int] = []

    def fill(*_: Any) -> None:
        filled.append(len(filled) + 1)
        seats._launch = filled[-1]

    monkeypatch.setattr(seats, "_fill", fill)
    for launch in (1, 2):
        again.mark(os.getpid(), time.monotonic() + 100, launch)
        seats.look(workers)
        seats.look(workers)  # they are on their way
    assert filled == [1, 2]
    again.mark(os.getpid(), time.monotonic() + 100, 3)
    seats.second_fault(workers)  # those that went on are through: it is a fault like the first one
    assert not failed
    seats.look(workers)
    seats.second_fault(workers)
    assert failed == ["another rank has failed meanwhile"]


@pytest.mark.parametrize(("hosts", "why"), [(1, ""), (2, "the job has several hosts")])
def test_launchers_that_have_not_agreed_on_it_start_no_rank_alone(tmp_path: Path, hosts: int, why: str) -> None:
    """Programs for MindIO do not need ``keep``; ranks of other hosts would look for the new store in vain."""
    group = SimpleNamespace(group_world_size=hosts, spec=SimpleNamespace(max_restarts=1))
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=1, _pcontext=object())
    host: Any = SimpleNamespace(again=Again(tmp_path), warm=SimpleNamespace(ready=True))
    worker: Any = SimpleNamespace(poll=lambda: -9, pid=os.getpid())
    assert Seats(agent, host, Config(continuity="warm")).why_not({0: worker}) == why
