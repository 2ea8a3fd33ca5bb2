"""Brings what ``wrap_optimizer`` is given, one object or a list, with or without containers, into one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ttp.adapters.torch.loop.post_step_state import listed
from ttp.adapters.torch.loop.unwrap_optimizer import is_sharded, owners_of
from ttp.errors import ConfigError, UsageError


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
