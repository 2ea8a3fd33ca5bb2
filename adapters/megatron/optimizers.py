"""Finds what the Megatron optimizers of a rank update: which range of which parameter, through which fp32 copy.

Every ``MegatronOptimizer`` wraps a plain optimizer (Apex, Transformer Engine, torch) that knows nothing of Megatron.
The plain optimizer may update the model's parameter itself (fp32), an fp32 copy of the whole parameter (fp16, bf16), or
an fp32 copy of the range of the parameter that this rank owns (distributed optimizer). A model with experts has several
plain optimizers, whose parameters are replicated over different groups of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.megatron.geometry import CheckpointBox, Described, Geometry
from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Holding:
    """The range of one parameter that this rank updates.

    Args:
        described: the model's parameter.
        main: the tensor that the plain optimizer updates and uses as key of its state: the parameter, or the fp32 copy
            of the range.
        begin: first position of the range, in elements of the parameter's memory.
        end: position after the last element of the range.
        parts: the boxes of the range in a checkpoint.
    """

    described: Described
    main: Tensor
    begin: int
    end: int
    parts: tuple[CheckpointBox, ...]


@dataclass(frozen=True, slots=True)
class Inner:
    """One plain optimizer of this rank.

    Args:
        megatron: the Megatron optimizer that wraps it.
        optimizer: the plain optimizer, whose ``step()`` is the update.
        kind: ``dense`` or ``expert``.
        main_key: Megatron's name of the fp32 copy in a checkpoint; empty: there is no copy besides the parameter.
        holdings: the ranges of parameters that it updates.
        part: number, from 0, of this rank's range among the ``parts`` equal ranges of every buffer.
        parts: number of these ranges; 1 unless the state is distributed.
        fixed: tensors that no optimizer updates (frozen parameters, buffers) and that this rank writes in addition.
    """

    megatron: Any
    optimizer: Optimizer
    kind: str
    main_key: str
    holdings: tuple[Holding, ...]
    part: int
    parts: int
    fixed: tuple[Described, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether this rank has nothing to write, because its range is padding only."""
        return not (self.holdings or self.fixed)


def inner_optimizers(optimizer: Any, geometry: Geometry) -> list[Inner]:
    """Return the plain optimizers that ``optimizer`` wraps, in the order of their steps, without stubs.

    The first one also gets the tensors that are not trained, divided among the ranks over which its state is
    distributed.

    Raises:
        ConfigError: an optimizer is of a kind that cannot be saved, or this rank has no plain optimizer.
    """
    inners = [_inner(each, geometry) for each in unchained(optimizer) if each.optimizer is not None]
    if not inners:
        raise ConfigError("this rank trains no parameter, so ttp cannot protect it: train at least one on each rank")
    return [replace(inners[0], fixed=_fixed(inners, geometry)), *inners[1:]]


def _fixed(inners: Sequence[Inner], geometry: Geometry) -> tuple[Described, ...]:
    """Return the tensors that no optimizer updates and that this rank writes with its first plain optimizer."""
    updated = {id(holding.described.tensor) for inner in inners for holding in inner.holdings}
    for inner in inners:  # the buffers of a distributed optimizer also hold what other ranks update
        updated |= {id(parameter) for buffer in getattr(inner.megatron, "buffers", ()) for parameter in buffer.params}
    fixed = [d for key, d in geometry.tensors.items() if key not in updated]
    return tuple(d for number, d in enumerate(fixed) if d.first and _is_written(number, d, inners[0]))


def _is_written(number: int, described: Described, first: Inner) -> bool:
    """Return whether this rank writes the tensor with this number, of those that no optimizer updates."""
    part, parts = first.part, first.parts
    if parts > 1 and not getattr(described.tensor, "allreduce", True):  # so Megatron marks experts of some ranks only
        from megatron.core import parallel_state as state

        partial = {"partial_expert_data_parallel": True}
        part = state.get_expert_data_parallel_rank(**partial)
        parts = state.get_expert_data_parallel_world_size(**partial)
    return number % parts == part


def unchained(optimizer: Any) -> Iterator[Any]:
    """Yield the Megatron optimizers in a chain, or the optimizer itself if it is no chain.

    Raises:
        ConfigError: a layer-wise distributed optimizer cannot be protected.
    """
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":
        raise ConfigError(
            f"ttp cannot protect a layer-wise distributed optimizer: use --optimizer muon, not dist_muon; {_KNOWN}"
        )
    if hasattr(optimizer, "chained_optimizers"):
        for each in optimizer.chained_optimizers:
            yield from unchained(each)
    else:
        yield optimizer


_Pair = tuple[Tensor, Tensor, int, int]
"""A parameter, the tensor that the plain optimizer updates for it, and begin and end of the range in elements."""


def _inner(megatron: Any, geometry: Geometry) -> Inner:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    part, parts = 0, 1
    pairs: Iterable[_Pair]
    if isinstance(megatron, DistributedOptimizer):
        main_key, pairs = "param", _distributed(megatron)
        part, parts = megatron.data_parallel_group.rank(), megatron.data_parallel_group.size()
    elif isinstance(megatron, Float16OptimizerWithFloat16Params):
        main_key, pairs = "fp32_param", float16_pairs(megatron)
    elif isinstance(megatron, FP32Optimizer):
        main_key, pairs = "", [(p, p, 0, p.numel()) for g in megatron.optimizer.param_groups for p in g["params"]]
    else:
        raise ConfigError(f"ttp cannot protect the optimizer class {type(megatron).__qualname__}; {_KNOWN}")
    holdings = [_holding(geometry, *pair) for pair in pairs]
    groups = megatron.optimizer.param_groups
    expert = bool(groups) and all(group.get("is_expert_parallel", False) for group in groups)
    return Inner(megatron, megatron.optimizer, "expert" if expert else "dense", main_key, tuple(holdings), part, parts)


_KNOWN = "it protects DistributedOptimizer, Float16OptimizerWithFloat16Params and FP32Optimizer, also chained"


def refuse_unknown(megatron: Any) -> None:
    """Check the settings of a Megatron optimizer. Call it before the model is described, which may be impossible.

    Raises:
        ConfigError: its state is not where ttp looks for it.
    """
    config = megatron.config
    refused = {
        "use_precision_aware_optimizer": "the fused optimizer keeps the fp32 weights where ttp cannot read them",
        "optimizer_cpu_offload": "the optimizer's state moves between host and device during the update",
    }
    for name, why in refused.items():
        if getattr(config, name, False):
            raise ConfigError(f"ttp cannot protect a job with OptimizerConfig.{name}: {why}. Set it to False")
    if getattr(getattr(megatron, "ddp_config", None), "use_megatron_fsdp", False):
        raise ConfigError(f"ttp cannot protect Megatron-FSDP: leave --use-megatron-fsdp out; {_KNOWN}")


def _holding(geometry: Geometry, parameter: Tensor, main: Tensor, begin: int, end: int) -> Holding:
    described = geometry.tensors.get(id(parameter))
    if described is None:
        raise ConfigError(
            f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that the model does not contain: "
            "give protect() the model chunks that the optimizer was made from"
        )
    return Holding(described, main, begin, end, described.parts(begin, end))


def _distributed(megatron: Any) -> Iterator[_Pair]:
    # Megatron's own index of param groups is wrong if a group mixes dtypes, so these lists are used.
    halves: Sequence[tuple[Any, Any]] = (
        (megatron.model_float16_groups, megatron.shard_fp32_from_float16_groups),
        (megatron.model_fp32_groups, megatron.shard_fp32_groups),
    )
    for parameters, mains in halves:
        for parameter, main in zip(chain(*parameters), chain(*mains), strict=True):
            owned = megatron._get_model_param_range_map(parameter)["param"]
            yield parameter, main, owned.start, owned.end


def float16_pairs(megatron: Any) -> Iterator[_Pair]:
    """Yield the parameters of a ``Float16OptimizerWithFloat16Params``; those in fp32 are their own copies."""
    for parameter, main in zip(chain(*megatron.float16_groups), chain(*megatron.fp32_from_float16_groups), strict=True):
        yield parameter, main, 0, parameter.numel()
    for parameter in chain(*megatron.fp32_from_fp32_groups):
        yield parameter, parameter, 0, parameter.numel()


def with_counts(optimizers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved optimizers (``class``, ``groups``, ``step``) with one count of updates for each class.

    A fused optimizer does not count updates in a param group without parameters on its rank: the count is missing
    there, or is the one from before a restart. The same holds for an optimizer without parameters on this rank.
    """
    found = []
    for each in optimizers:
        alike = [other for other in optimizers if other.get("class") == each.get("class")]
        count = _latest(group.get("step") for other in alike for group in other["groups"])
        groups = [dict(group) if count is None else {**group, "step": count} for group in each["groups"]]
        found.append({**each, "groups": groups, "step": _latest(other["step"] for other in alike)})
    return found


def _latest(counts: Iterable[Any]) -> Any:
    return max((count for count in counts if count is not None), default=None)
