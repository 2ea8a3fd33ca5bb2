"""The controller under load, over real sockets: memory, CPU at a heartbeat a second, time from evidence to plan."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from benchmarks.controller_clients import TOKEN
from benchmarks.result import Result
from benchmarks.world import controller, scratch
from ttp.wire.channel import metadata
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1.controller_pb2_grpc import ControllerStub

PER_RELAY = 8
"""Ranks behind one relay."""
PER_CLIENT = 5_000
"""Ranks in one client process."""
FORM_S = 120.0
"""Seconds that a job may take to form."""
PLAN_S = 30.0
"""Seconds that the controller may take from the evidence to the plan."""

BUDGETS_MS = {(1_000, False): 50.0, (10_000, True): 300.0, (1_000, True): 50.0}
"""Budgets: milliseconds from the first evidence to the plan, by (number of ranks, whether they have relays)."""


def run(quick: bool) -> Iterator[Result]:
    """Measure jobs of several sizes, with and without relays."""
    cases = [(16, True), (8, False)] if quick else [(1_000, True), (1_000, False), (10_000, True), (10_000, False)]
    for world, relayed in cases:
        yield from measure(world, relayed=relayed, seconds=1 if quick else 10)


def measure(world: int, *, relayed: bool, seconds: int) -> list[Result]:
    """Measure one job: it forms, sends heartbeats for a while, and loses a rank."""
    how = f"{world} ranks, " + (f"relays of {PER_RELAY}" if relayed else "a stream each")
    with scratch() as directory, controller(directory, TTP_TOKEN=TOKEN, TTP_BIND="127.0.0.1") as (port, service, pid):
        process = psutil.Process(pid)
        service.GetStatus(pb.GetStatusRequest(), metadata=metadata(TOKEN))
        empty = process.memory_info().rss
        with clients(port, world, PER_RELAY if relayed else 0) as players:
            formed_s = form(service)
            time.sleep(2.0)  # the first heartbeats are sent at once
            before, begin = process.cpu_times(), time.monotonic()
            time.sleep(seconds)
            after, took = process.cpu_times(), time.monotonic() - begin
            resident = process.memory_info().rss
            own_s, players_s = cpu_s([pid]), cpu_s(players)
            plan_ms = lose(service, directory, world)
            own_s, players_s = cpu_s([pid]) - own_s, cpu_s(players) - players_s
    busy = 100 * (after.user + after.system - before.user - before.system) / took
    kib = (resident - empty) / world / 1024
    return [
        Result("controller, resident per rank", kib, "KiB", 32.0, how),
        Result("controller, one core busy at a beat a second", busy, "%", 20.0, how),
        Result("controller, evidence to plan", plan_ms, "ms", BUDGETS_MS.get((world, relayed)), how),
        Result("controller, its CPU from evidence to plan", 1e3 * own_s, "ms", None, how),
        Result("controller, CPU of the played ranks meanwhile", 1e3 * players_s, "ms", None, how),
        Result("controller, until formed", formed_s, "s", None, how),
    ]


@contextlib.contextmanager
def clients(port: int, world: int, per_relay: int) -> Iterator[list[int]]:
    """Start processes that play the ranks of a job, ``PER_CLIENT`` ranks in each; yield their pids."""
    module = [sys.executable, "-m", "benchmarks.controller_clients"]
    processes = [
        subprocess.Popen(
            [*module, *map(str, (port, first, min(PER_CLIENT, world - first), world, per_relay))],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for first in range(0, world, PER_CLIENT)
    ]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def form(service: ControllerStub) -> float:
    """Wait until all ranks have joined; return the seconds until then."""
    begin = time.monotonic()
    while service.GetStatus(pb.GetStatusRequest(), metadata=metadata(TOKEN)).stage != "training":
        if time.monotonic() - begin > FORM_S:
            raise TimeoutError(f"the job has not formed within {FORM_S} s")
        time.sleep(0.2)
    return time.monotonic() - begin


def lose(service: ControllerStub, directory: Path, world: int) -> float:
    """Report the last rank as dead; return the milliseconds on the controller's clock until it has made the plan.

    The times are read from the journal, because sending all events to a watcher would slow the controller.
    """
    fault = pb.ReportFaultRequest(ranks=[world - 1], reason="killed", kind=pb.FAULT_KIND_EXITED)
    service.ReportFault(fault, metadata=metadata(TOKEN))
    end = time.monotonic() + PLAN_S
    while not (journal := next(directory.rglob("*.jsonl"), None)) or b'"kind": "plan"' not in journal.read_bytes():
        if time.monotonic() > end:
            raise TimeoutError(f"no plan within {PLAN_S} s")
        time.sleep(0.1)
    seen: dict[str, float] = {}
    for line in journal.read_text().splitlines():
        event = json.loads(line)
        seen.setdefault(event["kind"], event["monotonic_s"])
    return (seen["plan"] - seen["evidence"]) * 1e3


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of all threads of the processes, in seconds, from ``schedstat`` (nanoseconds, not ticks)."""
    stats = (path.read_text() for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(stat.split()[0]) for stat in stats) / 1e9
