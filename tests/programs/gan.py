"""A GAN as PyTorch's own examples write one: two networks in DistributedDataParallel, two optimizers, D then G.

The generator has an average as in BigGAN, which is no module.
"""

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


class Average:
    def __init__(self, network: nn.Module, decay: float = 0.9) -> None:
        self.source, self.decay = dict(network.named_parameters()), decay
        self.target = {name: value.detach().clone() for name, value in self.source.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self.source.items():
            self.target[name].lerp_(value, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target = state["target"]


@ttp.ttp_to_persist  # ttp
def train(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    net_g, net_d = DistributedDataParallel(generator()), DistributedDataParallel(discriminator())
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    average_g = Average(net_g)
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + dist.get_rank())
    ttp.wrap_optimizer(  # ttp
        [optimizer_d, optimizer_g],
        model=nn.ModuleDict({"d": net_d, "g": net_g}),
        save_dir=save_dir,
        extra_state={"average": average_g},
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
        average_g.update()
        ttp.step_done()  # ttp
        report(step, loss_real.item() + loss_fake.item() + loss_g.item())
    ended: dict[str, Any] = {"D": net_d, "G": net_g, "average of G": average_g}
    return ended | {"optimizer of D": optimizer_d, "optimizer of G": optimizer_g}


main = train
