"""The barrier before an update, alone: ranks that only pass it, on one host and as if each rank had its own host."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.result import Result
from benchmarks.world import train

RANKS = 4
BUDGET_US = 50.0
"""Microseconds for four ranks of one host, if each rank has a core."""


def run(quick: bool) -> Iterator[Result]:
    """Measure blocks of barriers. The time of one barrier is the time of its block divided by their number."""
    world, *numbers = (2, 1, 20, 1, 20) if quick else (RANKS, 15, 5000, 5, 200)
    ranks = train("benchmarks.barrier_rank", numbers, world, controlled=False)
    for place, (title, budget) in enumerate((("one host", BUDGET_US), ("a host each, gloo on loopback", None))):
        found = [rank[place] for rank in ranks]
        how = f"{len(found[0]['us'])} blocks of {numbers[2 * place + 1]} meetings, {world} ranks"
        took = statistics.median(found[0]["us"])
        cpu = statistics.median(us for rank in found for us in rank["cpu_us"])
        yield Result(f"barrier, {title}", took, "us", budget, how)
        yield Result(f"barrier, {title}: CPU of a rank", cpu, "us", None, how)
