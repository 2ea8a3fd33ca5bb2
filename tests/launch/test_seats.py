"""The seats of dead ranks that a launcher fills, and signals of an operator meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ttp.config import Config
from ttp.launch.again import Again, NextLaunch
from ttp.launch.seats import Seats


def seats_of(
    run_dir: Path, *, hosts: int = 1, continuity: str = "keep", entrypoint: object = "python"
) -> tuple[Seats, list[str]]:
    """Return the seats of a launcher with ranks on ``hosts`` hosts, and why ranks were not to go on, as they come."""
    given_up: list[str] = []
    spec = SimpleNamespace(max_restarts=1, entrypoint=entrypoint)
    group = SimpleNamespace(group_world_size=hosts, spec=spec)
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=1, _pcontext=object())
    host: Any = SimpleNamespace(
        again=Again(run_dir),
        leases=SimpleNamespace(sweep=lambda: None),
        stops=SimpleNamespace(stop_going_on=lambda workers, why: given_up.append(why)),
        warm=SimpleNamespace(ready=True),
    )
    return Seats(agent, host, Config(continuity=continuity)), given_up


def worker(code: int | None = None) -> Any:
    """Return a worker process, which runs, or has ended with this code."""
    return SimpleNamespace(poll=lambda: code, pid=os.getpid())


@pytest.mark.parametrize("problem", [SignalException("stop", signal.SIGTERM), RuntimeError("no memory")])
def test_a_signal_that_comes_while_seats_are_filled_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: Exception
) -> None:
    """torch's agent receives signals as exceptions. After any other exception all ranks are restarted."""
    seats, given_up = seats_of(tmp_path)

    def fill(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(seats, "_fill", fill)
    stopped = isinstance(problem, SignalException)
    with pytest.raises(SignalException) if stopped else contextlib.nullcontext():
        seats.fill({0: worker()})
    assert given_up == ([] if stopped else ["RuntimeError('no memory')"])


def test_ranks_that_go_on_once_more_before_anybody_looks_are_seen_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They fail again so soon that the launcher has not looked in between."""
    (seats, given_up), workers = seats_of(tmp_path), {0: worker()}
    again, filled = Again(tmp_path), list[int]()

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
    assert not given_up
    seats.look(workers)
    seats.second_fault(workers)
    assert given_up == ["another rank has failed meanwhile"]


@pytest.mark.parametrize(("code", "filled"), [(0, [[1]]), (-9, []), (None, [])])
def test_a_rank_that_exited_with_0_is_replaced_as_soon_as_the_others_may_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int | None, filled: list[list[int]]
) -> None:
    """For torch's agent it has not failed, so nothing else calls for its replacement."""
    (seats, given_up), found = seats_of(tmp_path), list[list[int]]()
    monkeypatch.setattr(seats, "_fill", lambda _, dead: found.append(dead))
    Again(tmp_path).mark(os.getpid(), time.monotonic() + 100, 1)
    ended: Any = SimpleNamespace(poll=lambda: code, pid=1)
    seats.look({0: worker(), 1: ended})
    assert (found, given_up) == (filled, [])


@pytest.mark.parametrize(("marked", "filled"), [((0, 1), [[1]]), ((1,), [])])
def test_it_counts_who_lives_whether_or_not_the_one_that_exited_was_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, marked: tuple[int, ...], filled: list[list[int]]
) -> None:
    """A rank may exit with 0 just after its release, before or after the others are released."""
    (seats, given_up), found = seats_of(tmp_path), list[list[int]]()
    monkeypatch.setattr(seats, "_fill", lambda _, dead: found.append(dead))
    workers: Any = {0: worker(), 1: SimpleNamespace(poll=lambda: 0, pid=os.getppid())}
    for rank in marked:
        Again(tmp_path).mark(workers[rank].pid, time.monotonic() + 100, 1)
    seats.look(workers)
    assert (found, given_up) == (filled, [])


def with_a_seat(monkeypatch: pytest.MonkeyPatch, seats: Seats) -> dict[int, Any]:
    """Let ``seats`` fill that of rank 1. Returns the workers that torch knows, by local rank."""
    agent: Any = seats._agent
    agent._pcontext = SimpleNamespace(subprocess_handlers={}, _running_local_ranks={0})
    agent._worker_group.workers = [SimpleNamespace(global_rank=rank, local_rank=rank) for rank in (0, 1)]
    agent._workers = dict
    monkeypatch.setattr(seats._host, "watch", lambda _: None, raising=False)
    monkeypatch.setattr(seats, "_meet", lambda ranks: NextLaunch(1, tuple(ranks), "127.0.0.1", 1, released=False))
    monkeypatch.setattr(seats, "_start", lambda _: SimpleNamespace(proc=worker()))
    handlers: dict[int, Any] = agent._pcontext.subprocess_handlers
    return handlers


def test_torch_waits_for_the_successor_of_a_rank_that_exited_with_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It had taken that rank for trained, and would end the successor as soon as the other ranks are through."""
    seats, _ = seats_of(tmp_path)
    known = with_a_seat(monkeypatch, seats)
    seats.fill({0: worker(), 1: worker(0)})
    agent: Any = seats._agent
    assert agent._pcontext._running_local_ranks == {0, 1} == {0, *known}


def test_torch_ends_a_worker_whose_seat_was_just_being_filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody else would, if a signal ends the launcher then: the worker is in a session of its own."""
    seats, _ = seats_of(tmp_path)
    known = with_a_seat(monkeypatch, seats)

    def start(_: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return SimpleNamespace(proc=worker())

    def stop(number: int, _: object) -> None:
        raise SignalException("stop", signal.Signals(number))

    monkeypatch.setattr(seats, "_start", start)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SignalException):
            seats.fill({0: worker(), 1: worker(-9)})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(known) == [1]


@pytest.mark.parametrize(("hosts", "why"), [(1, ""), (2, "the job has several hosts")])
def test_launchers_that_have_not_agreed_on_it_start_no_rank_alone(tmp_path: Path, hosts: int, why: str) -> None:
    """Programs for MindIO do not need ``keep``; ranks of other hosts would look for the new store in vain."""
    seats, _ = seats_of(tmp_path, hosts=hosts, continuity="warm")
    assert seats.why_not({0: worker(-9)}) == why


@pytest.mark.parametrize(("entrypoint", "continuity"), [("python", "keep"), ("python", "warm"), (print, "keep")])
def test_ranks_learn_of_a_launcher_that_starts_them_alone(tmp_path: Path, entrypoint: object, continuity: str) -> None:
    """With ``--run-path`` torch starts functions, in processes of its own."""
    seats, _ = seats_of(tmp_path, continuity=continuity, entrypoint=entrypoint)
    again, keeps = Again(tmp_path), (entrypoint, continuity) == ("python", "keep")
    assert again.is_served_by(os.getpid()) == keeps and not again.is_served_by(os.getppid())
    again.serve(os.getppid())
    again.clear()  # ranks that are not its own are started, as after a hot switch
    assert not again.is_served_by(os.getpid()) and again.is_served_by(os.getppid())
    seats.begin()
    assert again.is_served_by(os.getpid()) == keeps


def test_what_a_launcher_leaves_counts_for_no_process_that_has_its_pid_later(tmp_path: Path) -> None:
    again = Again(tmp_path)
    again.serve(os.getpid())
    announced = tmp_path / "again" / "launchers" / str(os.getpid())
    announced.rename(announced.with_name(str(os.getppid())))
    assert not again.is_served_by(os.getppid())
    announced.with_name(str(os.getppid())).write_text("cut o")
    assert not again.is_served_by(os.getppid())
