"""``mindio_ttp.megatron_ttp``: the optimizer and the handlers for Megatron from the original's first generations."""

from __future__ import annotations

from ttp.adapters.megatron.replicated_checkpoint import load_checkpoint, rename_save_result, ttp_save_checkpoint
from ttp.adapters.megatron.replicated_optimizer import ReplicatedOptimizer

__all__ = ["ReplicatedOptimizer", "load_checkpoint", "rename_save_result", "ttp_save_checkpoint"]
