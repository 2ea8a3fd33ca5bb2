"""Describes how the training state is spread over ranks, and returns the part of it that a rank writes for a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.loop.unwrap_optimizer import is_sharded, members_of
from ttp.adapters.torch.saving.checkpoint import TensorOrChunks, chunks_of
from ttp.adapters.torch.sharding.data_parallel import ddps_of, not_replicated
from ttp.adapters.torch.sharding.ddp_buckets import Ddp
from ttp.adapters.torch.sharding.dtensor_chunks import Cutter, is_distributed
from ttp.adapters.torch.sharding.exchange import connected, gather_or_refuse
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.core.layout import Layout, Shard
from ttp.errors import ConfigError


@dataclass(frozen=True)
class TrainingObjects:
    """The objects of a job from which its sharding is found.

    Args:
        model: the registered module, wrapped or not.
        optimizer: the registered optimizer.
        names: names of the model's tensors.
        world_size: number of ranks of the job.
        modules: modules that were given as ``extra_state``, such as averages of the weights, by name.
        layout: the layout that the user gave; None: it has to be found.
        shard_of: returns the shard of a parameter in that layout, by its name; None: every rank holds one shard.
        buddy: True if a shard with one copy gets a second one in the memory of another host; then ttp does not warn
            of such shards.
    """

    model: nn.Module
    optimizer: Optimizer
    names: ModelNames
    world_size: int
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    layout: Layout | None = None
    shard_of: Callable[[str], str] | None = None
    buddy: bool = False

    @cached_property
    def cutter(self) -> Cutter:
        """Describes how the parameters are sharded."""
        return Cutter(self.model, self.names)

    @cached_property
    def ddps(self) -> Sequence[Ddp]:
        """The DistributedDataParallel modules that reduce gradients of the model."""
        return ddps_of(self.model)

    @cached_property
    def cut(self) -> bool:
        """Whether a parameter is sharded."""
        return any(self.cutter.cut(name, parameter) for name, parameter in self.names.parameters.items())

    @cached_property
    def reduced(self) -> bool:
        """Whether each DistributedDataParallel is over all ranks, and no parameter is sharded, or left alone."""
        sizes = {len(dist.get_process_group_ranks(ddp.process_group)) for ddp in self.ddps}
        return sizes == {self.world_size} and not self.left_alone and not self.cut

    @cached_property
    def unwrapped(self) -> Collection[str]:
        """The parameters that no DistributedDataParallel has; empty if not ``reduced``: shards are found without it."""
        wrapped = {id(parameter) for ddp in self.ddps for parameter in ddp.parameters()}
        known = self.names.parameters if self.reduced else {}
        return frozenset(name for name, parameter in known.items() if id(parameter) not in wrapped)

    @cached_property
    def left_alone(self) -> Mapping[str, bool]:
        """The unsharded parameters that DistributedDataParallel was told to ignore: name -> whether it is trained."""
        alone = {id(parameter) for parameter in not_replicated(self.ddps)}
        given = self.names.updated_by(self.optimizer)
        return {
            name: parameter.requires_grad and name in given
            for name, parameter in self.names.parameters.items()
            if id(parameter) in alone and not self.cutter.is_cut(name, parameter)
        }


class Sharding:
    """Tells one rank which shards exist, which ranks hold them, and what to write for each. Immutable; thread-safe.

    This class is plain data parallelism, in which every rank holds the whole state; subclasses differ from it.

    Args:
        parts: the objects of the job.
        layout: the replica groups of the job.
    """

    flat_groups = False
    """True if param groups differ between ranks (pipeline stages): then their settings are saved per parameter."""

    def __init__(self, parts: TrainingObjects, layout: Layout) -> None:
        self.layout = layout
        self.stepping: Sequence[Optimizer] = members_of(parts.optimizer)
        """The optimizers whose ``step()`` makes the update."""
        self._names = parts.names

    def parameters_of(self, shard: Shard) -> Collection[str]:
        """Return the canonical names of parameters that this rank writes for ``shard``; all names of tied weights."""
        return self._names.parameters.keys()

    def carries(self, shard: Shard, value: Any) -> bool:
        """Return whether a value that belongs to no parameter (a buffer, an extra state) is written with ``shard``.

        On each rank that holds such a value, at least one shard carries it.
        """
        return True

    def stored(self, owner: str, tensor: Tensor) -> TensorOrChunks:
        """Return what to write for a live tensor, without copying and without communication.

        Args:
            owner: canonical name of the parameter that the tensor is, or for which the optimizer keeps it; empty: none.
            tensor: the live tensor, or a copy of it of the same kind.

        Returns:
            The tensor itself if this rank has the whole tensor; else the chunks of it that this rank has.
        """
        return tensor

    def elsewhere(self) -> Collection[str]:
        """Return the names of parameters and buffers that only other ranks have, such as other pipeline stages."""
        return ()


def sharding_of(parts: TrainingObjects) -> Sharding:
    """Find how the state of this job is sharded. A collective call.

    Raises:
        ConfigError: the sharding cannot be found, or cannot be saved; the text says what to do.
    """
    if is_sharded(parts.optimizer):
        from ttp.adapters.torch.sharding.zero_sharding import ZeroSharding

        return ZeroSharding(parts)
    several = parts.layout is not None and len(parts.layout.groups) > 1
    if connected(parts.world_size) and (several or not _all_together(parts)):
        from ttp.adapters.torch.sharding.discovery import discover

        return discover(parts)
    if parts.cut or several:
        raise ConfigError(
            f"to find which of the {parts.world_size} ranks hold the same shards, they have to communicate: call "
            "init_process_group() before wrap_optimizer()"
        )
    return Sharding(parts, parts.layout or Layout.data_parallel(parts.world_size))


def _all_together(parts: TrainingObjects) -> bool:
    """Return whether every rank holds the same state, because all gradients are reduced over all ranks by DDP.

    A collective call. All ranks get the same answer: each has to take part in what follows if one has to.
    """
    own = repr([(name, tuple(parts.names.parameters[name].shape)) for name in sorted(parts.unwrapped)])
    alike = parts.reduced or (parts.world_size == 1 and not parts.cut)
    answers = set(gather_or_refuse((own if alike else "").encode))
    return len(answers) == 1 and b"" not in answers


# ---------------------------------------------------------------------------------------------------------- one shard


def state_of(sharding: Sharding, shard: Shard, state: Mapping[str, Any], names: ModelNames) -> dict[str, Any]:
    """Return the part of a state that this rank writes for ``shard``.

    Args:
        sharding: the sharding of the job.
        shard: a shard that this rank holds.
        state: the state of this rank, as ``checkpoint_state`` returns it.
        names: names of the model's tensors.
    """
    wanted, parameters = set(sharding.parameters_of(shard)), names.parameters.keys()
    part = dict(state)
    part["model"] = {
        name: sharding.stored(name, value) if isinstance(value, Tensor) else value
        for name, value in state["model"].items()
        if (name in wanted if name in parameters else sharding.carries(shard, value))
    }
    absent = {name for name in wanted if chunks_of(part["model"].get(name)) == []}
    groups = state["optim"]["param_groups"]
    part["optim"] = {
        "state": {
            name: _converted(sharding, name, _cut(values) if name in absent else values)
            for name, values in state["optim"]["state"].items()
            if name in wanted or name not in parameters
        },
        "param_groups": _flat(groups, wanted) if sharding.flat_groups else groups,
    }
    if "extra" in state:
        part["extra"] = {name: _carried(sharding, shard, values) for name, values in state["extra"].items()}
    return part


def _cut(values: Any) -> dict[str, Any]:
    """Return what may be written of the state for a parameter that has no element here: its step counts stay at 0."""
    return {key: value for key, value in values.items() if is_distributed(value)} if isinstance(values, dict) else {}


def _flat(groups: Sequence[Mapping[str, Any]], wanted: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each wanted parameter by name, as torch's ``flatten_optimizer_state_dict`` does."""
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
        if name in wanted
    }


def _carried(sharding: Sharding, shard: Shard, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _converted(sharding, "", v) for key, v in values.items() if sharding.carries(shard, v)}


def _converted(sharding: Sharding, owner: str, value: Any) -> Any:
    """Return ``value`` with each tensor in its mappings and lists replaced by ``sharding.stored`` of it."""
    if isinstance(value, Tensor):
        return sharding.stored(owner, value)
    if isinstance(value, Mapping):
        return {key: _converted(sharding, owner, item) for key, item in value.items()}
    if type(value) is list:
        return [_converted(sharding, owner, item) for item in value]
    return value
