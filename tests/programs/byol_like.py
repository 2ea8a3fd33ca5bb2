"""Self-supervised training in the style of BYOL: a target network that follows the model, a queue that fills in the
forward pass, and a layer that is trained from some step on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ttp

HEAD_FROM = 3


class Byol(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predict = nn.Linear(4, 4)
        self.register_buffer("queue", torch.empty(0, 4))

    @torch.no_grad()
    def follow(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.data.mul_(0.9).add_(online.data, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x + 0.1 * torch.randn_like(x))
            self.queue = torch.cat([self.queue, wanted[:2]])[-6:]
        loss = (self.predict(self.online(x)) - wanted).square().mean() + 0.1 * self.predict(self.queue).mean()
        assert isinstance(loss, Tensor)
        return loss


@ttp.ttp_to_persist  # ttp
def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(42)
    model = Byol()
    head = list(model.predict.parameters())
    optimizer = torch.optim.AdamW(model.online.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(42 + dist.get_rank())
    ttp.wrap_optimizer(optimizer, model=ddp, save_dir=save_dir)  # ttp
    for step in range(ttp.restore(), steps):  # ttp
        if step == HEAD_FROM:
            optimizer.add_param_group({"params": head, "lr": 0.05})
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ddp.zero_grad()
        loss = ddp(x)
        loss.backward()
        optimizer.step()
        model.follow()
        report(step, loss.item())
    return {"model": ddp, "optimizer": optimizer}
