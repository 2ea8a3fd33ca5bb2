"""The job under test: a small, deterministic DDP training, ``python -m ttp.chaos.job``.

Its ranks differ in all that differs between real ranks: dropout, data, BatchNorm statistics, the random streams of
Python and numpy. After each step and after a restore, every rank appends to its notes, in one write that survives a
SIGKILL, a digest of the state that is equal on all ranks and one of its own state.

Environment: ``CHAOS_DIR`` (for notes), ``CHAOS_SAVE_DIR``, ``CHAOS_STEPS``, ``CHAOS_WIDTH``, ``CHAOS_STEP_MS``, and
what ``ttp.chaos.rank_connection`` reads.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ttp
from ttp.chaos.rank_connection import END, HOLD, LAUNCH, RankConnection
from ttp.processor import continuing

ACCUMULATION = 2


def own_rank() -> int:
    """Return this process's rank. A module that read it while it is imported would make every restart a cold one."""
    return int(os.environ.get("RANK", "0"))


def life() -> tuple[int, int]:
    """Return the current life (``notes.LifeKey``). A process that continues after a failure has several lives."""
    return int(os.environ.get(LAUNCH, "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Stops(Protocol):
    """Where a rank stops in its step for the faults that hit it there."""

    def at(self, phase: str) -> None:
        """Note that the rank has come to ``phase`` of its step."""


class Here:
    """The current step of this rank, and its connection to the driver, in one life."""

    _now: ClassVar[Here | None] = None

    def __init__(self) -> None:
        self.step = 0
        self.life = life()
        self.line = RankConnection(own_rank(), self.life)

    @classmethod
    def now(cls) -> Here:
        """Return the object of the current life; a process that continues after a failure gets a new one."""
        before = cls._now
        if before is None or before.life != life():
            cls._now = Here()
            if before is not None:
                before.line.close()
        assert cls._now is not None
        return cls._now

    def at(self, phase: str) -> None:
        """Report ``phase`` of the current step to the driver, and carry out the fault that the driver orders."""
        match self.line.at(self.step, phase):
            case "raise":
                raise ValueError("a wrong turn in the training loop")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(1e6)
            case "hang-gil":
                deadlock()


def deadlock() -> None:
    """Wait forever with the interpreter lock held, in a call that no signal ends."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)  # PyDLL keeps the interpreter lock
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class Watched(nn.Module):
    """An identity module that reports the phases ``forward`` and ``backward``."""

    def __init__(self, here: Stops) -> None:
        super().__init__()
        self._here = here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, report ``forward``, and report ``backward`` from a hook on the gradient."""
        if self.training:
            self._here.at("forward")
        if x.requires_grad:
            hook: Any = x.register_hook
            hook(lambda _grad: self._here.at("backward"))
        return x


class TwoHalves(torch.optim.AdamW):
    """AdamW that reports the phase ``in_step`` half-way through its update."""

    here: Stops

    def step(self, closure: Any = None) -> Any:
        """Update the first half of the tensors, then the second."""
        group = self.param_groups[0]
        every = group["params"]
        half = len(every) // 2
        for index, part in enumerate((every[:half], every[half:])):
            if index:
                self.here.at("in_step")
            group["params"] = part
            try:
                super().step(closure)
            finally:
                group["params"] = every


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A learning rate schedule that reports the phase ``scheduler`` in its step."""

    here: ClassVar[Stops | None] = None
    """A class attribute, because instance attributes belong to the schedule's ``state_dict``."""

    def step(self, epoch: int | None = None) -> None:
        """Set the next learning rate."""
        if Schedule.here is not None:
            Schedule.here.at("scheduler")
        super().step(epoch)


class Losses:
    """The loss curve, an ``extra_state`` that reports the phase ``extra_state``."""

    here: ClassVar[Stops | None] = None
    """See ``Schedule.here``."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        if Losses.here is not None:
            Losses.here.at("extra_state")
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        self.values = list(state["values"])


class Training:
    """Model, optimizer, schedule, losses and random streams of one rank."""

    def __init__(self, here: Here, width: int) -> None:
        self.here = here
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), Watched(here), nn.Dropout(0.2),
            nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4),
        )  # fmt: skip
        self.model = DistributedDataParallel(net)
        self.optimizer = TwoHalves(self.model.parameters(), lr=1e-2)
        self.optimizer.here = here
        self.schedule = Schedule(self.optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.97**s)
        Schedule.here = Losses.here = here  # only now: the constructor of a schedule calls its step()
        self.losses = Losses()
        torch.manual_seed(100 + own_rank())  # every rank has its own dropout stream
        random.seed(200 + own_rank())
        np.random.seed(300 + own_rank())

    def one_step(self, step: int) -> None:
        """Train ``step`` (from 0), which makes version ``step + 1``."""
        self.optimizer.zero_grad()
        total = 0.0
        for micro in range(ACCUMULATION):
            self.model.require_backward_grad_sync = micro == ACCUMULATION - 1
            loss = self._loss(step, micro)
            total += float(loss.detach())
            if self.model.require_backward_grad_sync:
                self.here.at("loss")
                self.losses.values.append(total)  # before the all-reduce: the rank may die right after it
            loss.backward()  # type: ignore[no-untyped-call]
        self.here.at("allreduced")
        note("update", step + 1)
        self.optimizer.step()
        note("version", step + 1)
        self.here.at("stepped")
        self.schedule.step()
        self.here.at("scheduled")
        self.evaluate()
        note("state", step + 1, *self.digests())

    def _loss(self, step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + own_rank())
        data, target = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        data = data + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return nn.functional.cross_entropy(self.model(data), target) / ACCUMULATION

    def evaluate(self) -> None:
        """Evaluate on all ranks together, without a gradient."""
        net = self.model.module
        with ttp.paused("evaluation"), torch.no_grad():
            self.here.at("evaluation")
            net.eval()
            dist.all_reduce(net(torch.ones(1, 16)).sum())
            net.train()

    def digests(self) -> tuple[str, str]:
        """Return two digests: of the weights, moments and schedule; and of this rank's own state."""
        moments = self.optimizer.state_dict()["state"]
        shard = [*self.model.module.parameters(), *(v for s in moments.values() for _, v in sorted(s.items()))]
        schedule = repr(self.schedule.get_last_lr()).encode()
        own = [*self.model.module.buffers(), torch.get_rng_state()]
        streams = repr((random.getstate(), np.random.get_state(), self.losses.values)).encode()
        return digest((_bytes(t) for t in shard), schedule), digest((_bytes(t) for t in own), streams)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().numpy().view(np.uint8).data if tensor.dim() else tensor.numpy().tobytes()


def digest(parts: Iterable[Any], last: bytes) -> str:
    """Return one digest of all parts, in their order, and of ``last``."""
    h = xxhash.xxh3_128()
    for part in (*parts, last):
        h.update(part)
    return str(h.hexdigest())


def note(kind: str, value: int, *more: str) -> None:
    """Append a line to this rank's notes: time, life, kind, value and digests. One write survives a SIGKILL."""
    words = (f"{time.monotonic():.6f}", "{}.{}".format(*life()), kind, str(value), *more)
    with (Path(os.environ["CHAOS_DIR"]) / f"rank{own_rank()}.log").open("a") as log:
        log.write(" ".join(words) + "\n")


@ttp.ttp_to_persist
def train(steps: int, width: int) -> None:
    """Train as a user's program does, with the three lines of ttp."""
    here = Here.now()
    here.at("entered")
    training = Training(here, width)
    ttp.wrap_optimizer(
        training.optimizer,
        model=training.model,
        scheduler=training.schedule,
        save_dir=os.environ["CHAOS_SAVE_DIR"],
        extra_state=training.losses,
    )
    here.at("joined")
    start = ttp.restore()
    here.step = start
    note("start", start, *training.digests())
    here.at("restored")
    for step in range(start, steps):
        here.step = step
        with ttp.paused("held between two runs"):
            here.at(HOLD)
        here.at("data")
        training.one_step(step)
        time.sleep(float(os.environ.get("CHAOS_STEP_MS", "0")) / 1e3)
    here.step = steps
    with ttp.paused("held after the last run"):
        here.at(END)


def meet_where_it_goes_on() -> None:
    """Report the phases of ``START_PHASES`` in which a rank continues in its process or replaces a dead rank."""
    survivor = continuing.current()
    if survivor is None:
        return
    groups, clock = survivor._groups, survivor.clock
    assert groups is not None
    for owner, stock, phase in (
        (survivor, survivor.out, "leaving"),
        (survivor, survivor._await, "seated"),
        (groups, groups.renew, "regrouping"),
        (clock, clock.stop, "updating"),
    ):
        setattr(owner, stock.__name__, _met(stock, phase))


def _met(stock: Any, phase: str) -> Any:
    def met(*args: Any, **named: Any) -> Any:
        Here.now().at(phase)
        return stock(*args, **named)

    return met


def main() -> int:
    """Run one rank."""
    torch.set_num_threads(1)
    meet_where_it_goes_on()
    dist.init_process_group("gloo")
    train(int(os.environ["CHAOS_STEPS"]), int(os.environ["CHAOS_WIDTH"]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
