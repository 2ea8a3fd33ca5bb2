"""Two trainings in one program, with another optimizer each: the second one goes on with the model of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ttp

Report = Callable[[int, Any], None]


@ttp.ttp_to_persist  # ttp
def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, save_dir: Path, report: Report) -> nn.Module:
    model = DistributedDataParallel(net)
    ttp.wrap_optimizer(optimizer, model=model, save_dir=save_dir)  # ttp
    torch.manual_seed(steps.start + dist.get_rank())
    for step in steps[ttp.restore() :]:  # ttp
        source = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(8, 6, generator=source), torch.randint(0, 3, (8,), generator=source)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.item())
    return net


def main(steps: int, save_dir: Path, report: Report) -> dict[str, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    first = save_dir.with_name("first.pt")
    if first.exists():
        net.load_state_dict(torch.load(first, weights_only=True))
    else:
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, sgd, range(steps), save_dir.with_name("first"), report)
        if dist.get_rank() == 0:  # ttp saves only when something fails
            torch.save(net.state_dict(), first)
        dist.barrier()
    net[0].requires_grad_(False)
    adam = torch.optim.Adam(net[3].parameters(), lr=0.01)
    train(net, adam, range(steps, 2 * steps), save_dir, report)
    return {"model": net, "optimizer": adam}
