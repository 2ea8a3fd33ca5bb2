"""The parts of a training loop, for the tests of the calls that follow an update."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from ttp.adapters.torch.loop.post_step_state import PostStepState


class Loop:
    """The parts of a training loop, with the calls that the hooks would make."""

    def __init__(self, make: Any = None, *, scaler: Any = None, averages: bool = False, runtimes: Any = ()) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler: Any = make(self.optimizer) if make else None
        self.scaler = scaler
        self.version = 0
        self.post_step = PostStepState(
            [self.optimizer], scheduler=self.scheduler, scaler=scaler, averages=averages, runtimes=runtimes
        )

    def forward(self, training: bool = True) -> None:
        self.post_step.forward_entered(training)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def update(self) -> None:
        self.post_step.at_gate()
        self.optimizer.step()
        self.version += 1
        self.post_step.update_finished(self.version)

    def step(self, *args: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step(*args)

    def iterations(self, count: int) -> None:
        for _ in range(count):
            self.forward()
            self.update()
            self.step()

    def to_update(self, count: int) -> Loop:
        """Run iterations, and one more that ends with the update."""
        self.iterations(count)
        self.forward()
        self.update()
        return self

    def state(self, version: int | None = None) -> Any:
        return self.post_step.job_state(self.version if version is None else version)

    @property
    def rate(self) -> float:
        return float(self.post_step.param_groups(self.version)[0][0]["lr"])
