"""kill -9 of a rank: time until the incident is open, all ranks are frozen, the plan is made, the commit is durable.

For several sizes of state and of resident memory.
"""

from __future__ import annotations

import statistics

from benchmarks.detect import Times, killed
from benchmarks.result import Result
from benchmarks.save import plain_write_s
from benchmarks.world import scratch

WORLD, WORLD_QUICK = 3, 2


def run(quick: bool) -> list[Result]:
    """Measure several sizes of state, then several resident sizes with a small state."""
    results: list[Result] = []
    repeat, world = (1, WORLD_QUICK) if quick else (5, WORLD)
    for state_mb in (1,) if quick else (1, 50, 500):
        results += describe(f"{state_mb} MB of state", repeated(state_mb, 0, repeat, world), state_mb)
    for resident_gib in () if quick else (2, 8):
        times = repeated(1, resident_gib, 3)
        label = f"kill -9 -> incident open, rank of {resident_gib} GiB"
        results.append(Result(label, times["opened"], "ms", 2.0, "median; a neighbour is the witness"))
    return results


def describe(label: str, times: Times, state_mb: float) -> list[Result]:
    """Return one result per stage. The budget of the commit includes a plain write of the same bytes."""
    durable_budget = 50.0 + (times["plain"] if state_mb > 1 else 0.0)
    plain = f"plain write of the bytes + fsync: {times['plain']:.0f} ms"
    return [
        Result(f"kill -9 -> incident open, {label}", times["opened"], "ms", 2.0, "median of 5"),
        Result(f"kill -9 -> all frozen, {label}", times["frozen"], "ms", None, "last answer"),
        Result(f"kill -9 -> decided, {label}", times["plan"], "ms", None, ""),
        Result(f"kill -9 -> durable commit, {label}", times["committed"], "ms", durable_budget, plain),
    ]


def repeated(state_mb: float, resident_gib: float, times: int, world: int = WORLD) -> Times:
    """Return the median of each time over ``times`` jobs, and that of a plain write of the same bytes (``plain``)."""
    runs = []
    for _ in range(times):
        events = killed(world, state_mb, resident_gib)
        with scratch() as directory:
            runs.append(events | {"plain": plain_write_s(directory / "plain", int(state_mb * 1e6)) * 1e3})
    return {key: statistics.median(r[key] for r in runs) for key in runs[0]}
