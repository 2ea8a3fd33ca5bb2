"""A small training that never waits for the device by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ttp
from tests.gpu.stand import Stand, Thread, assert_same, saved_tensors

STEPS_MAX = 40
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam-rate-there": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2, device=p[0].device), fused=True),
    "adam-capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


class Plain(nn.Module):
    """A model with dropout, so that the device's random stream must be right, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.drop(torch.relu(self.first(x))))
        return result


class Training:
    """A loop whose inputs are on the device before it begins.

    Args:
        stand: the place.
        optimizer: one of ``OPTIMIZERS``.
        make: makes the model.
        wrap: what is called instead of the model (DDP, FSDP).
        scaled: with a GradScaler.
    """

    def __init__(
        self,
        stand: Stand,
        optimizer: str = "adam-foreach",
        *,
        make: Callable[[], nn.Module] = Plain,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        scaled: bool = False,
    ) -> None:
        torch.manual_seed(5)
        self._stand = stand
        self.module = stand.put(make())
        self.model = wrap(self.module)
        kind = "adam" if optimizer == "adam-capturable" and not stand.real else optimizer  # capturable needs a device
        self.optimizer = OPTIMIZERS[kind]([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.97**n)
        self.scaler = torch.amp.GradScaler(stand.device.type, init_scale=8.0, growth_interval=3) if scaled else None
        generator = torch.Generator().manual_seed(6)
        self._data = [torch.randn(16, 32, generator=generator).to(stand.device) for _ in range(STEPS_MAX)]
        self.steps = 0
        torch.manual_seed(7)

    def protect(self, **settings: Any) -> None:
        """Register with ttp as a user's program does. Checkpoints go below the stand's directory."""
        ttp.wrap_optimizer(
            self.optimizer,
            model=self.model,
            scheduler=self.scheduler,
            scaler=self.scaler,
            save_dir=self.save_dir,
            **settings,
        )

    @property
    def save_dir(self) -> Path:
        """The directory of its checkpoints."""
        return self._stand.directory / "checkpoints"

    def gradient(self, micro_batches: int = 1) -> None:
        """Queue forward and backward pass."""
        self.optimizer.zero_grad()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            no_sync: Any = getattr(self.model, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if last else no_sync():
                loss = self.model(self._data[self.steps % STEPS_MAX]).square().mean() / micro_batches
                (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def evaluate(self) -> None:
        """Queue a forward pass without gradients."""
        with torch.no_grad():
            self.model(self._data[0])

    def update(self) -> None:
        """Queue the update and what follows it."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.steps += 1

    def step(self) -> None:
        """One iteration."""
        self.gradient()
        self.update()

    def state(self) -> dict[str, Tensor]:
        """Return weights, buffers and the optimizer's state by their names in a checkpoint; waits for the device."""
        names: dict[Any, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        tensors = {f"model.{name}": value for name, value in self.module.state_dict(keep_vars=True).items()}
        for parameter, values in self.optimizer.state.items():
            tensors |= {f"optim.state.{names[parameter]}.{key}": torch.as_tensor(v) for key, v in values.items()}
        rates = {
            f"optim.param_groups.{number}.lr": rate
            if isinstance(rate, Tensor)
            else torch.tensor(rate, dtype=torch.float64)
            for number, rate in enumerate(group["lr"] for group in self.optimizer.param_groups)
        }
        return self._stand.host_copy(tensors | rates)


def check_saved_behind_a_hang(
    stand: Stand,
    training: Training,
    meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    *more: Callable[[], None],
) -> None:
    """Let the device hang before the second step, save, and check that the first version was saved, byte for byte.

    Args:
        stand: the place.
        training: has made one step.
        meanwhile: returns the context of the save.
        more: what the training thread does after the second step.
    """
    wanted = training.state()
    spin = stand.spin()
    try:
        queued = Thread(stand, [training.step, *more] if stand.hangs else [])
        stand.numbers["host stands"] = queued.wait_stuck()
        with meanwhile():
            version, checkpoint = stand.save()
    finally:
        spin.release()
    queued.join()
    assert version == 1
    assert_same(saved_tensors(checkpoint), wanted)


def references(make: Callable[[], Training], steps: int) -> list[dict[str, Tensor]]:
    """Return the state of an undisturbed run after 0, 1, ... ``steps`` updates."""
    training = make()
    states = [training.state()]
    for _ in range(steps):
        training.step()
        states.append(training.state())
    return states
