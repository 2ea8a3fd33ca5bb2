"""The barrier before an update alone: ranks that do nothing but meet, on one host and as if each had its own."""

from __future__ import annotations

import json
import statistics

from benchmarks.result import Result
from benchmarks.world import free_port, scratch, train

RANKS = 4
BUDGET_US = 50.0
"""For four ranks of one host that have a core each, or wait anyway."""


def run(quick: bool) -> list[Result]:
    """Blocks of meetings; the time of one is that of the block over their number."""
    blocks, meetings = (3, 200) if quick else (15, 5000)
    return [
        result
        for where, title, budget in (("one", "one host", BUDGET_US), ("many", "a host each, gloo on loopback", None))
        for result in _measure(where, title, budget, blocks, meetings)
    ]


def _measure(where: str, title: str, budget: float | None, blocks: int, meetings: int) -> list[Result]:
    with scratch() as directory:
        arguments = [where, str(blocks), str(meetings), str(directory / "pages")]
        said = train("benchmarks.barrier_rank", arguments, RANKS, free_port(), directory)
        ranks = [json.loads(line) for line in said]
    how = f"{blocks} blocks of {meetings} meetings, {RANKS} ranks"
    took = statistics.median(ranks[0]["us"])
    cpu = statistics.median(us for rank in ranks for us in rank["cpu_us"])
    return [
        Result(f"barrier, {title}", took, "us", budget, how),
        Result(f"barrier, {title}: CPU of a rank", cpu, "us", None, how),
    ]
