"""A loop of Lightning Fabric, as docs/frameworks.md shows it; see ``ttp.testing.kit``. ``LOOP``: the precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp
from ttp.testing import kit


def data(length: int) -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(length, 16, generator=source), torch.randint(0, 4, (length,), generator=source))


@ttp.ttp_to_persist
def train(fabric: Fabric, epochs: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    fabric.seed_everything(7)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    numbers = data(44)
    sampler: DistributedSampler[Any] = DistributedSampler(numbers)
    loader = DataLoader(numbers, 4, sampler=sampler, generator=torch.Generator())
    tests: Any = fabric.setup_dataloaders(DataLoader(data(16), 4, generator=torch.Generator()))
    torch.manual_seed(100 + fabric.global_rank)
    ttp.wrap_optimizer(optimizer.optimizer, model=model, scheduler=scheduler, save_dir=save_dir)
    step = ttp.restore()
    micro = 2
    first, seen = divmod(step, -(-len(loader) // micro))
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        model.train()
        for number, batch in enumerate(loader, 1):
            if epoch == first and number <= seen * micro:
                continue
            last = number % micro == 0 or number == len(loader)
            inputs, labels = fabric.to_device(batch)
            with fabric.no_backward_sync(model, enabled=not last):
                loss = cross_entropy(model(inputs), labels)
                fabric.backward(loss)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                report(step, loss.item())
                step += 1
        model.eval()
        with torch.no_grad():
            for inputs, labels in tests:
                kit.at("evaluation")
                cross_entropy(model(inputs), labels)
        fabric.save(save_dir.parent / f"own-{epoch}", {"model": model, "optimizer": optimizer})
        kit.at("saved")
    return {"model": model, "optimizer": optimizer.optimizer, "scheduler": scheduler, "step": step}


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    precision: Any = os.environ.get("LOOP") or "32-true"
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", precision=precision)
    fabric.launch()
    return train(fabric, steps // 3, save_dir, report)
