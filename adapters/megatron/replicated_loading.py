"""Loads what ``replicated_checkpoint`` has read into model and ``ReplicatedOptimizer``, by the names of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.megatron.replicated_optimizer import ReplicatedOptimizer
from ttp.errors import CheckpointError


def put_back(own: ReplicatedOptimizer, shards: Sequence[dict[str, Any]], place: Path) -> None:
    """Load the merged shards into the parameters, the optimizer's state and its groups.

    Args:
        own: the optimizer.
        shards: the contents of all shards of this place in the model.
        place: directory of the shards, for messages.

    Raises:
        CheckpointError: the shards belong to another model.
    """
    weights: dict[str, Tensor] = {name: value for shard in shards for name, value in shard["weights"].items()}
    here = own.trained
    if weights.keys() != here.keys() or any(weights[n].shape != p.shape for n, p in here.items()):
        odd = sorted(weights.keys() ^ here.keys()) or [n for n, p in here.items() if weights[n].shape != p.shape]
        raise CheckpointError(
            f"{place} belongs to another model: these names are missing or have another shape: {', '.join(odd[:5])}"
        )
    states = {name: value for shard in shards for name, value in shard["state"].items()}
    with torch.no_grad():
        for name, parameter in here.items():
            parameter.copy_(weights[name])
        for name, (_, main) in own.held.items():
            main.copy_(weights[name])
    if own.optimizer is None:
        return
    on_device = any(group.get("capturable") or group.get("fused") for group in own.optimizer.param_groups)
    for name, (_, main) in own.held.items():
        own.optimizer.state[main] = {
            key: value.to(main.device) if isinstance(value, Tensor) and (value.dim() or on_device) else value
            for key, value in states[name].items()
        }
    for number, group in enumerate(own.optimizer.param_groups):
        group.update(_group(number, shards))


def _group(number: int, shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a group's hyperparameters, from the shard with the highest count of steps.

    A fused optimizer does not count steps in a group that is empty on its rank.
    """
    versions = [shard["groups"][number] for shard in shards if number < len(shard["groups"])]
    counted = [v for v in versions if "step" in v]
    return dict(max(counted, key=lambda v: float(v["step"])) if counted else versions[0] if versions else {})


def put_fixed(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Load frozen parameters and buffers by name. ``model`` is a module, or a list of chunks."""
    with torch.no_grad():
        for number, chunk in enumerate(model if isinstance(model, (list, tuple)) else [model]):
            for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
                if f"{number}.{name}" in saved:
                    value.copy_(saved[f"{number}.{name}"])
