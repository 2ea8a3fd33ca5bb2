"""Makes Accelerate shard on the CPU, which it does on devices only. Everything else is Accelerate's own."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def believe() -> None:
    """Make torch accept sharding on the CPU. Call this before the first ``Accelerator`` or ``TrainingArguments``."""
    state: Any = PartialState
    made = state.__init__

    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        made(self, cpu=True, **kwargs)
        if self._shared_state["distributed_type"] is DistributedType.MULTI_CPU:
            self._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))

    state.__init__ = init
