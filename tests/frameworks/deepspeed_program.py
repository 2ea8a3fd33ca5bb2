"""A loop with DeepSpeed's engine. ``PROGRAM_STAGE``: stage of ZeRO; ``PROGRAM_TYPE``: ``bf16``, ``fp16`` or nothing.

``PROGRAM_FROM``: a job with ttp goes on from the checkpoints of another job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error"}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn.functional import cross_entropy

import ttp
import ttp.deepspeed

STAGE, TYPE = int(os.environ.get("PROGRAM_STAGE", "2")), os.environ.get("PROGRAM_TYPE", "bf16")


@ttp.ttp_to_persist  # ttp
def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": TYPE == "bf16"},
        "fp16": {"enabled": TYPE == "fp16", "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1},
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if TYPE == "fp16":
        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks for a fast one
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    torch.manual_seed(100 + dist.get_rank())
    other = os.environ.get("PROGRAM_FROM") if "TTP_PORT" in os.environ else None
    step = ttp.deepspeed.protect(engine, other or save_dir)  # ttp
    while step < steps:
        for half in range(2):
            source = torch.Generator().manual_seed(10 * step + 2 * dist.get_rank() + half)
            inputs, labels = torch.randn(8, 16, generator=source), torch.randint(0, 4, (8,), generator=source)
            loss = cross_entropy(engine(inputs.to(next(model.parameters()).dtype)).float(), labels)
            engine.backward(loss)
            engine.step()
        if engine.global_steps - engine.skipped_steps > step:
            step += 1
            report(step, loss.item())
    return ended(engine, model, schedule)


def ended(engine: Any, model: nn.Module, schedule: Any) -> dict[str, Any]:
    """Return the whole state of this rank; its ``whole`` part is equal for any number of ranks."""
    partitions = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
    inner = engine.optimizer.optimizer if STAGE else engine.optimizer
    found: dict[str, Any] = {
        "model": model,
        "optimizer": inner,
        "schedule": schedule,
        "counts": [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps],
        "scale": getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", 1.0),
    }
    found |= {f"partition {number}": each.detach() for number, each in enumerate(partitions)}
    kept = [(each.detach(), inner.state[each]["exp_avg"], inner.state[each]["exp_avg_sq"]) for each in partitions]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, kept)
    sizes = [sum(p.numel() for p in model.parameters() if (p.ndim > 1) == (number == 0)) for number in (0, 1)]
    found["whole"] = [
        torch.cat([rank[group][kind] for rank in everybody])[: sizes[group]]
        for group in range(len(partitions))
        for kind in range(3)
    ]
    return found
