"""Speed of a save, compared with a plain sequential write and fsync of the same number of bytes in the same run.

Also of a save in parts: several processes, each with a replica of the state, write one part each, like savers on
several hosts. On the one disk of this machine this must not be slower than one process. If every host has its own disk
(here: a speed limit for each process), n processes should be n times faster.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.result import Result
from benchmarks.world import scratch
from ttp.adapters.torch.saving.checkpoint import write_shard
from ttp.adapters.torch.saving.stripe_plan import Share
from ttp.core import stripes
from ttp.core.layout import REPLICATED, Rank

BLOCK = 8 << 20
"""Bytes of one write."""
OWN_DISK_MB_S = 25
"""Speed limit of a process that plays a host with its own disk, in MB/s: far below the speed of this machine."""

Progress = Callable[[int], None]


def run(quick: bool) -> list[Result]:
    """Measure saves and plain writes in turns, so that changes of the disk's speed affect both."""
    results = []
    for size_mb in (50,) if quick else (50, 500, 2000):
        repeat = 1 if quick else 3 if size_mb > 500 else 7
        results += one_disk(size_mb, (1, 2, 4), repeat)
    return results + own_disks(2 if quick else 100, (1, 2, 4))


def one_disk(size_mb: int, counts: Sequence[int], repeat: int) -> list[Result]:
    """Measure saves of ``size_mb`` to one disk, in as many parts as ``counts`` says."""
    state = model(size_mb)
    ours: dict[int, list[float]] = {count: [] for count in counts}
    plain = []
    with scratch() as directory:
        for _ in range(repeat):
            for count in counts:
                ours[count].append(side_by_side_s(directory, state, count))
            plain.append(plain_write_s(directory / "plain", size_mb * 1_000_000))
            (directory / "plain").unlink()
    base = statistics.median(plain)
    how = f"{size_mb} MB, medians of {repeat}, taking turns; digest included"
    rows = []
    for count, samples in ours.items():
        mine = statistics.median(samples)
        what = "persist" if count == 1 else f"persist in {count} parts, one disk,"
        rows.append(Result(f"{what} / plain write + fsync", mine / base, "x", 1.2, how))
        if count == 1:
            rows.append(Result("persist", size_mb / mine, "MB/s", None, f"plain: {size_mb / base:.0f} MB/s"))
    return rows


def own_disks(size_mb: int, counts: Sequence[int]) -> list[Result]:
    """Measure saves of ``size_mb`` whose savers each have their own disk, of ``OWN_DISK_MB_S``."""
    state, seconds = model(size_mb), {}
    with scratch() as directory:
        for count in counts:
            seconds[count] = side_by_side_s(directory, state, count, limited)
    how = f"{size_mb} MB, each saver limited to {OWN_DISK_MB_S} MB/s"
    return [
        Result(f"persist in {n} parts, own disks / whole", seconds[n] / seconds[1], "x", 1.2 / n, how)
        for n in counts
        if n > 1
    ]


def model(size_mb: int) -> dict[str, Any]:
    """Return a state of ``size_mb`` MB, all of which can be divided among savers."""
    rows = size_mb * 1_000_000 // 4 // 4096 // 8
    return {"model": nn.ModuleList(nn.Linear(4096, rows, bias=False) for _ in range(8)).state_dict()}


def limited() -> Progress:
    """Return a progress callback that sleeps to keep the limit.

    A file reports its bytes twice: when they are written, and when they are on the disk.
    """
    begin, seen = time.perf_counter(), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count
        ahead = seen / 2 / (OWN_DISK_MB_S * 1e6) - (time.perf_counter() - begin)
        if ahead > 0:
            time.sleep(ahead)

    return progress


def side_by_side_s(
    directory: Path, state: dict[str, Any], count: int, limit: Callable[[], Progress | None] = lambda: None
) -> float:
    """Return the seconds until ``count`` processes have written all of ``state``, one part each.

    The processes are forked, so that they share the state's memory.
    """
    ready, start = os.pipe(), os.pipe()
    children = [_forked(directory, state, Share(n, count, lambda _: True), limit, ready, start) for n in _upto(count)]
    try:
        os.close(ready[1])
        for _ in children:
            assert os.read(ready[0], 1), "a saver did not start"
        begin = time.perf_counter()
        os.write(start[1], b"x" * count)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        taken = time.perf_counter() - begin
        children = []
        assert not any(statuses), f"a saver failed: {statuses}"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in (ready[0], *start):
            os.close(end)
    for n in _upto(count):
        (directory / f"part{n}").unlink()
    return taken


def _upto(count: int) -> range:
    """Return the numbers of the parts, from 1."""
    return range(1, count + 1)


def _forked(
    directory: Path,
    state: dict[str, Any],
    share: Share,
    limit: Callable[[], Progress | None],
    ready: tuple[int, int],
    start: tuple[int, int],
) -> int:
    """Fork a saver that says that it is ready, waits for the start, and writes its part. Return its pid."""
    child = os.fork()
    if child:
        return child
    code = 1
    with suppress(BaseException):
        os.write(ready[1], b"x")
        os.read(start[0], 1)
        shard = stripes.split(REPLICATED, share.count)[share.index - 1]
        select = share.select if share.count > 1 else None
        file = f"part{share.index}"
        write_shard(directory, file, state, shard=shard, writer=Rank(0), progress=limit(), select=select)
        code = 0
    os._exit(code)


def plain_write_s(path: Path, size: int) -> float:
    """Return the seconds to write ``size`` bytes sequentially and fsync them."""
    block = torch.randint(0, 255, (BLOCK,), dtype=torch.uint8).numpy().data
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = size
        while left > 0:
            left -= os.write(fd, block[: min(left, BLOCK)])
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - begin
