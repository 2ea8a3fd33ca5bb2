"""A loop with DeepSpeed's engine. ``PROGRAM_STAGE``: of ZeRO."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error"}

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import ttp
import ttp.deepspeed

STAGE = int(os.environ.get("PROGRAM_STAGE", "2"))


@ttp.ttp_to_persist  # ttp
def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": STAGE > 0},
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    torch.manual_seed(100 + dist.get_rank())
    step = ttp.deepspeed.protect(engine, save_dir)  # ttp
    while step < steps:
        for half in range(2):
            source = torch.Generator().manual_seed(10 * step + 2 * dist.get_rank() + half)
            inputs, labels = torch.randn(8, 16, generator=source), torch.randint(0, 4, (8,), generator=source)
            loss = cross_entropy(engine(inputs.to(next(model.parameters()).dtype)).float(), labels)
            engine.backward(loss)
            engine.step()
        step += 1
        report(step, loss.item())
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    partitions = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
    found: dict[str, Any] = {
        "model": model,
        "optimizer": inner,
        "schedule": schedule,
        "counts": [engine.global_steps, engine.micro_steps, engine.global_samples],
    }
    return found | {f"partition {number}": each.detach() for number, each in enumerate(partitions)}
