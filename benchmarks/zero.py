"""Sharded optimizer state: memory per rank, step time compared with plain DDP, and step time with ttp on and off."""

from __future__ import annotations

import statistics

from benchmarks.result import Result, ratio_of
from benchmarks.world import train

KINDS = {
    "ddp": "DDP, AdamW",
    "zero": "ZeroRedundancyOptimizer",
    "replicated:2": "ReplicatedOptimizer, 2 copies",
    "replicated:4": "ReplicatedOptimizer, 4 copies",
}
QUICK = "replicated:2"
RANKS, RANKS_QUICK = 4, 2


def run(quick: bool) -> list[Result]:
    """Measure each optimizer in its own job, in turns with plain DDP with AdamW."""
    blocks, steps, width, ranks = (1, 3, 256, RANKS_QUICK) if quick else (15, 10, 1024, RANKS)
    kinds = {QUICK: KINDS[QUICK]} if quick else KINDS
    return [result for kind, title in kinds.items() for result in _measure(kind, title, blocks, steps, width, ranks)]


def _measure(kind: str, title: str, blocks: int, steps: int, width: int, world: int) -> list[Result]:
    arguments = [kind, "ddp", blocks, steps, 0.0, width, 8, 8]
    ranks = train("benchmarks.layout_rank", arguments, world, controlled=True)
    most, weights = (max(rank[key] for rank in ranks) for key in ("state", "weights"))
    shown = f"{blocks} blocks of {steps} steps by turns, {world} ranks, {weights / 2**20:.0f} MiB of weights"
    plain, off, on = (ranks[0][key] for key in ("plain", "off", "on"))
    said = f"{statistics.median(plain):.1f} ms; {shown}"
    size = f"exact; {most / weights:.2f} x weights"
    return [
        Result(f"optimizer state, largest rank, {title}", most / 2**20, "MiB", None, size),
        Result(f"step / step of DDP with AdamW, {title}", ratio_of(off, plain), "x", None, said),
        Result(f"step time, ttp on / off, {title}", ratio_of(on, off), "x", None, shown),
    ]
