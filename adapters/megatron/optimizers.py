"""What Megatron's optimizers of a rank update: which stretch of which parameter, through which fp32 copy.

Below every ``MegatronOptimizer`` there is a plain optimizer (Apex, Transformer Engine, torch) that knows nothing of the
rest. What it updates may be the model's parameter itself (fp32), an fp32 copy of all of it (fp16, bf16), or of the
stretch of it that falls to this rank (distributed optimizer). A model with experts has several, whose parameters are
replicated over different groups of ranks.
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
    """What of one parameter this rank updates.

    Args:
        described: the model's parameter.
        main: what the inner optimizer updates and keeps its state by: the parameter, or the fp32 copy of the stretch.
        begin: of the stretch, in elements of the parameter's memory.
        end: behind its last element.
        parts: of the stretch in a checkpoint.
    """

    described: Described
    main: Tensor
    begin: int
    end: int
    parts: tuple[CheckpointBox, ...]


@dataclass(frozen=True, slots=True)
class Inner:
    """One plain optimizer.

    Args:
        megatron: the optimizer of Megatron around it.
        optimizer: the plain one, whose ``step()`` is the update.
        kind: ``dense`` or ``expert``.
        main_key: what Megatron calls the fp32 copy in a checkpoint; empty: there is none beside the parameter.
        holdings: of its parameters.
        part: which of ``parts`` equal stretches of every buffer is this rank's.
        parts: 1 unless the state is distributed.
        fixed: what no optimizer updates (frozen parameters, buffers) and this rank writes beside the holdings.
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
        """Whether there is nothing to write: all that fell to this rank is padding."""
        return not (self.holdings or self.fixed)

    @property
    def expert(self) -> bool:
        """Whether its parameters are experts', which other ranks replicate than the rest of the model."""
        return self.kind == "expert"


def inner_optimizers(optimizer: Any, geometry: Geometry) -> list[Inner]:
    """The plain optimizers below ``optimizer``, in the order in which they step; stubs without parameters left out.

    The first also gets what is not trained, dealt out to the ranks over which its state is distributed.

    Raises:
        ConfigError: one is of a kind that cannot be saved, or there is none on this rank.
    """
    inners = [_inner(each, geometry) for each in unchained(optimizer) if each.optimizer is not None]
    if not inners:
        raise ConfigError("a rank without parameters that are trained cannot be protected: train at least one of them")
    return [replace(inners[0], fixed=_dealt(inners, geometry)), *inners[1:]]


def _dealt(inners: Sequence[Inner], geometry: Geometry) -> tuple[Described, ...]:
    updated = {id(holding.described.tensor) for inner in inners for holding in inner.holdings}
    # What is trained and not updated here lies in the stretches of other ranks.
    fixed = [d for key, d in geometry.tensors.items() if key not in updated and not d.tensor.requires_grad]
    first = inners[0]
    return tuple(d for number, d in enumerate(fixed) if d.first and number % first.parts == first.part)


def unchained(optimizer: Any) -> Iterator[Any]:
    """The Megatron optimizers that are no chain of others."""
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":
        raise ConfigError(f"a layer-wise distributed optimizer cannot be protected; {_KNOWN}")
    if hasattr(optimizer, "chained_optimizers"):
        for each in optimizer.chained_optimizers:
            yield from unchained(each)
    else:
        yield optimizer


_Pair = tuple[Tensor, Tensor, int, int]
"""A parameter, what is updated for it, and the stretch."""


def _inner(megatron: Any, geometry: Geometry) -> Inner:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    _refuse_unknown(megatron)
    part, parts = 0, 1
    pairs: Iterable[_Pair]
    if isinstance(megatron, DistributedOptimizer):
        main_key, pairs = "param", _distributed(megatron)
        part, parts = megatron.data_parallel_group.rank(), megatron.data_parallel_group.size()
    elif isinstance(megatron, Float16OptimizerWithFloat16Params):
        main_key, pairs = "fp32_param", _float16(megatron)
    elif isinstance(megatron, FP32Optimizer):
        main_key, pairs = "", [(p, p, 0, p.numel()) for g in megatron.optimizer.param_groups for p in g["params"]]
    else:
        raise ConfigError(f"ttp does not know {type(megatron).__qualname__} of Megatron; {_KNOWN}")
    holdings = [_holding(geometry, *pair) for pair in pairs]
    groups = megatron.optimizer.param_groups
    expert = bool(groups) and all(group.get("is_expert_parallel", False) for group in groups)
    return Inner(megatron, megatron.optimizer, "expert" if expert else "dense", main_key, tuple(holdings), part, parts)


_KNOWN = "it saves DistributedOptimizer, Float16OptimizerWithFloat16Params and FP32Optimizer, also chained"


def _refuse_unknown(megatron: Any) -> None:
    config = megatron.config
    refused = {
        "use_precision_aware_optimizer": "its fp32 weights are inside of the fused optimizer",
        "optimizer_cpu_offload": "its state moves between host and device during the update",
    }
    for name, why in refused.items():
        if getattr(config, name, False):
            raise ConfigError(f"OptimizerConfig.{name} cannot be protected: {why}")
    if getattr(getattr(megatron, "ddp_config", None), "use_megatron_fsdp", False):
        raise ConfigError(f"Megatron-FSDP cannot be protected; {_KNOWN}")


def _holding(geometry: Geometry, parameter: Tensor, main: Tensor, begin: int, end: int) -> Holding:
    described = geometry.tensors.get(id(parameter))
    if described is None:
        raise ConfigError(
            f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that the model does not contain: "
            "give protect() the model chunks that the optimizer was made of"
        )
    return Holding(described, main, begin, end, described.parts(begin, end))


def _distributed(megatron: Any) -> Iterator[_Pair]:
    # By these lists and not by Megatron's index of param groups, which is wrong where a group mixes dtypes.
    halves: Sequence[tuple[Any, Any]] = (
        (megatron.model_float16_groups, megatron.shard_fp32_from_float16_groups),
        (megatron.model_fp32_groups, megatron.shard_fp32_groups),
    )
    for parameters, mains in halves:
        for parameter, main in zip(chain(*parameters), chain(*mains), strict=True):
            stretch = megatron._get_model_param_range_map(parameter)["param"]
            yield parameter, main, stretch.start, stretch.end


def _float16(megatron: Any) -> Iterator[_Pair]:
    for parameter, main in zip(chain(*megatron.float16_groups), chain(*megatron.fp32_from_float16_groups), strict=True):
        yield parameter, main, 0, parameter.numel()
    for parameter in chain(*megatron.fp32_from_fp32_groups):
        yield parameter, parameter, 0, parameter.numel()


def with_counts(optimizers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved optimizers (``groups``, ``step``) with one count of updates in all param groups, as Megatron keeps it.

    A fused optimizer does not count in a group of which nothing is on its rank; what such a group has is missing, or
    from before a restart. Where nothing of an optimizer is here, its count is that of those it is stepped with.
    """
    counts = [_latest(group.get("step") for group in each["groups"]) for each in optimizers]
    steps = [each["step"] for each in optimizers]
    found = []
    for each, own, step in zip(optimizers, counts, steps, strict=True):
        count = _latest(counts) if own is None else own
        groups = [dict(group) if count is None else {**group, "step": count} for group in each["groups"]]
        found.append({**each, "groups": groups, "step": _latest(steps) if step is None else step})
    return found


def _latest(counts: Iterable[Any]) -> Any:
    return max((count for count in counts if count is not None), default=None)
