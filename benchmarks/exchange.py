"""With ``keep``: how long the survivors of a death take to connect all their process groups anew."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.result import Result
from benchmarks.world import train

RANKS = 4
BUDGETS_MS = {1: 10.0, 8: 60.0, 32: 250.0}
"""Budget in milliseconds, by number of groups. All ranks are members of each group."""


def run(quick: bool) -> Iterator[Result]:
    """Measure the first and the third exchange of each job. The old backends stay in the process."""
    jobs, ranks = (1, 2) if quick else (5, RANKS)
    for groups, budget in {1: BUDGETS_MS[1]}.items() if quick else BUDGETS_MS.items():
        found = [train("benchmarks.exchange_rank", [groups], ranks, controlled=False)[0] for _ in range(jobs)]
        first, third = (statistics.median(took[number] for took in found) for number in (0, 2))
        how = f"the first exchange of a process, {jobs} jobs of {ranks} ranks; the third: {third:.3g} ms"
        yield Result(f"new connections of {groups} process groups", first, "ms", budget, how)
