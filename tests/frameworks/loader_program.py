"""A plain loop whose batches come from workers of torchdata's loader, for two epochs; see ``ttp.testing.kit``.

``LOADER=nodes``: from threads of its nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ttp


def of_nodes(data: TensorDataset) -> Any:
    from torchdata import nodes  # versions before 0.10 have none

    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=dist.get_rank())
    batches = nodes.Batcher(nodes.SamplerWrapper(sampler), 4)
    return nodes.Loader(nodes.Prefetcher(nodes.ParallelMapper(batches, data.__getitem__, 2, method="thread"), 2))


@ttp.ttp_to_persist
def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(7)
    data = TensorDataset(torch.arange(28.0).view(28, 1), torch.randn(28, 8))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    loader: Any = of_nodes(data) if "LOADER" in os.environ else StatefulDataLoader(data, 4, shuffle=True, num_workers=2)
    ttp.wrap_optimizer(optimizer, model=model, save_dir=save_dir, extra_state=loader)
    step = ttp.restore()
    while step < steps:
        for numbers, inputs in loader:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step, " ".join(str(int(number)) for number in numbers.flatten()))
            step += 1
            if step == steps:
                break
    return {"model": model, "optimizer": optimizer}
