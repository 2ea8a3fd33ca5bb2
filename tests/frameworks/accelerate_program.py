"""A loop in the style of Accelerate's examples, with a loader that keeps its place; see ``ttp.testing.kit``.

``LOOP`` names the variant: ``scaler``, ``bf16``, ``split``, ``fsdp1``, ``fsdp2``, ``hsdp`` (two replicas).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    ProjectConfiguration,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ttp
from tests.frameworks.sharded_on_cpu import believe

LOOP = os.environ.get("LOOP", "")
SHARDED = LOOP in ("fsdp1", "fsdp2", "hsdp")


class Seen:
    """An object of the program's own with state."""

    def __init__(self) -> None:
        self.sum = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


@ttp.ttp_to_persist
def train(accelerator: Accelerator, steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(88, 8), torch.randint(0, 3, (88,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=2 * steps + 2)
    loader = DataLoader(data, 4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    torch.manual_seed(100 + accelerator.process_index)
    ttp.accelerate.protect(
        accelerator, model, optimizer, scheduler, loader, save_dir=save_dir, buddy=LOOP in ("fsdp1", "fsdp2")
    )
    done = ttp.restore()
    while done < steps:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss: Tensor = nn.functional.cross_entropy(model(inputs).float(), labels)
                seen.sum += loss.item() + float(inputs.sum())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                report(done, loss.item())
                done += 1
                if not SHARDED and done % 2 == 0:
                    accelerator.save_state()
                if done == steps:
                    break
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": seen, "scaler": scale(accelerator)}


def scale(accelerator: Accelerator) -> Any:
    return accelerator.scaler.state_dict() if accelerator.scaler is not None else {}


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, split_batches=LOOP == "split"
    )
    sharded: dict[str, Any] = {}
    if SHARDED:
        believe()
        sharded["fsdp_plugin"] = FullyShardedDataParallelPlugin(1 if LOOP == "fsdp1" else 2, use_orig_params=True)
    if LOOP == "hsdp":
        sharded["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(
        cpu=not SHARDED,
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if LOOP == "bf16" else "no",
        dataloader_config=config,
        project_config=ProjectConfiguration(
            str(save_dir.parent / "project"), automatic_checkpoint_naming=True, total_limit=2
        ),
        **sharded,
    )
    if LOOP == "scaler":  # Accelerate makes one for fp16, and fp16 on a GPU only; the rest of its way is the same
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    return train(accelerator, steps, save_dir, report)
