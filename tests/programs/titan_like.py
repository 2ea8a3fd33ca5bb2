"""A trainer in the style of torchtitan: containers of optimizers and schedules, meta init, fully_shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ttp

VOCABULARY, DIM, LENGTH, BATCH, ACCUMULATION = 32, 16, 12, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.Linear | nn.Embedding):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        logits: Tensor = self.output(self.norm(h))
        return logits


class OptimizersContainer(Optimizer, Stateful):
    """One optimizer for each part of the model, used like a single one."""

    def __init__(self, model_parts: list[nn.Module], **settings: Any) -> None:
        self.model_parts = model_parts
        self.optimizers = [AdamW((p for p in part.parameters() if p.requires_grad), **settings) for part in model_parts]
        Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], settings)

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, optimizer, options=options)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=options)


class LRSchedulersContainer(Stateful):
    def __init__(self, optimizers: OptimizersContainer, lr_lambda: Callable[[int], float]) -> None:
        self.schedulers = [LambdaLR(optimizer, lr_lambda) for optimizer in optimizers.optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(dict(state_dict))


class DataLoader(Stateful):
    """An endless stream of tokens that knows its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            source = torch.Generator().manual_seed(1000 * self.position + dist.get_rank())
            self.position += 1
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=source)
            yield tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Trainer(Stateful):
    def __init__(self, steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> None:
        self.steps, self.save_dir, self.report = steps, save_dir, report
        self.step = self.ntokens_seen = 0
        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "dp_shard"))
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
        self.optimizers = OptimizersContainer(self.model_parts, lr=3e-3, weight_decay=0.1)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: min(1.0, (step + 1) / 3) * 0.9**step)
        torch.manual_seed(100 + dist.get_rank())

    def train_step(self, data: Iterator[tuple[Tensor, Tensor]]) -> None:
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
        self.optimizers.step()
        self.lr_schedulers.step()
        self.report(self.step, total)

    @ttp.ttp_to_persist  # ttp
    def train(self) -> dict[str, Any]:
        state = {"train_state": self, "dataloader": self.dataloader}
        ttp.wrap_optimizer(  # ttp
            self.optimizers,
            model=self.model_parts[0],
            scheduler=self.lr_schedulers,
            save_dir=self.save_dir,
            extra_state=state,
        )
        ttp.restore()  # ttp
        data = iter(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            self.train_step(data)
        return state | {
            "model": self.model_parts[0],
            "optimizers": self.optimizers,
            "lr_schedulers": self.lr_schedulers,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    return Trainer(steps, save_dir, report).train()
