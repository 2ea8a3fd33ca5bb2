"""The example's Trainer with evaluations, a best metric and a callback with a state; see ``ttp.testing.kit``.

``HF_SHARD``: ``fsdp1``, ``fsdp2``, ``hsdp`` (two replicas). ``HF_SCALER``: a scaler that skips steps.
``HF_PLATEAU``: evaluations lower the learning rate, and torch's random stream gives the order of the data.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from tests.frameworks.sharded_on_cpu import believe
from ttp import session
from ttp.testing import kit

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer" / "train_hf.py"
CLOCKS = ("runtime", "per_second")
"""Parts of the names of what is measured by the clock."""
FSDP: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1, "sync_module_states": False},  # it wants a device
    "fsdp2": {"fsdp_version": 2, "sync_module_states": False, "state_dict_type": "FULL_STATE_DICT"},
    "hsdp": {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["GPT2Block"]},
}
PAUSES = ("evaluation", "log, evaluation and save after the last step")


class Watch(TrainerCallback):
    """Records which steps were made, and offers its hooks as phases for faults."""

    def __init__(self, report: Callable[[int, Any], None]) -> None:
        self.report = report

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kit.at("on_step_begin")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kit.at("on_optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not kwargs["optimizer"].step_was_skipped:
            self.report(state.global_step, kwargs["lr_scheduler"].get_last_lr()[0])
        kit.at("on_step_end")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kit.at("on_log")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        processor = session.current().processor
        assert processor is None or processor.activity in PAUSES, "a long evaluation would look like a hang"
        kit.at("on_evaluate")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kit.at("on_epoch_end")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kit.at("on_prediction_step")


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("train_hf", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    often = os.environ.get("HF_EVALUATE", "steps")
    settings: dict[str, Any] = {
        "eval_strategy": often,
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "learning_rate": 1e-3,
    }
    if os.environ.get("HF_PLATEAU"):
        plateau = {"patience": 0, "factor": 0.5, "threshold": 0.5}  # each evaluation but the first lowers the rate
        settings |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": plateau, "eval_steps": 2}
        v5 = hasattr(TrainingArguments, "train_sampling_strategy")
        settings |= {"train_sampling_strategy": "group_by_length"} if v5 else {"group_by_length": True}
    if shard := os.environ.get("HF_SHARD"):
        believe()
        settings |= {"fsdp": True, "fsdp_config": FSDP[shard]}
    if shard == "hsdp":
        settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    trainer = example.make_trainer(
        save_dir.parent / "output",
        steps * 2 * int(os.environ["WORLD_SIZE"]),  # batches of two, accumulated twice, two epochs
        gradient_accumulation_steps=2,
        use_cpu=True,
        **settings,
    )
    if os.environ.get("HF_SCALER"):  # Accelerate makes one for fp16, and fp16 on a GPU only
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    early = EarlyStoppingCallback(early_stopping_patience=100)
    trainer.add_callback(early)
    trainer.add_callback(Watch(report))
    if alone := os.environ.get("HF_ALONE"):
        trainer.train(resume_from_checkpoint=alone)
    else:
        example.train(trainer, save_dir, buddy=shard in ("fsdp1", "fsdp2"))
    history = [{k: v for k, v in line.items() if not any(c in k for c in CLOCKS)} for line in trainer.state.log_history]
    state = {name: getattr(trainer.state, name) for name in ("global_step", "epoch", "best_metric", "best_global_step")}
    return {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "schedule": trainer.lr_scheduler,
        "log": history,
        "state": state,
        "scaler": trainer.accelerator.scaler.state_dict() if trainer.accelerator.scaler is not None else {},
        "patience": early.early_stopping_patience_counter,
    }
