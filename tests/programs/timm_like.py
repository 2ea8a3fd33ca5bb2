"""A training script in the style of timm: layer-wise rates, an average of the weights, mixup, a schedule of its own."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp
from ttp.testing import kit

CLASSES = 4


class ModelEma(nn.Module):
    """Like ``timm.utils.ModelEmaV3`` with ``exclude_buffers``: averages of the weights, but the model's buffers."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, live in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(live, weight=1.0 - self.decay)
        for own, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(buffer)


@contextlib.contextmanager
def averaged(model: nn.Module, model_ema: ModelEma) -> Iterator[None]:
    """Put the averages into the model, to evaluate them."""
    trained = [p.detach().clone() for p in model.parameters()]
    pairs = zip(model.parameters(), model_ema.module.parameters(), strict=True)
    for parameter, average in pairs:
        parameter.data.copy_(average)
    try:
        yield
    finally:
        for parameter, value in zip(model.parameters(), trained, strict=True):
            parameter.data.copy_(value)


class CosineScheduler:
    """Like timm's: stepped by the epoch and by the number of updates, and not a subclass of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int, warmup_t: int) -> None:
        self.optimizer, self.t_initial, self.warmup_t = optimizer, t_initial, warmup_t
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.metric: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.metric = metric  # stepped on updates: an epoch changes no rate

    def step_update(self, num_updates: int) -> None:
        warm = min(1.0, (num_updates + 1) / self.warmup_t)
        factor = warm * 0.5 * (1 + math.cos(math.pi * min(1.0, num_updates / self.t_initial)))
        for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = value * factor * group["lr_scale"]


def create_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, CLASSES),
    )  # fmt: skip


def param_groups_layer_decay(model: nn.Sequential, layer_decay: float = 0.7) -> list[dict[str, Any]]:
    groups = []
    for depth, layer in enumerate(reversed(model)):
        for parameters, decay in (("weight", 0.05), ("bias", 0.0)):
            found = [p for name, p in layer.named_parameters() if name == parameters]
            if found:
                groups.append({"params": found, "weight_decay": decay, "lr_scale": layer_decay**depth})
    return groups


def mixup(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mix pairs of a batch. Numpy draws how much, Python whether."""
    one_hot = nn.functional.one_hot(target, CLASSES).float()
    if random.random() > 0.8:
        return x, one_hot
    lam = float(np.random.beta(0.8, 0.8))
    return x * lam + x.flip(0) * (1 - lam), one_hot * lam + one_hot.flip(0) * (1 - lam)


@ttp.ttp_to_persist  # ttp
def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(42)
    data = TensorDataset(torch.randn(64, 1, 6, 6), torch.randint(0, CLASSES, (64,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader: DataLoader[Any] = DataLoader(data, 8, sampler=sampler, generator=torch.Generator())
    model = create_model()
    optimizer = torch.optim.SGD(param_groups_layer_decay(model), lr=0.1, momentum=0.9, nesterov=True)
    model_ema = ModelEma(model)
    ddp = DistributedDataParallel(model)
    lr_scheduler = CosineScheduler(optimizer, t_initial=steps, warmup_t=3)
    torch.manual_seed(42 + dist.get_rank())
    random.seed(42 + dist.get_rank())
    np.random.seed(42 + dist.get_rank())
    ttp.wrap_optimizer(  # ttp
        optimizer, model=ddp, save_dir=save_dir, extra_state={"ema": model_ema, "lr_scheduler": lr_scheduler}
    )
    num_updates = ttp.restore()  # ttp
    lr_scheduler.step_update(num_updates)

    start_epoch, skip = divmod(num_updates, len(loader))
    for epoch in range(start_epoch, math.ceil(steps / len(loader))):
        sampler.set_epoch(epoch)
        for batch, (x, target) in enumerate(loader):
            if (epoch == start_epoch and batch < skip) or num_updates == steps:
                continue
            mixed, soft = mixup(x, target)
            loss = nn.functional.cross_entropy(ddp(mixed), soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model_ema.update(model)
            num_updates += 1
            lr_scheduler.step_update(num_updates)
            report(num_updates - 1, loss.item())
        lr_scheduler.step(epoch + 1)
        with averaged(model, model_ema), torch.no_grad():
            model.eval()
            top1 = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
            kit.at("evaluation")
            dist.all_reduce(top1)
            model.train()
    return {"model": ddp, "ema": model_ema, "optimizer": optimizer}
