"""Keeps the state of a rank that stays in its process after an incident, and hands it over to new objects.

``train()`` is called again and makes a new model and a new optimizer. The new optimizer takes the old optimizer's
tensors; the values of the old parameters are copied into the new ones. Everything is compared before anything is
modified. ``ttp.core.rank.kept_state`` decides whether a state may be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.buffers import overlaps
from ttp.adapters.torch.loop.unwrap_optimizer import is_sharded, unwrap_optimizer
from ttp.adapters.torch.saving.flatten_state import PLAIN
from ttp.adapters.torch.saving.piece_index import IndexEntry
from ttp.adapters.torch.saving.state import optimizer_kind
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed, local
from ttp.adapters.torch.sharding.names import ModelNames, parameters_of
from ttp.adapters.torch.tensor_memory import is_plain
from ttp.core.rank.kept_state import Origin


class UnlikeError(Exception):
    """A state cannot be kept, or does not fit the new objects. Nothing was modified: read the checkpoint instead."""


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor of the optimizer's state.

    Args:
        tensor: the part of the tensor that is in the memory of this rank.
        cut: True if it is a distributed tensor, sharded as its parameter is.
    """

    tensor: Tensor
    cut: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The state that a rank holds of the model and the optimizer, as plain memory.

    Args:
        origin: the commit to which the state belongs.
        kind: the class of the optimizer.
        parameters: the parameters by name; the names of a tied parameter have the same tensor.
        optimizer: the optimizer's state: name of a parameter -> key -> a ``KeptTensor`` or a plain value.
    """

    origin: Origin
    kind: str
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, each once. The order is the same on ranks with the same names."""
        entries = (entry for values in self.optimizer.values() for entry in values.values())
        held = (entry.tensor for entry in entries if isinstance(entry, KeptTensor))
        return list({id(tensor): tensor for tensor in (*self.parameters.values(), *held)}.values())

    @property
    def size(self) -> int:
        """The size of the state in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors())


def keep(origin: Origin, names: ModelNames, optimizer: Optimizer) -> Kept:
    """Return references to the state of this rank.

    Args:
        origin: the commit to which the state belongs.
        names: names of the model's tensors.
        optimizer: the registered optimizer.

    Raises:
        UnlikeError: the state is of a kind that cannot be handed over; the text says why.
    """
    if is_sharded(optimizer):
        raise UnlikeError(f"{type(optimizer).__name__} shards its state and exchanges updated weights")
    if names.extra_states or names.of_any_shape:
        raise UnlikeError("a module has an extra state, or buffers that may take any shape")
    tensors = {id(tensor): local(tensor).detach() for tensor in names.parameters.values()}
    parameters = {name: tensors[id(tensor)] for name, tensor in names.parameters.items()}
    state: dict[str, dict[str, Any]] = {}
    for owner, values in list(unwrap_optimizer(optimizer).state.items()):
        if not isinstance(owner, Tensor) or not isinstance(values, Mapping):
            raise UnlikeError("the optimizer keeps state that belongs to no parameter")
        state[names.of(owner)] = {str(key): _held(value, owner) for key, value in values.items()}
        if any(not isinstance(key, str) for key in values):
            raise UnlikeError("the optimizer's state has keys that are not strings")
    kept = Kept(origin, optimizer_kind(optimizer), parameters, state)
    _refuse_shared(kept.tensors())
    return kept


def _held(value: Any, owner: Any) -> Any:
    if isinstance(value, Tensor):
        cut = is_distributed(value)
        if cut and not (is_distributed(owner) and _cut(value) == _cut(owner)):  # ``hand_over`` cuts it as the parameter
            raise UnlikeError("the optimizer keeps a tensor that is distributed in another way than its parameter")
        return KeptTensor(local(value).detach(), cut)
    if not isinstance(value, PLAIN):
        raise UnlikeError(f"the optimizer's state has a {type(value).__name__}: not a tensor, number, string or None")
    return value


def _cut(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


def _refuse_shared(tensors: Sequence[Tensor]) -> None:
    seen: set[int] = set()
    for tensor in tensors:
        if not is_plain(tensor) or overlaps(tensor):
            raise UnlikeError("a tensor is not plain and dense")
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen and tensor.numel():
            raise UnlikeError("two tensors share their memory")
        seen.add(memory)


_modes: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def begin_in_first_mode(model: nn.Module, again: bool) -> None:
    """Put modules that the program has made outside of ``train()`` into the mode in which they were first registered.

    A new process would begin in that mode; the failure may have come in an evaluation, after ``model.eval()``.

    Args:
        model: the model that is being registered.
        again: whether this process has gone on after a failure, and calls ``train()`` once more.
    """
    for module in model.modules():
        if again and module in _modes:
            module.training = _modes[module]
        _modes[module] = module.training


# --------------------------------------------------------------------------------------------------------- handing over


def hand_over(kept: Kept, names: ModelNames, optimizer: Optimizer, saved: Sequence[IndexEntry]) -> None:
    """Put a kept state into a new model and optimizer.

    Args:
        kept: the state of this rank, or of another rank that holds the same shards.
        names: names of the new model.
        optimizer: the new registered optimizer.
        saved: the entries of the checkpoint about the optimizer's state.

    Raises:
        UnlikeError: the new objects differ from the old ones. Nothing has been modified.
    """
    owners = {names.of(p): p for p in parameters_of(optimizer)}
    _compare(kept, names, optimizer, owners, saved)
    state = {
        name: {key: _given(value, owners[name]) for key, value in kept.optimizer[name].items()}
        for name in owners
        if name in kept.optimizer
    }
    with torch.no_grad():
        for name, parameter in names.parameters.items():
            _give(parameter, kept.parameters[name])
    live: Any = unwrap_optimizer(optimizer).state
    live.clear()
    for name, values in state.items():
        live[owners[name]] = values


def _compare(
    kept: Kept, names: ModelNames, optimizer: Optimizer, owners: Mapping[str, Tensor], saved: Sequence[IndexEntry]
) -> None:
    if kept.kind != optimizer_kind(optimizer) or is_sharded(optimizer):
        raise UnlikeError(f"the optimizer was {kept.kind}")
    here = {name: _form(local(tensor)) for name, tensor in names.parameters.items()}
    there = {name: _form(tensor) for name, tensor in kept.parameters.items()}
    if here != there:
        differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise UnlikeError(f"{', '.join(differing[:4])} had another shape or dtype, or was not there")
    if _ties(names.parameters) != _ties(kept.parameters):
        raise UnlikeError("other parameters were tied to each other")
    if names.extra_states or names.of_any_shape:
        raise UnlikeError("a module has an extra state, or buffers that may take any shape")
    mine = {(name, key) for name, values in kept.optimizer.items() for key in values}
    theirs = {(str(item.path[2]), str(item.path[3])) for item in saved if str(item.path[2]) in owners}
    if mine != theirs or not kept.optimizer.keys() <= owners.keys():
        raise UnlikeError("the optimizer kept other entries than the checkpoint has")


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of its tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout


def _given(value: Any, parameter: Any) -> Any:
    if not isinstance(value, KeptTensor):
        return value
    if not value.cut:
        return value.tensor
    if not is_distributed(parameter):
        raise UnlikeError("a parameter is no longer distributed")
    from torch.distributed.tensor import DTensor

    whole: Any = DTensor
    mesh, how = parameter.device_mesh, parameter.placements
    return whole.from_local(value.tensor, mesh, how, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _give(parameter: Tensor, old: Tensor) -> None:
    """Copy the old values into the parameter. Its memory is not replaced: a ``state_dict()`` may refer to it."""
    here = local(parameter)
    if here.data_ptr() != old.data_ptr() or here.stride() != old.stride():
        here.copy_(old)
