"""The steady state: ratio of step times with ttp on and off, and CPU time of ttp's hooks, for several kinds of jobs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.result import Result, median_of, ratio_of, time_us
from benchmarks.world import protected, scratch
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.api import wrap_optimizer

STEP_S = 0.010
"""Duration of a step, in seconds."""
BLOCK_STEPS = 20
"""Steps in a block."""
GROUPS = 1_000
"""Number of param groups of the job with many."""
GROUPS_QUICK = 120
"""The same in a quick run: each step takes a time for each group."""
LEARNING_STEPS = 10
"""Number of first steps, in which ttp finds out which state changes when. They are not part of the steady state."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kind of job.

    Args:
        title: its name in the table.
        budget: budget of step time with ttp on / off; None: only the CPU time is of interest.
        micro_batches: number of backward passes in a step; all but the last run under ``no_sync``.
        groups: number of param groups.
        extra: takes the model and returns the ``extra_state``.
    """

    title: str
    budget: float | None = 1.005
    micro_batches: int = 1
    groups: int = 1
    extra: Callable[[nn.Module], Any] = lambda _model: None


class Cursor:
    """A state of 6 KB like that of a data loader: its position, and the order of a shuffled epoch."""

    def __init__(self) -> None:
        self.position, self.order = 0, [index * 7919 % 2003 for index in range(2_000)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 3, "position": self.position, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


class Average:
    """An average of the weights, 16 MB, that is not a module, as many programs implement it."""

    def __init__(self) -> None:
        self.shadow = {f"layer{n}.weight": torch.zeros(1 << 20) for n in range(4)}

    def update(self) -> None:
        with torch.no_grad():
            for tensor in self.shadow.values():
                tensor.mul_(0.999).add_(1e-3)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.999, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


JOBS = {
    "plain": Job("10 ms step"),
    "accumulate": Job("two micro-batches", micro_batches=2),
    "extra": Job("two micro-batches, extra_state of 6 KB", 1.01, 2, extra=lambda _model: Cursor()),
    "groups": Job("many param groups", None, groups=GROUPS),
    "average": Job("an average of 16 MB as extra_state", None, extra=lambda _model: Average()),
}
"""The kinds of jobs. All have BatchNorm, dropout and a scheduler, in DistributedDataParallel."""


QUICK = ("plain", "extra", "groups", "average")
"""Jobs of a quick run: together they run all code of this module."""


def run(quick: bool) -> Iterator[Result]:
    """Measure one real rank with a real controller for each job; ttp's hooks are on and off in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        for name in QUICK if quick else JOBS:
            yield from _protected(JOBS[name], quick)
    finally:
        dist.destroy_process_group()


def _protected(job: Job, quick: bool) -> list[Result]:
    blocks = 60 if job.budget is not None else 10
    job = replace(job, groups=min(job.groups, GROUPS_QUICK)) if quick else job
    with scratch() as directory, protected(directory) as save_dir:
        return measure(job, save_dir, *((2, 3) if quick else (blocks, BLOCK_STEPS)))


def measure(job: Job, save_dir: str, blocks: int, steps: int) -> list[Result]:
    """Measure the ratio of step times, then the CPU time of the hooks.

    They are measured separately, because reading the clock in each hook would change the ratio.
    """
    model: Any = DistributedDataParallel(model_of(job.groups))
    extra = job.extra(model)
    optimizer, scheduler, step = training(job, model, extra)
    wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=save_dir, extra_state=extra)
    current = session.current()
    adapter, processor = current.adapter, current.processor
    assert isinstance(adapter, TorchAdapter) and processor is not None
    on, off = [], []
    for _ in range(blocks):
        on.append(statistics.median(step() for _ in range(steps)))
        adapter.detach()
        off.append(statistics.median(step() for _ in range(steps)))
        adapter.attach(processor)
    taken = _cpu_us(model, optimizer, step, blocks * steps // 4 + 1)
    hot = time_us(lambda: adapter.capture.capture(processor.gate.version, True), 200) if job == JOBS["plain"] else []
    current.left()
    session.reset()
    how = f"{blocks} blocks of {steps} steps by turns; off: {statistics.median(off) * 1e3:.2f} ms"
    results = [Result(f"step time, ttp on / off, {job.title}", ratio_of(on, off), "x", job.budget, how)]
    return results + list(_shares(job, taken, extra, hot))


def _shares(job: Job, taken: list[float], extra: Any, hot: list[float]) -> Iterator[Result]:
    """Yield the CPU time of the hooks, and numbers derived from it that have a budget.

    Args:
        job: the kind of job.
        taken: microseconds of CPU in ttp's hooks, of each step.
        extra: the job's ``extra_state``.
        hot: microseconds of each capture, in a loop of captures; empty: not measured.
    """
    value, p90 = median_of(taken)
    how = f"training thread, {len(taken)} steps"
    yield Result(f"CPU of ttp's hooks in a step, {job.title}", value, "us", None, how, p90)
    if job.groups > 1:
        yield Result("the same for each group", value / job.groups, "us", 2.0, f"{job.groups} groups")
    if isinstance(extra, Average):
        source = torch.cat(list(extra.shadow.values()))
        target = torch.empty_like(source)
        copy = statistics.median(time_us(lambda: target.copy_(source), 20))
        yield Result("the same / a copy of its bytes", value / copy, "x", None, f"a copy takes {copy / 1e3:.2f} ms")
    if hot:
        value, p90 = median_of(hot)
        yield Result("capture at the end of an update, hot", value, "us", 40.0, "nothing between two captures", p90)


def model_of(groups: int) -> nn.Module:
    """Return a small model with at least ``groups`` parameters, one for each param group."""
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)]
    scales = nn.ParameterList(nn.Parameter(torch.ones(10)) for _ in range(max(0, groups - 6)))
    return _Scaled(nn.Sequential(*layers), scales)


class _Scaled(nn.Module):
    """A model whose output depends on all parameters of ``inner`` and ``scales``."""

    def __init__(self, inner: nn.Module, scales: nn.ParameterList) -> None:
        super().__init__()
        self.inner, self.scales = inner, scales

    def forward(self, data: Tensor) -> Tensor:
        found: Tensor = self.inner(data)
        return found * torch.stack(list(self.scales)).prod(0) if len(self.scales) else found


def training(job: Job, model: Any, extra: Any) -> tuple[Any, Any, Callable[[], float]]:
    """Return optimizer, scheduler, and a function that runs one step of about ``STEP_S`` and returns its seconds."""
    parameters = list(model.parameters())
    grouped = [{"params": [parameter]} for parameter in parameters]
    many = len(grouped) > 100
    optimizer: Any = torch.optim.SGD(grouped, lr=1e-3) if many else torch.optim.AdamW(parameters)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    data, target, square = torch.randn(64, 64), torch.randint(0, 10, (64,)), torch.randn(256, 256)
    loops = 0

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        for left in reversed(range(job.micro_batches)):
            if isinstance(extra, Cursor):
                extra.position += 1
            with model.no_sync() if left else nullcontext():
                nn.functional.cross_entropy(model(data), target).backward()
            for _ in range(loops // job.micro_batches):
                torch.mm(square, square)
        optimizer.step()
        scheduler.step()
        if isinstance(extra, Average):
            extra.update()
        return time.perf_counter() - begin

    bare = statistics.median(step() for _ in range(10 if many else 50))
    one = statistics.median(time_us(lambda: torch.mm(square, square), 200)) / 1e6
    loops = max(0, int((STEP_S - bare) / one))
    return optimizer, scheduler, step


# ------------------------------------------------------------------------------------------------------------- CPU time


def _cpu_us(model: nn.Module, optimizer: Any, step: Callable[[], float], steps: int) -> list[float]:
    """Return, for each step, the microseconds of CPU that the training thread spends in ttp's hooks."""
    spent = [0]

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                spent[0] += time.thread_time_ns() - begin - clock

        return run

    clock = int(statistics.median(-time.thread_time_ns() + time.thread_time_ns() for _ in range(1_000)))
    taken = []
    with _replaced(model, optimizer, timed):
        for _ in range(LEARNING_STEPS):
            step()
        for _ in range(steps):
            spent[0] = 0
            step()
            taken.append(spent[0] / 1e3)
    return taken


@contextlib.contextmanager
def _replaced(model: nn.Module, optimizer: Any, by: Callable[[Any], Any]) -> Iterator[None]:
    """Replace every hook of ttp, wherever torch keeps it, by ``by(hook)`` until the end of the block."""
    places = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in model.modules():
        places += [module._forward_pre_hooks, module._forward_hooks]
    places += [hooks for p in model.parameters() if (hooks := getattr(p, "_post_accumulate_grad_hooks", None))]
    ours = [(p, key, hook) for p in places for key, hook in p.items() if str(hook.__module__).startswith("ttp.")]
    assert ours, "ttp has no hooks here"
    for place, key, hook in ours:
        place[key] = by(hook)
    try:
        yield
    finally:
        for place, key, hook in ours:
            place[key] = hook
