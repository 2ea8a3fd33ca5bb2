"""Accelerate shards on GPUs and other devices only: here it believes that the CPU is one. All that follows is its own."""

from __future__ import annotations

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def believe() -> None:
    """Called before the first ``Accelerator`` or ``TrainingArguments``."""
    PartialState(cpu=True)
    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}
