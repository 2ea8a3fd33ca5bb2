"""The time that ``--continuity keep``, and ``ttp.one_step`` with it, add to a step of a job under ttp."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.result import Result, ratio_of
from benchmarks.steady import BLOCK_STEPS, JOBS, model_of, training
from benchmarks.world import protected, scratch
from ttp import session
from ttp.api import wrap_optimizer
from ttp.launch.again import Again
from ttp.processor import continuing
from ttp.update_function import one_step


def run(quick: bool) -> Iterator[Result]:
    """Measure one real rank with a real controller: without keep, with keep, and with ``ttp.one_step``, in turns."""
    torch.set_num_threads(1)
    os.environ["TTP_CONTINUITY"] = "keep"
    with scratch() as directory, protected(directory) as save_dir:
        Again(Path(os.environ["TTP_RUN_DIR"])).serve(os.getppid())
        continuing.prepare()
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        goes_on: Any = continuing.current()
        goes_on.enter()
        model: Any = DistributedDataParallel(model_of(1))
        optimizer, scheduler, step = training(JOBS["plain"], model, None)
        wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
        processor: Any = session.current().processor

        def one(_data: Tensor, _target: Tensor) -> float:
            return step()

        update = one_step(one)
        data, target = torch.randn(64, 64), torch.randint(0, 10, (64,))
        ways: dict[str, tuple[Any, Callable[[], float]]] = {
            "off": (None, step), "keep": (goes_on, step), "one_step": (goes_on, lambda: update(data, target)),
        }  # fmt: skip
        taken: dict[str, list[float]] = {way: [] for way in ways}
        blocks, steps = (2, 3) if quick else (90, BLOCK_STEPS)
        for _ in range(blocks):
            for way, (processor.goes_on, call) in ways.items():
                taken[way].append(statistics.median(call() for _ in range(steps)))
        adapter: Any = session.current().adapter
        assert not adapter.repeating.why_not
        session.current().left()
        session.reset()
    dist.destroy_process_group()
    del os.environ["TTP_CONTINUITY"]
    continuing._continuing = None
    how = f"{blocks} blocks of {steps} steps by turns; off: {statistics.median(taken['off']) * 1e3:.2f} ms"
    for way, title in (("keep", "keep"), ("one_step", "keep and one_step")):
        yield Result(f"step time, {title} on / off", ratio_of(taken[way], taken["off"]), "x", 1.002, how)
