"""Measurements on a device: steps with ttp on and off, time from a death to durable, CPU of ttp's threads.

The group is left out of "all" if there is no CUDA device.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.detect import killed
from benchmarks.result import Result
from benchmarks.save import BLOCK
from benchmarks.world import job, protected, scratch
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.api import wrap_optimizer
from ttp.wire.v1 import controller_pb2 as pb

STEPS_MS = (2.0, 10.0, 50.0)
SIZES_GB = (1.0, 10.0, 40.0)
BLOCK_STEPS = 20
_WITH_GRADIENTS = 4 / 3
"""Memory of a rank per byte of its state: weights, two moments, and the gradients, which are not saved."""


def needs() -> str:
    """Return the reason why this group cannot be measured here; empty: it can be measured."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def run(quick: bool, device: str = "cuda") -> list[Result]:
    """Measure everything. With ``device="cpu"`` the program is only tested; its numbers mean nothing."""
    torch.set_num_threads(1)
    results = []
    for target_ms in STEPS_MS[:2] if quick else STEPS_MS:
        results += _steps(torch.device(device), target_ms, 3 if quick else 30)
    sizes = (SIZES_GB[0],) if quick and device == "cuda" else (0.01,) if quick else SIZES_GB
    os.environ["BENCH_DEVICE"] = device
    try:
        for size_gb in sizes:
            results += _rescue(torch.device(device), size_gb, 1 if quick or size_gb > 10 else 3)
    finally:
        del os.environ["BENCH_DEVICE"]
    return results


# --------------------------------------------------------------------------------------------------------------- steps


def _steps(device: torch.device, target_ms: float, blocks: int) -> list[Result]:
    with scratch() as directory, protected(directory) as save_dir:
        return _on_and_off(device, target_ms, blocks, save_dir)


def _on_and_off(device: torch.device, target_ms: float, blocks: int, save_dir: str) -> list[Result]:
    """Measure blocks of steps, with ttp on and off in turns.

    A block waits for the device only at its end, so that the host may run ahead as in a real training.
    """
    model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 16))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    block = _fixed_work(device, model, optimizer, scheduler, target_ms)
    wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    on, off, shares = [], [], []
    for _ in range(blocks):
        block()  # in the first updates after ``attach`` ttp learns what a loop does
        before_s, began_s = _cpu_of_ttp_s(), time.perf_counter()
        on.append(block())
        shares.append((_cpu_of_ttp_s() - before_s) / (time.perf_counter() - began_s))
        adapter.detach()
        off.append(block())
        adapter.attach(processor)
    current.left()
    session.reset()
    bare_ms = statistics.median(off) * 1e3
    how = f"{blocks} blocks of {BLOCK_STEPS} steps each, taking turns, medians; off: {bare_ms:.2f} ms"
    share = 100 * sum(shares) / len(shares)
    at, held = f"{target_ms:g} ms step", "of one core; they hold the interpreter lock no longer"
    return [
        Result(f"{at} on {device.type}, ttp on / off", statistics.median(on) / statistics.median(off), "x", 1.005, how),
        Result(f"CPU of ttp's threads, {at}", share, "%", None, held),
    ]


def _fixed_work(
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    target_ms: float,
) -> Callable[[], float]:
    """Return a function that runs a block of equal steps of about ``target_ms`` and returns the seconds of a step."""
    size = 4096 if device.type == "cuda" else 128
    data, target = torch.randn(64, 256, device=device), torch.randint(0, 16, (64,), device=device)
    square = torch.randn(size, size, device=device)
    product, loops = torch.empty_like(square), 0

    def block() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            for _ in range(loops):
                torch.mm(square, square, out=product)
            optimizer.step()
            scheduler.step()
        _synchronize(device)
        return (time.perf_counter() - begin) / BLOCK_STEPS

    bare = statistics.median(block() for _ in range(5))
    begin = time.perf_counter()
    for _ in range(50):
        torch.mm(square, square, out=product)
    _synchronize(device)
    one = (time.perf_counter() - begin) / 50
    loops = max(0, int((target_ms / 1e3 - bare) / one))
    return block


def _cpu_of_ttp_s() -> float:
    """Return the CPU time of ttp's threads in this process, in seconds."""
    ours = [t.native_id for t in threading.enumerate() if t.name.startswith("ttp") and t.native_id is not None]
    told = [Path(f"/proc/self/task/{thread}/schedstat") for thread in ours]
    return sum(int(path.read_text().split()[0]) for path in told if path.exists()) / 1e9


# -------------------------------------------------------------------------------------------------------------- rescue


def _rescue(device: torch.device, size_gb: float, repeat: int) -> list[Result]:
    size = int(size_gb * 1e9)
    if shutil.disk_usage(".").free < 1.2 * size:
        return [Result(f"{size_gb:g} GB", 0.0, "s", None, "not measured: the disk is too small")]
    world = _fitting(device, size)
    if not world:
        return [Result(f"{size_gb:g} GB", 0.0, "s", None, "not measured: the device's memory is too small")]
    what = "kill -9" if world > 1 else "ttp save"
    ours, plain = [], []
    for _ in range(repeat):
        ours.append(killed(world, size_gb * 1e3, 0)["committed"] / 1e3 if world > 1 else _asked_s(size_gb))
        plain.append(_plain_s(device, size))
    mine, base = statistics.median(ours), statistics.median(plain)
    ranks_shown = f"{world} ranks on one device" if world > 1 else "one rank: two do not fit"
    how = f"{repeat} times, {ranks_shown}; plain: {base:.2f} s"
    label = f"{what} -> durable, {size_gb:g} GB on {device.type}"
    return [
        Result(label, mine, "s", None, how),
        Result(f"{label} / pinned copy + write + fsync", mine / base, "x", 1.2, how),
    ]


def _fitting(device: torch.device, size: int) -> int:
    """Return how many ranks with a state of ``size`` bytes fit on the device, at most 2."""
    if device.type != "cuda":
        return 2
    free = torch.cuda.mem_get_info(device)[0] - (2 << 30)
    return min(2, int(free / (size * _WITH_GRADIENTS)))


def _asked_s(size_gb: float) -> float:
    with job(1, size_gb * 1e3, 0) as made:
        began = time.perf_counter()
        answer = made.service.SaveNow(pb.SaveNowRequest(), timeout=300)
        taken = time.perf_counter() - began
    if not answer.saved:
        raise RuntimeError(answer.text)
    return taken


def _plain_s(device: torch.device, size: int) -> float:
    """Return the seconds to copy ``size`` bytes to the host through two pinned buffers, write and fsync them."""
    source = torch.ones(min(size, 1 << 30), dtype=torch.uint8, device=device)
    buffers = [torch.empty(BLOCK * 8, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    with scratch() as directory:
        begin = time.perf_counter()
        fd = os.open(directory / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for number, start in enumerate(range(0, size, BLOCK * 8)):
                staged = buffers[number % 2][: min(BLOCK * 8, size - start)]
                offset = start % max(1, source.numel() - staged.numel() + 1)
                staged.copy_(source[offset : offset + staged.numel()])
                left = staged.numpy().data
                while left:
                    left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
