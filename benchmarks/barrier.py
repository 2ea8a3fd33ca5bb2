"""The barrier before an update alone: ranks that do nothing but meet, on one host and as if each had its own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

from benchmarks.result import Result
from benchmarks.world import free_port, scratch, train

RANKS = 4
BUDGET_US = 50.0
"""For four ranks of one host that have a core each, or wait anyway."""


def run(quick: bool) -> Iterator[Result]:
    """Blocks of meetings; the time of one is that of the block over their number."""
    yield from _measure("one", "one host", BUDGET_US, *((2, 1, 20) if quick else (RANKS, 15, 5000)))
    yield from _measure("many", "a host each, gloo on loopback", None, *((2, 1, 20) if quick else (RANKS, 5, 200)))


def _measure(where: str, title: str, budget: float | None, world: int, blocks: int, meetings: int) -> list[Result]:
    with scratch() as directory:
        arguments = [where, str(blocks), str(meetings), str(directory / "pages")]
        said = train("benchmarks.barrier_rank", arguments, world, free_port(), directory)
        ranks = [json.loads(line) for line in said]
    how = f"{blocks} blocks of {meetings} meetings, {world} ranks"
    took = statistics.median(ranks[0]["us"])
    cpu = statistics.median(us for rank in ranks for us in rank["cpu_us"])
    return [
        Result(f"barrier, {title}", took, "us", budget, how),
        Result(f"barrier, {title}: CPU of a rank", cpu, "us", None, how),
    ]
