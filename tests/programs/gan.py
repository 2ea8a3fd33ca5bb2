"""A GAN as PyTorch's own examples write one: two networks in DistributedDataParallel, two optimizers, D then G."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ttp

NOISE, WIDTH, BATCH = 8, 16, 16


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH), nn.Tanh())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0))


def real_images(step: int) -> Tensor:
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.sin(torch.randn(BATCH, 1, generator=source) * torch.arange(WIDTH))


@ttp.ttp_to_persist  # ttp
def train(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    net_g, net_d = DistributedDataParallel(generator()), DistributedDataParallel(discriminator())
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + dist.get_rank())
    ttp.wrap_optimizer(  # ttp
        [optimizer_d, optimizer_g], model=nn.ModuleDict({"d": net_d, "g": net_g}), save_dir=save_dir
    )
    start = ttp.restore()  # ttp

    for step in range(start, steps):
        # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        loss_real = criterion(net_d(real_images(step)), torch.ones(BATCH))
        loss_real.backward()
        fake = net_g(torch.randn(BATCH, NOISE))
        loss_fake = criterion(net_d(fake.detach()), torch.zeros(BATCH))
        loss_fake.backward()
        optimizer_d.step()
        # (2) update G: maximize log(D(G(z)))
        net_g.zero_grad()
        loss_g = criterion(net_d(fake), torch.ones(BATCH))
        loss_g.backward()
        optimizer_g.step()
        report(step, loss_real.item() + loss_fake.item() + loss_g.item())
    return {"D": net_d, "G": net_g, "optimizer of D": optimizer_d, "optimizer of G": optimizer_g}


main = train
