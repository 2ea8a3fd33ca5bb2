"""Step time with ttp on and off in every layout, as the ratio within one run of four ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.result import Result, ratio_of
from benchmarks.world import train

LAYOUTS = {
    "ddp": "DDP",
    "hsdp": "HSDP 2x2",
    "hsdp-preimage": 'HSDP 2x2, undo="preimage"',
    "tp": "TP2 x DP2",
    "pp": "PP2 x DP2",
    "replicated:2": "ReplicatedOptimizer, 2 copies",
}
QUICK = ("hsdp-preimage",)
"""Layouts of a quick run: only one, because each layout starts a process for every rank."""
RANKS, RANKS_QUICK = 4, 2
SIZES = (512, 4, 32)
"""Width, layers, batch."""
STEP_MS = 50.0
"""Least duration of a step in milliseconds. A shorter step begins with a sleep, as if the rank waited for a device."""
BUDGET, BUDGET_DDP = 1.01, 1.005
"""Budgets of the ratio on / off: for layouts with a barrier before the update, and for DDP."""


def run(quick: bool) -> Iterator[Result]:
    """Measure each layout in a job of its own, with a real controller."""
    blocks, steps, ranks = (1, 3, RANKS_QUICK) if quick else (10, 25, RANKS)
    for layout in QUICK if quick else LAYOUTS:
        yield _measure(layout, LAYOUTS[layout], blocks, steps, ranks)


def _measure(layout: str, title: str, blocks: int, steps: int, ranks: int) -> Result:
    arguments = [layout, "", blocks, steps, STEP_MS, *SIZES]
    found = train("benchmarks.layout_rank", arguments, ranks, controlled=True)[0]
    how = f"{blocks} blocks of {steps} steps by turns, {ranks} ranks; off: {statistics.median(found['off']):.2f} ms"
    if found["barrier"]:
        how += f"; the barrier before each update and nothing else: {ratio_of(found['barrier'], found['off']):.4g} x"
    budget = BUDGET_DDP if layout == "ddp" else BUDGET
    return Result(f"step time, ttp on / off, {title}", ratio_of(found["on"], found["off"]), "x", budget, how)
