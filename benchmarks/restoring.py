"""Time to verify a checkpoint before the ranks of a host load it: each rank verifies all of it, or only its share."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.result import Result
from benchmarks.world import scratch
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.store.choice import look_back
from ttp.store.digest import digest_file
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.share import Share

RANKS, RANKS_QUICK = 8, 2


def run(quick: bool) -> list[Result]:
    """Measure one host with one piece per rank, as a sharded job saves."""
    size_mb, repeat, ranks = (16, 1, RANKS_QUICK) if quick else (512, 7, RANKS)
    alone: list[float] = []
    shared: list[float] = []
    with scratch() as directory, ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
        _make(directory, size_mb, ranks)
        list(pool.map(time.sleep, [0.5] * ranks))  # until all processes run
        for _ in range(repeat):
            for count, taken in ((1, alone), (ranks, shared)):
                begin = time.perf_counter()
                list(pool.map(partial(_look_back, directory, count), range(ranks)))
                taken.append(time.perf_counter() - begin)
    ratio = statistics.median(shared) / statistics.median(alone)
    how = f"{ranks} ranks, {size_mb} MB in the page cache, medians of {repeat}; alone {statistics.median(alone):.2f} s"
    return [Result("verify before a restore, shared / each rank alone", ratio, "x", None, how)]


def _make(save_dir: Path, size_mb: int, ranks: int) -> None:
    checkpoint = save_dir / "tft_saved_checkpoints-step_1"
    checkpoint.mkdir()
    pieces = []
    for rank in range(ranks):
        file = checkpoint / f"__{rank}_0.distcp"
        file.write_bytes(os.urandom(1 << 20) * (size_mb // ranks))
        pieces.append(Piece(file.name, *digest_file(file), "shard", Shard("s"), Rank(rank)))
    manifest = Manifest(Version(1), "r", 0, "i", "c", "w", ranks, {}, "torch", 0.0, tuple(pieces))
    (checkpoint / MANIFEST).write_text(manifest.to_json())


def _look_back(save_dir: Path, count: int, rank: int) -> None:
    found = look_back(save_dir, None, lambda directory: Share(rank % count, count))
    assert found.verified, found.skipped
