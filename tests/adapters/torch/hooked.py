"""A training loop in one process, with ttp's hooks and a record of their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.loop.hooks import Attachment, Calls
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.processor.gate.gate import Gate


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Job:
    """A model, its optimizer, a gate, and a log of what the hooks did."""

    def __init__(self, make: Callable[[Any], Any] | None = None, optimizers: int = 1, **parts: Any) -> None:
        self.log: list[Any] = []
        self.mark = 0
        self.alone = False
        """Whether, in the last capture, only torch's own code had run since the gate."""
        self.activity = ""
        self.model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.optimizers = [make(list(self.model.parameters())) for _ in range(optimizers)]
        self.optimizer = self.optimizers[0]
        self.gate = Gate()
        self.fence = Fence(())
        scheduler = parts.pop("scheduler", None)
        self.scheduler: Any = scheduler(self.optimizer) if scheduler else None
        self.tail = PostStepState(self.optimizers, scheduler=self.scheduler, **parts)
        self.connect()

    def connect(self) -> None:
        self.detach = Attachment(
            [[each] for each in self.optimizers],
            self.model,
            self,
            self,
            post_step=self.tail,
            fence=self.fence,
            version=lambda: self.gate.version,
            calls=Calls(after_update=lambda: self.log.append("after")),
        )

    def begin_update(self, again: bool = False) -> None:
        self.gate.begin_update(again)
        self.log.append("begin")

    def stand_between(self) -> None:
        self.gate.stand_between()
        self.log.append("between")

    def leave_update(self) -> None:
        self.gate.leave_update()
        self.log.append("left")

    def end_update(self) -> None:
        self.gate.end_update()
        self.log.append("end")

    def capture(self, version: int, final: bool, alone: bool = False) -> None:
        self.alone = alone
        self.log.append((version, "final" if final else "early"))

    def look_again(self, version: int) -> None:
        self.log.append((version, "again"))

    def scheduler_state(self, version: int) -> Any:
        return self.tail.job_state(version).scheduler

    def backward(self) -> None:
        self.model(torch.ones(4, 3)).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def taken(self) -> list[Any]:
        log, self.log = self.log, []
        return log
