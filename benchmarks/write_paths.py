"""The two ways to the disk: through the page cache, as checkpoints are written, and past it (``O_DIRECT``)."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import xxhash

from benchmarks.result import Result
from benchmarks.world import scratch
from ttp.store.digest import HashingFile

BLOCK = 8 << 20


def run(size_mb: int, repeat: int) -> Result | None:
    """Both write the same bytes and digest them, taking turns; None where the file system has no ``O_DIRECT``."""
    state = memoryview(os.urandom(BLOCK) * max(1, size_mb * 1_000_000 // BLOCK))
    cached, direct = [], []
    with scratch() as directory:
        for _ in range(repeat):
            try:
                direct.append(_direct_s(directory / "direct", state))
            except OSError:
                return None
            cached.append(_cached_s(directory / "cached", state))
    ratio = statistics.median(cached) / statistics.median(direct)
    how = f"{size_mb} MB, medians of {repeat}, taking turns; direct: {statistics.median(direct) * 1e3:.0f} ms"
    return Result("page cache, early start / O_DIRECT, digest in both", ratio, "x", 1.2, how)


def _cached_s(path: Path, state: memoryview) -> float:
    begin = time.perf_counter()
    file = HashingFile(path)
    for start in range(0, len(state), BLOCK):
        file.write(state[start : start + BLOCK])
    file.sync_and_close()
    return _done(path, begin)


def _direct_s(path: Path, state: memoryview) -> float:
    """From one aligned buffer: the state's own memory hardly ever is."""
    begin = time.perf_counter()
    hashed = xxhash.xxh3_128()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, BLOCK) as aligned, memoryview(aligned) as buffer:
            for start in range(0, len(state), BLOCK):
                block = state[start : start + BLOCK]
                hashed.update(block)
                buffer[: len(block)] = block
                written = 0
                while written < len(block):
                    written += os.write(fd, buffer[written : len(block)])
        os.fsync(fd)
    finally:
        os.close(fd)
    return _done(path, begin)


def _done(path: Path, begin: float) -> float:
    taken = time.perf_counter() - begin
    path.unlink()
    return taken
