"""Megatron's ZeRO-1 with copies: ``dp // 2`` shards of the optimizer's state, each on two data-parallel ranks.

The class is for programs written for ``mindio_ttp.megatron_ttp.ReplicatedOptimizer``: it replaces Megatron's
``DistributedOptimizer`` and takes the same arguments. Gradients are reduced over the whole data-parallel group
(``DistributedDataParallelConfig.use_distributed_optimizer`` has to be False). The two copies of a shard get the same
gradients and make the same update. Then the ranks of a block send each other the parameters that they updated.
``ttp.adapters.torch.sharding.partition`` determines which rank holds which shard; in a group with an odd number of
ranks the last rank joins the last block.

A rank's update is finished when the ``step()`` of its plain optimizer returns. The exchange after that writes only to
parameters of other shards, so the death of a rank during the exchange leaves no copy torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from ttp.adapters.megatron.optimizers import float16_pairs
from ttp.adapters.megatron.rank_state import streams_now
from ttp.adapters.torch.sharding.gather import block_gather
from ttp.adapters.torch.sharding.partition import ShardPlacement, assign
from ttp.errors import ConfigError

COPIES = 2


class ReplicatedOptimizer(Float16OptimizerWithFloat16Params):
    """A Megatron optimizer for all parameters of a model that keeps the optimizer state of one shard of them.

    Args:
        optimizer: the plain optimizer of all parameters; those of other shards are removed from it.
        config: Megatron's ``OptimizerConfig``.
        grad_scaler: Megatron's scaler, or None.
        init_state_fn: the argument of this name of Megatron's optimizers.
        model_chunks: the trained model chunks, for the names in checkpoints.
        data_parallel_group: ignored; Megatron's whole data-parallel group is used.
        **megatron: further arguments of Megatron's ``DistributedOptimizer``; ignored.

    Raises:
        ConfigError: the data-parallel group has less than two ranks, the model's gradients are reduced to shards, or a
            setting of ``config`` is not supported.
    """

    def __init__(
        self,
        optimizer: Any,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., None],
        model_chunks: Any = None,
        data_parallel_group: Any = None,
        **megatron: Any,
    ) -> None:
        self._refuse(config, model_chunks)
        self.data_parallel_ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._place = dist.get_rank(self.data_parallel_ranks)
        self.placement = ShardPlacement(dist.get_world_size(self.data_parallel_ranks), COPIES)
        self.shard = self.placement.shard_of(self._place)
        groups = [] if optimizer is None else optimizer.param_groups
        self._trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
        everything = list(chain.from_iterable(self._trained))
        numbers = assign([p.numel() for p in everything], [0] * self.placement.shards)
        self._shards: list[list[Tensor]] = [[] for _ in range(self.placement.shards)]
        for parameter, shard in zip(everything, numbers, strict=True):
            self._shards[shard].append(parameter)
        mine = {id(parameter) for parameter in self._shards[self.shard]}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        super().__init__(optimizer, config, grad_scaler, init_state_fn)
        self.names = dict(_named(model_chunks or []))
        self._main = dict(self._pairs())
        ranks = list(dist.get_process_group_ranks(self.data_parallel_ranks))
        self._gather = block_gather(self.placement, self._place, ranks, self.data_parallel_ranks, self._shards)
        self.current_step = 0
        """Number of finished updates, which programs give to ``ttp_end_updating_os``."""
        self.streams: dict[str, Any] = {}
        """Random streams of this rank when the last update was finished."""

    @staticmethod
    def _refuse(config: Any, model_chunks: Any) -> None:
        if any(chunk.ddp_config.use_distributed_optimizer for chunk in model_chunks or []):
            raise ConfigError(
                "ReplicatedOptimizer needs whole gradients on every rank: set use_distributed_optimizer=False in "
                "DistributedDataParallelConfig (the setting of OptimizerConfig may stay as it is)"
            )
        for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather"):
            if getattr(config, name, False):
                raise ConfigError(f"ReplicatedOptimizer does not support OptimizerConfig.{name}: set it to False")

    # ----------------------------------------------------------------------------------------------------- the update

    def increase_step(self) -> None:
        """Count one more update, and remember the random streams. The program calls it after each update."""
        self.current_step += 1
        self.note_streams()

    def note_streams(self) -> None:
        """Copy the random streams: a save runs on another thread, when the next step may already have used them."""
        self.streams = streams_now()

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the model-parallel group: each data-parallel rank has all gradients, so no other ranks are needed."""
        return parallel_state.get_model_parallel_group()

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients of all shards, in the order that an optimizer without shards has."""
        tp = getattr(self, "tp_group", None)
        unshared = (
            p
            for p in chain.from_iterable(self._trained)
            if param_is_not_shared(p) and tensor_parallel.param_is_not_tensor_parallel_duplicate(p, tp)
        )
        return [grad for p in unshared if (grad := self._gradient(p)) is not None]

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        main = self._main.get(parameter)
        if main is not None:
            return main.grad
        grad: Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        if grad is None or not self.grad_scaler:
            return None if grad is None else grad.float()
        return grad.float() * self.grad_scaler.inv_scale

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip the gradients and return their norm.

        A rank without parameters in its shard takes part in computing the norm, because other ranks wait for it.
        """
        if self.get_parameters():
            return float(super().clip_grad_norm(clip_grad))
        group = self.get_grad_stats_parallel_group()
        return float(get_grad_norm_fp32(self.get_main_grads_for_grad_norm(), grad_stats_parallel_group=group))

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        """Unscale the gradients, and return whether any shard has a value that is not finite: then no shard updates."""
        super()._unscale_main_grads_and_check_for_nan()
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=self.data_parallel_ranks)
        return bool(self.found_inf.item() > 0)

    def _copy_main_params_to_model_params(self) -> None:
        super()._copy_main_params_to_model_params()
        self._gather.run()

    # ------------------------------------------------------------------------------------------------- for checkpoints

    @property
    def held(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name, the parameters of this rank's shard, each with the fp32 copy that is updated for it."""
        return {self.names[parameter]: (parameter, main) for parameter, main in self._main.items()}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters of all shards, by name."""
        return {self.names[p]: p for p in chain.from_iterable(self._trained)}

    def sharded_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse to save in Megatron's distributed format.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("ReplicatedOptimizer cannot be saved as a torch_dist checkpoint: use ttp_save_checkpoint")

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.is_stub_optimizer:
            yield from ((parameter, main) for parameter, main, _, _ in float16_pairs(self))


def _named(chunks: Any) -> Iterator[tuple[Tensor, str]]:
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield parameter, f"{number}.{name}"
