"""A trainer with torchtitan's own containers and checkpoint manager, called as its Trainer does; HSDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

import ttp
import ttp.titan
from tests.programs.titan_like import ACCUMULATION, DataLoader, Transformer


def group(pattern: str, rate: float) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": rate, "weight_decay": 0.1})


class Trainer:
    def __init__(self, steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> None:
        self.steps, self.report = steps, report
        self.step = self.ntokens_seen = 0
        torch.manual_seed(1)
        shards = int(os.environ.get("PROGRAM_SHARDS", "2"))
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        with torch.device("meta"):
            model = Transformer()
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        model.train()
        self.model_parts: list[nn.Module] = [model]
        self.dataloader = DataLoader()
        groups = [group(r"norm", 1e-3), group(r".*", 3e-3)]
        optimizer = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = optimizer.build(model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=steps)
        self.checkpointer = ttp.titan.TtpCheckpointManager.Config(save_dir=str(save_dir)).build(  # ttp
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )
        torch.manual_seed(100 + dist.get_rank())

    def train_step(self, data: Any) -> None:
        self.optimizers.zero_grad()
        total = 0.0
        for _ in range(ACCUMULATION):
            tokens, labels = next(data)
            self.ntokens_seen += labels.numel()
            logits = self.model_parts[0](tokens)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten()) / ACCUMULATION
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_([p for part in self.model_parts for p in part.parameters()], 1.0, foreach=True)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.report(self.step, total)

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        data = iter(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            self.train_step(data)
            self.checkpointer.save(self.step, last_step=self.step == self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    trainer = Trainer(steps, save_dir, report)
    ttp.ttp_to_persist(trainer.train)()  # ttp
    return {
        "model": trainer.model_parts[0],
        "optimizers": trainer.optimizers,
        "lr_schedulers": trainer.lr_schedulers,
        "rates": [rate for each in trainer.lr_schedulers for rate in each.get_last_lr()],
        "train_state": trainer,
        "dataloader": trainer.dataloader,
    }
