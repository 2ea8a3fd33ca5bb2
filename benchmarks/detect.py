"""kill -9 of processes of several sizes: when each witness knows of the death, and when the incident is opened."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from benchmarks.result import Result, median_of
from benchmarks.world import job, scratch
from ttp.launch.fault_report import FaultReporter
from ttp.launch.sentinel_watch import SentinelWatch
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel_reader import REASON
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1.controller_pb2_grpc import ControllerStub

BUDGET_MS = 2.0
LOOK_AROUND_S = 1.5
"""Seconds that watchers get to find new sentinels, before the measurement begins."""
Times = dict[str, float]


def run(quick: bool) -> list[Result]:
    """Measure, for several resident sizes, three witnesses of one death, then whole jobs."""
    sizes, repeat = ((0.05,), 1) if quick else ((0.05, 1, 4), 9)
    results = [witnesses(gib, repeat) for gib in sizes]
    for launcher in (True,) if quick else (False, True):
        results += [incidents(gib, 1 if quick else 5, launcher) for gib in sizes]
    return results


def witnesses(gib: float, repeat: int) -> Result:
    """Kill a process ``repeat`` times; three witnesses note the time: sentinel, socket, pidfd.

    Args:
        gib: resident size of the killed process, in GiB.
        repeat: number of deaths.
    """
    runs = [_witnessed(gib) for _ in range(repeat)]
    value, p90 = median_of([run["sentinel"] for run in runs])
    socket_ms, pidfd_ms = (statistics.median(run[key] for run in runs) for key in ("socket", "pidfd"))
    how = f"same runs: end of a socket {socket_ms:.0f} ms, pidfd {pidfd_ms:.0f} ms"
    return Result(f"kill -9 -> a neighbour knows, {gib:g} GiB", value, "ms", BUDGET_MS, how, p90)


def incidents(gib: float, repeat: int, launcher: bool) -> Result:
    """Kill a rank of a job of two; the time is that of the controller's event ``opened``.

    Args:
        gib: resident size of the killed rank, in GiB.
        repeat: number of jobs.
        launcher: whether this process also watches the ranks' sentinels, as a launcher does.
    """
    value, p90 = median_of([killed(2, 1, gib, launcher=launcher)["opened"] for _ in range(repeat)])
    witness = "neighbour and launcher watch" if launcher else "a neighbour watches"
    return Result(f"kill -9 -> incident open, {gib:g} GiB, {witness}", value, "ms", BUDGET_MS, "jobs of 2", p90)


def _witnessed(gib: float) -> Times:
    times: Times = {}
    with scratch() as directory, socket.create_server(("127.0.0.1", 0)) as server:
        arguments = map(str, (directory, 1, server.getsockname()[1], gib))
        with subprocess.Popen([sys.executable, "-m", "benchmarks.victim", *arguments]) as victim:
            connection, _ = server.accept()
            connection.recv(1)
            told = threading.Event()
            ring = PeerWatcher(directory, 0, 1, lambda *_: told.set())
            ring.start()
            waits = {"sentinel": told.wait, "socket": lambda: _end_of(connection), "pidfd": lambda: _end(victim.pid)}
            threads = [threading.Thread(target=_note, args=(times, *item)) for item in waits.items()]
            for thread in threads:
                thread.start()
            time.sleep(0.3)  # until all witnesses wait; nothing is measured yet
            killed_at = time.monotonic()
            victim.kill()
            for thread in threads:
                thread.join()
            ring.close()
            connection.close()
    return {name: (at - killed_at) * 1e3 for name, at in times.items()}


def _note(times: Times, name: str, wait: Callable[[], object]) -> None:
    wait()
    times[name] = time.monotonic()


def _end_of(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        connection.recv(1)


def _end(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    select.select([descriptor], [], [])
    os.close(descriptor)


def killed(world: int, state_mb: float, resident_gib: float, *, launcher: bool = False) -> Times:
    """Run one job: let it form and train, then kill its last rank.

    Args:
        world: number of ranks.
        state_mb: size of the state, in MB.
        resident_gib: additional memory of the killed rank, in GiB.
        launcher: whether a launcher watches the ranks, as their neighbours do.

    Returns:
        Milliseconds from the kill to each event: ``opened``, ``frozen``, ``plan``, ``committed``.
    """
    events: Times = {}
    committed = threading.Event()
    with job(world, state_mb, resident_gib) as made, contextlib.ExitStack() as closing:
        if launcher:
            home = f"127.0.0.1:{made.port}"
            reporter, watch = FaultReporter(lambda: [home], home, ""), SentinelWatch(made.directory / "run")
            closing.callback(reporter.close)
            closing.callback(watch.close)
            pids = {rank: process.pid for rank, process in enumerate(made.ranks)}
            watch.watch(pids, lambda rank, _: reporter.exited(rank, pids[rank], REASON))
        threading.Thread(target=_watch, args=(made.service, events, committed), daemon=True).start()
        time.sleep(LOOK_AROUND_S)  # the watcher's stream opens, ranks find their neighbours
        killed_at = time.monotonic()
        os.kill(made.ranks[-1].pid, signal.SIGKILL)
        if not committed.wait(120):
            raise TimeoutError(f"no commit: {events}")
    return {key: (at - killed_at) * 1e3 for key, at in events.items()}


def _watch(service: ControllerStub, events: Times, committed: threading.Event) -> None:
    for event in service.WatchEvents(pb.WatchEventsRequest()):
        if event.kind == "answer" and json.loads(event.json)["phase"] == "idle" and "plan" not in events:
            events["frozen"] = event.monotonic_s
        elif event.kind in ("opened", "plan", "committed"):
            events.setdefault(event.kind, event.monotonic_s)
        if event.kind == "committed":
            committed.set()
            return
