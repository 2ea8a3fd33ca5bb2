"""DeepSpeed: protects an engine with ZeRO 0 to 2. The shards are partitions of the fp32 weights and their moments.

DeepSpeed's optimizer keeps flat fp32 partitions, one per param group on each rank. ttp saves these partitions, and the
moments of the torch optimizer that DeepSpeed's optimizer wraps. The weights of the model are the rounded partitions,
and are made from them again when a job resumes. Each partition is on one rank only, so ``buddy`` is on by default. A
partition is saved as a range of the flat tensor of its group, without the padding that makes all partitions equally
long, so a job with another number of ranks can read it.

``engine.step`` is the update: it steps torch's optimizer once for each param group, and then the schedule.
This module uses these parts of DeepSpeed, as seen in 0.17.6 and 0.19.8: ``engine.optimizer.optimizer``,
``single_partition_of_fp32_groups``, ``update_lp_params``, ``round_robin_bit16_offsets`` and ``_meta``,
``real_dp_process_group``, ``loss_scaler``, and the engine's counts (``_COUNTS``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ttp import api
from ttp.adapters.torch.local_state.extra_state import by_name
from ttp.adapters.torch.sharding.fsdp1 import FlatPiece
from ttp.adapters.versions import begins_once, require
from ttp.errors import ConfigError

TESTED = ("0.17", "0.19")

require("deepspeed", "deepspeed", TESTED)

_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Attributes of the engine that are saved."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of the loss scaler of fp16 that are saved."""


def protect(engine: Any, save_dir: str | Path = "checkpoints", *, extra_state: Any = None, **settings: Any) -> int:
    """Protect the engine that ``deepspeed.initialize`` has returned, join the job, and restore.

    Do not call ``ttp.restore`` in addition.

    Args:
        engine: an engine of stage 0, 1 or 2, without offloading, with an optimizer of torch.
        save_dir: see ``ttp.wrap_optimizer``.
        extra_state: see ``ttp.wrap_optimizer``; the counts of the engine are always saved.
        settings: further arguments of ``ttp.wrap_optimizer``; ``buddy`` is on by default with stages 1 and 2.

    Returns:
        The restored version (finished updates); 0: there is no checkpoint.

    Raises:
        ConfigError: ttp does not support this kind of engine.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if stage > 2 or (stage and partitions is None) or getattr(optimizer, "cpu_offload", False):
        raise ConfigError(
            f"ttp.deepspeed protects ZeRO 0 to 2 without offloading, and not stage {stage} as in this engine"
        )
    if stage == 0 and hasattr(optimizer, "optimizer"):
        raise ConfigError(
            f"ZeRO 0 in half precision uses DeepSpeed's {type(optimizer).__name__}, whose flat weights ttp cannot "
            "save: use zero_optimization.stage 1, whose updates are the same"
        )
    if stage and optimizer.round_robin_gradients:
        raise ConfigError(
            "round_robin_gradients makes the order of weights depend on the number of ranks, which ttp cannot save: "
            "remove it from the DeepSpeed config"
        )
    inner = optimizer.optimizer if stage else optimizer
    model = engine.module if partitions is None else _Partitions(optimizer, engine.module)
    begins_once("DeepSpeed")
    counts = _Counts(engine)
    api.wrap_optimizer(
        inner,
        model=model,
        scheduler=engine.lr_scheduler,
        save_dir=save_dir,
        extra_state={"deepspeed": counts, **by_name(extra_state)},
        **({"buddy": partitions is not None} | settings),
    )
    version = api.restore()
    if version and partitions is not None:
        optimizer.update_lp_params()
    api.step_done()  # from now on a version ends at the end of engine.step
    _bracket(engine, counts)
    return version


def _bracket(engine: Any, counts: _Counts) -> None:
    """Wrap ``engine.step`` so that it ends a version whenever it has made an update."""
    step = engine.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps - engine.skipped_steps
        result = step(*args, **kwargs)
        if engine.global_steps - engine.skipped_steps > before:
            counts.settled = True
            api.step_done()
            counts.settled = False
        return result

    counts.settled, engine.step = False, stepped


class _Partitions(nn.Module):
    """A module whose parameters are the partitions that this rank trains, and whose buffers are the model's."""

    def __init__(self, optimizer: Any, module: nn.Module) -> None:
        super().__init__()
        self._optimizer = optimizer
        for number, partition in enumerate(optimizer.single_partition_of_fp32_groups):
            partition._is_param = True  # lets torch register the partition, a leaf tensor, as a parameter
            self.register_parameter(f"group{number}", partition)
        for name, buffer in module.named_buffers():
            self.register_buffer(name.replace(".", "/"), buffer)

    def flat_pieces(self) -> Iterator[FlatPiece]:
        """Yield the place of each partition in the flat tensor of its group; see ``sharding.fsdp1``."""
        optimizer = self._optimizer
        for number, partition in enumerate(optimizer.single_partition_of_fp32_groups):
            group = optimizer.real_dp_process_group[number]
            whole = _length(optimizer, number)
            start = min(dist.get_rank(group) * partition.numel(), whole)
            count = min(partition.numel(), whole - start)
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            yield _Stretch(partition, None, (whole,), start, 0, count, ranks)


def _length(optimizer: Any, number: int) -> int:
    """Return the length of a group's flat tensor without the padding at its end.

    Since DeepSpeed 0.19 there may be padding between weights too; it counts.
    """
    weights, offsets = optimizer.round_robin_bit16_meta[number], getattr(optimizer, "round_robin_bit16_offsets", None)
    if offsets is None:
        return sum(each.numel() for each in weights)
    return int(offsets[number][-1] + weights[-1].numel())


class _Stretch(FlatPiece):
    """A flat piece whose tensor has padding at its end, which is not saved."""

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[: self.count]

    def describes(self, tensor: Tensor) -> bool:
        return tensor.shape == self.parameter.shape


class _Counts:
    """An extra state with the counts and the loss scale that the engine has when the running update ends."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.settled = True  # whether the engine has counted the last update already

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self._engine, name) for name in _COUNTS}
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        scale = {name: getattr(scaler, name) for name in _SCALE if hasattr(scaler, name)}
        if not self.settled:
            counts["global_steps"] += 1
            counts["micro_steps"] += 1
            counts["global_samples"] += self._engine.train_batch_size()
        return {"counts": counts, "scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["counts"].items():
            setattr(self._engine, name, value)
        for name, value in state["scale"].items():
            setattr(self._engine.optimizer.loss_scaler, name, value)
