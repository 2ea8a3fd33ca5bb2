"""kill -9 of a rank: time until the incident is open, all ranks are frozen, the plan is made, the commit is durable.

For several sizes of state and of resident memory.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time

from benchmarks.detect import LOOK_AROUND_S
from benchmarks.result import Result
from benchmarks.save import plain_write_s
from benchmarks.world import controller, ranks, scratch, wait_for
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1.controller_pb2_grpc import ControllerStub

WORLD, WORLD_QUICK = 3, 2
Times = dict[str, float]


def run(quick: bool) -> list[Result]:
    """Measure several sizes of state, then several resident sizes with a small state."""
    results: list[Result] = []
    for state_mb in (1,) if quick else (1, 50, 500):
        results += describe(
            f"{state_mb} MB of state",
            repeated(state_mb, 0, 1 if quick else 5, WORLD_QUICK if quick else WORLD),
            state_mb,
        )
    for resident_gib in () if quick else (2, 8):
        times = repeated(1, resident_gib, 3)
        label = f"kill -9 -> incident open, rank of {resident_gib} GiB"
        results.append(Result(label, times["opened"], "ms", 2.0, "median; a neighbour is the witness"))
    return results


def describe(label: str, times: Times, state_mb: float) -> list[Result]:
    """Return one result per stage. The budget of the commit includes a plain write of the same bytes."""
    durable_budget = 50.0 + (times["plain"] if state_mb > 1 else 0.0)
    return [
        Result(f"kill -9 -> incident open, {label}", times["opened"], "ms", 2.0, "median of 5"),
        Result(f"kill -9 -> all frozen, {label}", times["frozen"], "ms", None, "last answer"),
        Result(f"kill -9 -> decided, {label}", times["plan"], "ms", None, ""),
        Result(
            f"kill -9 -> durable commit, {label}",
            times["committed"],
            "ms",
            durable_budget,
            f"plain write of the bytes + fsync: {times['plain']:.0f} ms",
        ),
    ]


def repeated(state_mb: float, resident_gib: float, times: int, world: int = WORLD) -> Times:
    """Return the median of each time of ``once`` over ``times`` jobs."""
    runs = [once(state_mb, resident_gib, world) for _ in range(times)]
    return {key: statistics.median(r[key] for r in runs) for key in runs[0]}


def once(state_mb: float, resident_gib: float, world: int = WORLD, *, plain: bool = True) -> Times:
    """Run one job: let it form and train, then kill its last rank.

    Args:
        state_mb: size of the state, in MB.
        resident_gib: additional memory of the killed rank, in GiB.
        world: number of ranks.
        plain: whether to measure a plain write too.

    Returns:
        Milliseconds from the kill to each event (``opened``, ``frozen``, ``plan``, ``committed``), and those of a plain
        write of the same bytes (``plain``).
    """
    with scratch() as directory:
        (directory / "run").mkdir()
        with controller(directory / "run") as (port, service, _):
            events: dict[str, float] = {}
            committed = threading.Event()
            watcher = threading.Thread(target=_watch, args=(service, events, committed), daemon=True)
            with ranks(world, port, directory, state_mb, resident_gib) as processes:
                wait_for(service, 3)
                watcher.start()
                time.sleep(LOOK_AROUND_S)  # the watcher's stream opens, ranks find their neighbours
                killed_at = time.monotonic()
                os.kill(processes[world - 1].pid, signal.SIGKILL)
                if not committed.wait(120):
                    raise TimeoutError(f"no commit: {events}")
            written = {"plain": plain_write_s(directory / "plain", int(state_mb * 1e6)) * 1e3} if plain else {}
    return {key: (at - killed_at) * 1e3 for key, at in events.items()} | written


def _watch(service: ControllerStub, events: dict[str, float], committed: threading.Event) -> None:
    for event in service.WatchEvents(pb.WatchEventsRequest()):
        if event.kind == "answer" and json.loads(event.json)["phase"] == "idle" and "plan" not in events:
            events["frozen"] = event.monotonic_s
        elif event.kind in ("opened", "plan", "committed"):
            events.setdefault(event.kind, event.monotonic_s)
        if event.kind == "committed":
            committed.set()
            return
