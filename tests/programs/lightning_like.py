"""A trainer in the style of Lightning: automatic optimization through closures, callbacks, a schedule for each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp


class Classifier(nn.Module):
    """The interface of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)


class TrainingStep(nn.Module):
    """Offers ``forward``, which DistributedDataParallel needs."""

    def __init__(self, module: Classifier) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.module.training_step(batch)


class Callbacks:
    """A smoothed loss, as a progress bar keeps it; its state belongs to the run.

    It is updated in ``on_before_backward``: a rank that dies later has taken part in the step with its loss.
    """

    def __init__(self, report: Callable[[int, Any], None]) -> None:
        self.report, self.smooth = report, 0.0

    def on_before_backward(self, loss: Tensor) -> None:
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()

    def on_train_batch_end(self, step: int, loss: Tensor) -> None:
        self.report(step, loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {"smooth": self.smooth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.smooth = state["smooth"]


class Trainer:
    def __init__(self, max_steps: int, callbacks: Callbacks, save_dir: Path) -> None:
        self.max_steps, self.callbacks, self.save_dir = max_steps, callbacks, save_dir

    @ttp.ttp_to_persist  # ttp
    def fit(self, module: Classifier, loader: DataLoader[Any]) -> dict[str, Any]:
        model = DistributedDataParallel(TrainingStep(module))
        optimizer, scheduler = module.configure_optimizers(self.max_steps)
        torch.manual_seed(100 + dist.get_rank())
        ttp.wrap_optimizer(  # ttp
            optimizer, model=model, scheduler=scheduler, save_dir=self.save_dir, extra_state=self.callbacks
        )
        start = ttp.restore()  # ttp
        for step, batch in zip(range(start, self.max_steps), batches(loader, start), strict=False):
            loss = self.optimize(model, optimizer, batch)
            scheduler.step()
            self.callbacks.on_train_batch_end(step, loss)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "callbacks": self.callbacks}

    def optimize(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        def closure() -> Tensor:
            loss: Tensor = model(batch)
            optimizer.zero_grad()
            self.callbacks.on_before_backward(loss)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        loss: Any = optimizer.step(closure=closure)  # type: ignore[arg-type]
        return loss


def batches(loader: DataLoader[Any], start: int) -> Iterator[Any]:
    """Yield batches from step ``start`` on, epoch after epoch."""
    epoch, done = divmod(start, len(loader))
    for number in itertools.count(epoch):
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        yield from itertools.islice(loader, done, None)
        done = 0


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, drop_last=True)
    loader: DataLoader[Any] = DataLoader(data, 8, sampler=sampler, generator=torch.Generator())
    return Trainer(steps, Callbacks(report), save_dir).fit(Classifier(), loader)
