"""A job of PyTorch Lightning.

``PROGRAM_KIND``: ``automatic``, ``manual`` (two optimizers), ``by_hand`` (one, and BatchNorm), ``growing`` (larger
batches from the second epoch on), ``tuned`` (a backbone that trains from the second epoch on), ``workers`` (a loader
that keeps its place), ``fsdp2`` and ``hsdp`` (``fully_shard`` in ``configure_model``), ``fsdp1`` and ``hsdp1``
(Lightning's strategy). In the first life rank 0 sends itself SIGTERM after ``PROGRAM_TERM`` steps, or raises after
``PROGRAM_RAISE``.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ttp
import ttp.lightning
from ttp.testing import kit

KIND = os.environ.get("PROGRAM_KIND", "automatic")
FSDP1, FSDP2 = KIND in ("fsdp1", "hsdp1"), KIND in ("fsdp2", "hsdp")
LIFE_AND_RANK = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
HURT = "TTP_PORT" in os.environ and LIFE_AND_RANK == ("0", "0")
TERM, RAISE = (int(os.environ.get(f"PROGRAM_{name}", "-1")) if HURT else -1 for name in ("TERM", "RAISE"))


class Classifier(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        kit.at("validation")
        self.log("val", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=self.steps + 1)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class Plateau(Classifier):
    """A model whose learning rate follows the validation at the end of an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": plateau, "interval": "epoch", "monitor": "val"}]


class Tuned(Classifier):
    """A model whose first part trains from the second epoch on, with a rate that grows with the epochs."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.backbone = self.layers[0]

    def on_train_start(self) -> None:
        if self.current_epoch >= 1:  # Lightning leaves it frozen when it resumes
            BackboneFinetuning.make_trainable(self.backbone)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda each: each.requires_grad, self.parameters()), lr=1e-2)


class ByHand(Classifier):
    """A model that steps its optimizer itself, every second batch."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Sharded(Classifier):
    """A model as ``ModelParallelStrategy`` shards it; with ``hsdp`` each shard is on two ranks."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.layers[1] = nn.LayerNorm(32)

    def configure_model(self) -> None:
        if FSDP1:
            return
        mesh = self.device_mesh if KIND == "hsdp" else self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()) and not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=mesh)


class OnThisDevice(FSDPStrategy):
    """Lets Lightning start its strategy without a GPU, whose number it gives to torch. All else is Lightning's."""

    def _setup_model(self, model: Any) -> Any:
        here: dict[str, Any] = {"device_id": torch.device("cpu")}
        if KIND == "hsdp1":
            here["device_mesh"] = init_device_mesh("cpu", (2, 2))
        found: Any = FullyShardedDataParallel(model, sharding_strategy=self.sharding_strategy, **here, **self.kwargs)
        return found


class Gan(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.judge = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        of_judge, of_generator = self.optimizers()
        real = batch[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        for _ in range(2):  # of the judge, for one of the generator
            fake = self.generator(torch.randn(len(real), 8)).detach()
            loss = binary_cross_entropy_with_logits(self.judge(real), ones)
            loss = loss + binary_cross_entropy_with_logits(self.judge(fake), zeros)
            of_judge.zero_grad()
            self.manual_backward(loss)
            of_judge.step()
        made = binary_cross_entropy_with_logits(self.judge(self.generator(torch.randn(len(real), 8))), ones)
        of_generator.zero_grad()
        self.manual_backward(made)
        of_generator.step()
        return made

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.judge, self.generator)]


class Average(Callback):
    """Averages the weights; the average is given as ``extra_state``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.module.update_parameters(pl_module)


class Watch(Callback):
    """A callback with state, as users have, that offers its hooks as phases for faults."""

    def __init__(self, report: Callable[[int, Any], None]) -> None:
        self.report, self.smooth, self.epochs, self.batches, self.steps = report, 0.0, 0, 0, 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kit.at("on_train_batch_end")
        self.batches += 1
        if trainer.global_step > self.steps:  # else it accumulates
            self.steps = trainer.global_step
            self.report(self.steps, self.smooth)
        if self.steps == TERM:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.steps == RAISE:
            raise ValueError("a callback raises")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        kit.at("on_train_epoch_end")
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"smooth": self.smooth, "epochs": self.epochs, "batches": self.batches, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__ |= state_dict


def loader(length: int, kind: str) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(length, 16, generator=source), torch.randint(0, 4, (length,), generator=source))
    if kind == "workers":
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        found: Any = StatefulDataLoader(data, 4, sampler=StatefulDistributedSampler(data, shuffle=True), num_workers=1)
        return found
    return DataLoader(data, 4, shuffle=kind != "validation")


def strategy() -> Any:
    if FSDP2:
        replicas = 2 if KIND == "hsdp" else int(os.environ["WORLD_SIZE"])
        return ModelParallelStrategy(replicas, int(os.environ["WORLD_SIZE"]) // replicas)
    if FSDP1:
        sharding: Any = "HYBRID_SHARD" if KIND == "hsdp1" else "FULL_SHARD"
        return OnThisDevice(auto_wrap_policy={nn.Linear}, state_dict_type="sharded", sharding_strategy=sharding)
    return "ddp_find_unused_parameters_true" if KIND == "manual" else "ddp"


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    kinds: dict[str, Any] = {"manual": Gan, "by_hand": ByHand, "plateau": Plateau, "tuned": Tuned}
    module: Any = kinds.get(KIND, Sharded if FSDP1 or FSDP2 else Classifier)(steps)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    watch = Watch(report)
    callbacks: list[Any] = [watch]
    if KIND != "manual":
        stopping = EarlyStopping("val", patience=50)
        best = ModelCheckpoint(save_dir.parent / "models", monitor="val", save_top_k=1)
        callbacks += [OnExceptionCheckpoint(save_dir.parent / "raised"), stopping, best]
    extra: dict[str, Any] = {}
    if KIND == "plateau":
        callbacks.append(average := Average(module))
        extra["extra_state"] = {"average": average.module}
    if KIND == "tuned":
        callbacks.append(BackboneFinetuning(1, verbose=False))
    if KIND == "growing":
        callbacks.append(GradientAccumulationScheduler({1: 2}))
    accumulate = 2 if KIND == "automatic" else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy(),
        max_steps=steps * (3 if KIND == "manual" else 1),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=None if FSDP1 or KIND in ("manual", "by_hand") else 1.0,
        val_check_interval=2 * accumulate,
        limit_val_batches=0 if KIND == "manual" else 2,
        callbacks=[*callbacks, ttp.lightning.TtpCallback(save_dir, buddy=KIND in ("fsdp1", "fsdp2"), **extra)],  # ttp
        plugins=[ttp.lightning.TtpCheckpointIO(save_dir)],  # ttp
        enable_checkpointing=KIND != "manual",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    @ttp.ttp_to_persist  # ttp
    def train() -> None:
        trainer.fit(
            module,
            loader(32 * accumulate, KIND),
            loader(16, "validation"),
            ckpt_path="ttp://last",  # ttp
        )

    train()
    loops = trainer.fit_loop.state_dict()
    loops["state_dict"] = {}  # the loader's
    model = list(module.parameters()) if FSDP1 else module  # pieces: torch's state_dict() needs all ranks
    found: dict[str, Any] = {"model": model, "loops": loops, "watch": watch}
    found |= {f"optimizer {number}": each for number, each in enumerate(trainer.optimizers)}
    found |= {f"schedule {number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
    found |= extra.get("extra_state", {})
    if KIND != "manual":
        found |= {"stopping": stopping, "best": best.best_model_score}
    return found
