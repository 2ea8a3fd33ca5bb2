"""Gives the tensors of a model their names in a checkpoint. The names are recorded when the optimizer is registered.

The names are those that ``torch.distributed.checkpoint.state_dict`` uses, so that stock torch reads our checkpoints:
the prefixes of wrappers (DistributedDataParallel, FSDP1, ``torch.compile``, activation checkpointing) are removed, and
a tied weight has several names.

Names are looked up by the parameter object. At save time the main thread may be inside a forward pass, where a sharding
library may have swapped what ``named_parameters()`` shows; the objects in ``optimizer.param_groups`` stay the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ttp.errors import CheckpointError, ConfigError

log = logging.getLogger("ttp.adapters.torch")

_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
EXTRA_STATE = "_extra_state"
_LISTED_MAX = 5


def first_of(texts: Collection[str], most: int, separator: str = ", ") -> str:
    """Return the first ``most`` of these names or texts in one line, and how many more there are."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*islice(texts, most), *more])


def parameters_of(*optimizers: Optimizer) -> Iterator[Any]:
    """Yield the parameters of these optimizers, in the order of their param groups."""
    return (parameter for each in optimizers for group in each.param_groups for parameter in group["params"])


class ModelNames:
    """The names of all tensors of a model and its optimizer.

    Args:
        model: the module that contains every parameter of the optimizer; wrapped or not.
        optimizer: its parameters are checked to have names; None: they are not checked.

    Raises:
        ConfigError: a module of the model is scripted, or the optimizer holds parameters that the model lacks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = model
        self.parameters: dict[str, Tensor] = {}
        """The parameter of every name. A tied weight is in it under each of its names."""
        self._buffer_owners: dict[str, tuple[nn.Module, str]] = {}
        self.extra_states: dict[str, nn.Module] = {}
        """The modules that define ``get_extra_state`` and ``set_extra_state``, by the name of their extra state."""
        self._canonical: dict[str, str] = {}
        self._by_identity: dict[int, str] = {}
        self._record()
        if optimizer is not None:
            self._check(optimizer)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The live tensor of every buffer that belongs into a checkpoint (persistent, not ``None``), by name."""
        found = ((name, owner._buffers.get(key)) for name, (owner, key) in self._buffer_owners.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def made_late(self) -> list[str]:
        """Return the names of buffers that the model has now and did not have when this object was made."""
        return sorted(ModelNames(self._model, None)._buffer_owners.keys() - self._buffer_owners.keys())

    def lacking(self) -> list[str]:
        """Return the keys of buffers that no checkpoint has, because they were made in mid-run. Never raises."""
        with contextlib.suppress(Exception):  # a model that cannot be looked at can still be saved
            if late := self.made_late():
                log.warning("not in the checkpoint, as they were made after wrap_optimizer(): %s", ", ".join(late))
            return [f"model.{name}" for name in late]
        return []

    @property
    def of_any_shape(self) -> set[str]:
        """Names of the buffers whose shape training may change; see ``takes_any_shape``."""
        return {name for name, (owner, key) in self._buffer_owners.items() if takes_any_shape(owner, key)}

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))

    def canonical(self, name: str) -> str:
        """Return the name in a checkpoint for a name in ``model.named_parameters()`` or ``model.named_buffers()``."""
        return self._canonical.get(name, name)

    def of(self, parameter: Tensor) -> str:
        """Return the one name under which the optimizer's state of ``parameter`` is kept.

        Raises:
            CheckpointError: the model does not contain that parameter.
        """
        name = self._by_identity.get(id(parameter))
        if name is None:
            self._record()  # the model was changed after registration: layers added, parameters replaced
            name = self._by_identity.get(id(parameter))
        if name is None:
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that model= does not contain: "
                "without a name it cannot be saved. Add it to the model first"
            )
        return name

    def updated_by(self, *optimizers: Optimizer) -> dict[str, Tensor]:
        """Return the parameters of these optimizers, by every name that they have here."""
        owned = {id(parameter) for parameter in parameters_of(*optimizers)}
        return {name: parameter for name, parameter in self.parameters.items() if id(parameter) in owned}

    def replace_buffer(self, name: str, tensor: Tensor) -> None:
        """Replace the buffer ``name`` by ``tensor``."""
        owner, key = self._buffer_owners[name]
        owner._buffers[key] = tensor

    def _record(self) -> None:
        self.parameters.clear()
        self._by_identity.clear()
        for raw, name, owner in walk(self._model):
            if isinstance(owner, torch.jit.ScriptModule):
                raise ConfigError(
                    f"{raw[:-1] or 'the model'} is made by torch.jit.script() or torch.jit.trace(), and ttp cannot "
                    "register hooks with such modules: train the module itself, or compile it with torch.compile()"
                )
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    self.parameters[name + key] = parameter
                    self._by_identity.setdefault(id(parameter), name + key)
                    self._canonical[raw + key] = name + key
            for key in owner._buffers:
                self._canonical[raw + key] = name + key
                if key not in owner._non_persistent_buffers_set:
                    self._buffer_owners[name + key] = (owner, key)
            if type(owner).get_extra_state is not nn.Module.get_extra_state:
                self._canonical[raw + EXTRA_STATE] = name + EXTRA_STATE
                self.extra_states[name + EXTRA_STATE] = owner

    def _check(self, optimizer: Optimizer) -> None:
        unknown = [
            (f"group {number}, position {position}, shape {tuple(parameter.shape)}", parameter)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
            if id(parameter) not in self._by_identity
        ]
        if unknown:
            listed = first_of([place for place, _ in unknown], _LISTED_MAX, "; ")
            bare = any(not isinstance(parameter, nn.Parameter) for _, parameter in unknown)
            raise ConfigError(
                f"the optimizer holds {len(unknown)} parameters that model= does not contain ({listed}): without names "
                "they cannot be saved. Pass the module that owns all of them, for example "
                "nn.ModuleDict({'model': model, 'loss': loss})"
                + (", and alpha = nn.Parameter(...) in place of a plain tensor, as nn.ParameterList([alpha])" * bare)
                + ". If a trainer passes its model (ttp.hf), they are not "
                "in its DistributedDataParallel either, and each rank trains its own: use a loss without weights, or "
                "let the model's forward() compute the loss"
            )


def takes_any_shape(owner: nn.Module, buffer: str) -> bool:
    """Return whether a restored buffer may have another shape than the program's own buffer.

    It may if the program's buffer is None or empty, or if its module has loading code of its own, as torch's observers
    have: their buffers get their size from the data.
    """
    tensor = owner._buffers.get(buffer)
    return tensor is None or tensor.numel() == 0 or loads_itself(owner)


def loads_itself(module: nn.Module) -> bool:
    """Return whether a module has loading code of its own; that of BatchNorm is for another reason and no such code."""
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own and not isinstance(module, _NormBase)


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in ``module.state_dict(keep_vars=True)``, without running any of its hooks."""
    found: dict[str, Tensor] = {}
    for raw, _, owner in walk(module):
        found.update((raw + key, value) for key, value in owner._parameters.items() if value is not None)
        kept = ((k, v) for k, v in owner._buffers.items() if k not in owner._non_persistent_buffers_set)
        found.update((raw + key, value) for key, value in kept if value is not None)
    return found


def walk(module: nn.Module, raw: str = "", name: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module as (prefix of its names in torch, prefix of its names in the checkpoint, module)."""
    yield raw, name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{raw}{key}.", name if _is_wrapped(module, key) else f"{name}{key}.")


def _is_wrapped(module: nn.Module, key: str) -> bool:
    if isinstance(module, DistributedDataParallel):
        return key == "module"
    # Compared by name, because importing torch._dynamo takes seconds; a program with such a module has imported it.
    compiled = type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")
    return key in _WRAPPERS or (compiled and key == "_orig_mod")
