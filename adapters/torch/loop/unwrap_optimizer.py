"""Brings the optimizers and schedulers that ``wrap_optimizer`` is given into one form.

They may be single objects or lists, inside of containers, or wrappers around others: then it is found out which
optimizers keep the state, and whose steps make the update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer
from ttp.errors import ConfigError, UsageError


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
