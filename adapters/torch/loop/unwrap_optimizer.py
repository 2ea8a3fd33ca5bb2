"""Brings the optimizers and schedulers that ``wrap_optimizer`` is given into one form.

They may be single objects or lists, inside of containers, or wrappers around others: then it is found out which
optimizers keep the state, and whose steps make the update.

Several optimizers are presented as one, as torch's ``get_optimizer_state_dict(model, [one, two])`` does: their states
are merged by parameter, and their param groups are concatenated. So code that reads or writes checkpoints handles one
optimizer only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ttp.adapters.torch.sharding.names import ModelNames, first_of, parameters_of
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer
from ttp.errors import ConfigError, UsageError

log = logging.getLogger("ttp.adapters.torch")

_LISTED_MAX = 3


def listed(one_or_several: Any) -> list[Any]:
    """Return as a list an argument that may be one object, None, or a list."""
    if isinstance(one_or_several, (list, tuple)):
        return [each for each in one_or_several if each is not None]
    return [] if one_or_several is None else [one_or_several]


def distinct(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the given optimizers as a list without repetitions.

    Raises:
        UsageError: no optimizer was given.
        ConfigError: an optimizer that shards its state was given together with others.
    """
    given = list({id(each): each for each in listed(optimizer)}.values())
    if not given:
        raise UsageError("wrap_optimizer() was given no optimizer: give it those that update the model, one or a list")
    owners = owners_in(given)
    sharded = next((each for each in owners if is_sharded(each)), None)
    if sharded is not None and len(owners) > 1:
        raise ConfigError(
            f"{type(sharded).__name__} shards its state over the ranks and cannot be protected together with other "
            "optimizers: give all parameters to it, or use optimizers that do not shard their state"
        )
    return given


def names_of(takers: Sequence[Sequence[Optimizer]]) -> list[str]:
    """Return a name for each optimizer, for messages."""
    return [f"optimizer {number} ({type(taker[0]).__name__})" for number, taker in enumerate(takers, 1)]


def owners_in(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that own the state: those inside of wrappers, in the order of the wrappers."""
    return [owner for each in optimizers for owner in owners_of(each)]


def schedulers_in(given: Any) -> list[Any]:
    """Return a list of schedulers with containers (torchtitan's) replaced by their members, which are saved singly."""
    found: list[Any] = []
    for each in listed(given):
        inside = getattr(each, "schedulers", None)
        unpack = isinstance(inside, (list, tuple)) and inside and not isinstance(each, LRScheduler)
        found += schedulers_in(list(inside)) if unpack and inside is not None else [each]
    return found


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of a sharding one, which makes the update and keeps the state; others unchanged."""
    if isinstance(optimizer, ReplicatedOptimizer):
        return optimizer.inner
    if is_torch_zero(optimizer):
        inner: Optimizer = getattr(optimizer, "optim", optimizer)
        return inner
    return optimizer


def is_sharded(optimizer: Optimizer) -> bool:
    """Return whether the optimizer shards its state over ranks and exchanges the weights after its step."""
    return isinstance(optimizer, ReplicatedOptimizer) or is_torch_zero(optimizer)


def is_torch_zero(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is torch's ``ZeroRedundancyOptimizer``, without importing that class's module."""
    library = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return library is not None and isinstance(optimizer, library.ZeroRedundancyOptimizer)


def wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in the attributes of ``optimizer`` that update its parameters; empty: it does so itself."""
    if is_sharded(optimizer):
        return []
    found = (each for each in held_by(optimizer) if isinstance(each, Optimizer) and each is not optimizer)
    inside = list({id(each): each for each in found}.values())
    owned = [id(p) for each in inside for p in parameters_of(each)]
    shown = {id(p) for p in parameters_of(optimizer)}
    return inside if inside and shown <= set(owned) else []


def owners_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that keep the state: those inside of wrappers and containers, or ``optimizer`` itself."""
    inside = wrapped_by(optimizer)
    return [owner for each in inside for owner in owners_of(each)] if inside else [optimizer]


def wrappers_of(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the wrappers and containers around the optimizers that keep the state, the outermost first."""
    inside = wrapped_by(optimizer)
    if inside:
        yield optimizer
    for each in inside:
        yield from wrappers_of(each)


def turn_takers(optimizer: Optimizer) -> list[list[Optimizer]]:
    """Return, for each step that the loop makes, the optimizer that makes it and the optimizers inside of that one.

    A wrapper whose step fires hooks takes one turn together with all optimizers inside of it. If the step of a wrapper
    fires none (the wrapper does not call ``Optimizer.__init__``), each optimizer inside of it takes a turn.

    Raises:
        UsageError: the step of an optimizer that wraps no other fires no hooks.
    """
    inside = wrapped_by(optimizer)
    if not inside and not is_sharded(optimizer) and not fires_hooks(optimizer):
        kind = type(optimizer)
        raise UsageError(
            f"{kind.__module__}.{kind.__qualname__} does not call torch.optim.Optimizer.__init__(), so its steps call "
            "no hooks and ttp cannot notice them: call super().__init__(params, defaults) in its constructor"
        )
    if not inside or fires_hooks(optimizer):
        deeper = [each for one in inside for taker in turn_takers(one) for each in taker]
        return [[optimizer, *deeper]]
    return [taker for each in inside for taker in turn_takers(each)]


def hides_its_step(optimizer: Optimizer) -> str:
    """Return the class name of a wrapper whose step fires no hooks and may change the weights; empty: there is none.

    Accelerate's wrapper does not count: it only passes calls on.
    """
    for wrapper in wrappers_of(optimizer):
        passes_on = any(kind.__name__ == "AcceleratedOptimizer" for kind in type(wrapper).__mro__)
        if not passes_on and not fires_hooks(wrapper):
            return type(wrapper).__name__
        if not passes_on:
            break  # the hooks of this wrapper cover its step and all steps inside of it
    return ""


def fires_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch calls step hooks that are registered on ``optimizer``."""
    step: Any = type(optimizer).step
    return bool(getattr(step, "hooked", False)) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def held_by(thing: Any) -> Iterator[Any]:
    """Yield the values of the attributes of an object, and what is in lists, tuples and dicts among them.

    Also what is in tuples inside of these: torchrec's containers have pairs of a name and an optimizer.
    """
    for value in list(vars(thing).values()):
        yield value
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for each in inside:
            yield each
            if isinstance(each, tuple):
                yield from each


# ----------------------------------------------------------------------------------------------- several as one


class CombinedOptimizer(Optimizer):
    """A view of several optimizers as one. It has no state, no param groups and no step of its own.

    Args:
        members: the optimizers; no two of them share a parameter.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # Not ``Optimizer.__init__``: it would copy the param groups and register hooks.
        self.members = tuple(members)
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # in Optimizer an attribute, here a view
        """The live param groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override] # the same
        """The live state of all members. A new entry goes to the member that updates the parameter."""
        return _States(self.members)


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers as one live mapping."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members
        self._owners = {id(p): member for member in members for p in parameters_of(member)}

    def _of(self, key: Any) -> MutableMapping[Any, Any]:
        if isinstance(key, Tensor):
            return self._owners.get(id(key), self._members[0]).state
        return next((member.state for member in self._members if key in member.state), self._members[0].state)

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for member in self._members:
            yield from list(member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


def combined(members: Sequence[Optimizer]) -> Optimizer:
    """Return all ``members`` as one optimizer; a single member is returned itself."""
    return members[0] if len(members) == 1 else CombinedOptimizer(members)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that ``combined`` was given, or the optimizer itself if it is not a combined one."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def refuse_shared(members: Sequence[Optimizer], names: ModelNames) -> None:
    """Refuse optimizers that share a parameter, because a checkpoint keeps optimizer state by parameter.

    Raises:
        ConfigError: two of ``members`` update the same parameter.
    """
    owners: dict[int, int] = {}
    shared: list[str] = []
    for number, member in enumerate(members):
        for parameter in parameters_of(member):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                shared.append(f"{names.of(parameter)} is in optimizers {other + 1} and {number + 1}")
    if shared:
        raise ConfigError(
            f"{first_of(shared, _LISTED_MAX, '; ')}: a checkpoint keeps the "
            "state of an optimizer by parameter, so each parameter may be in one optimizer only. Split the parameters "
            "between them. To go over from one optimizer to the other in mid-run, make two trainings of it, each with "
            "a save_dir of its own"
        )


def tell_forgotten(optimizer: Optimizer, names: ModelNames) -> None:
    """Log the names of parameters that require gradients but that ``optimizer`` does not update."""
    updated = names.updated_by(optimizer)
    left = [name for name, p in names.parameters.items() if p.requires_grad and name not in updated]
    if left:
        log.warning(
            "%d parameters require gradients but are in no optimizer that wrap_optimizer() was given (%s). Their "
            "weights are saved, but no state of an optimizer that updates them: give wrap_optimizer() all optimizers. "
            "Weights that the program itself writes, from fp32 master weights or as a target network, need none",
            len(left),
            first_of(left, _LISTED_MAX),
        )
