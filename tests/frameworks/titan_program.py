"""torchtitan's own Trainer with a small llama3, HSDP; see ``ttp.testing.kit``. ``PROGRAM_SHARDS``: 2, or all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.frameworks.titan_on_cpu  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import ttp
import ttp.titan

LENGTH, VOCABULARY = 16, 2048
SHARDS = int(os.environ.get("PROGRAM_SHARDS", "2"))


class Letters(BaseTokenizer):
    """A tokenizer that is never called, because the stream has tokens."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass


class Stream(BaseDataLoader):
    """An endless stream of tokens that knows its position."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self._rank, self._batch, self.position = dp_rank, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            source = torch.Generator().manual_seed(1000 * self.position + self._rank)
            self.position += 1
            tokens = torch.randint(0, VOCABULARY, (self._batch, LENGTH + 1), generator=source)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def config(steps: int, save_dir: Path) -> Trainer.Config:
    world = int(os.environ["WORLD_SIZE"])
    llama: Any = model_registry("debugmodel")
    llama.model.layers = llama.model.layers[:2]
    for layer in llama.model.layers:  # flex attention would be compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=llama,
        dump_folder=str(save_dir.parent / "outputs"),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=Letters.Config(),
        dataloader=Stream.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4 * world,  # accumulated twice
            seq_len=LENGTH,
            steps=steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=world // SHARDS,
            data_parallel_shard_degree=SHARDS,
            spmd_backend=os.environ.get("PROGRAM_SPMD", "partial_dtensor"),
        ),
        checkpoint=ttp.titan.TtpCheckpointManager.Config(save_dir=str(save_dir), buddy=world == SHARDS),  # ttp
    )


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    trainer = config(steps, save_dir).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
    logs = trainer.metrics_processor.log

    def log(step: int, loss: float, *rest: Any, **more: Any) -> None:
        report(step, loss)
        logs(step, loss, *rest, **more)

    trainer.metrics_processor.log = log
    ttp.ttp_to_persist(trainer.train)()  # ttp
    return {
        "model": trainer.model_parts[0],
        "optimizers": trainer.optimizers,
        "lr_schedulers": trainer.lr_schedulers,
        "rates": [rate for each in trainer.lr_schedulers for rate in each.get_last_lr()],
        "train_state": trainer,
        "dataloader": trainer.dataloader,
    }
