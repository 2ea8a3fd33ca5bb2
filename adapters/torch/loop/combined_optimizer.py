"""Presents several optimizers as one, as torch's ``get_optimizer_state_dict(model, [one, two])`` does.

Their states are merged by parameter, and their param groups are concatenated. So code that reads or writes checkpoints
handles one optimizer only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.sharding.names import ModelNames, first_of, parameters_of
from ttp.errors import ConfigError

log = logging.getLogger("ttp.adapters.torch")

_LISTED_MAX = 3


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
            "between them"
        )


def tell_forgotten(optimizer: Optimizer, names: ModelNames) -> None:
    """Log the names of parameters that require gradients but that ``optimizer`` does not update."""
    updated = {id(parameter) for parameter in parameters_of(optimizer)}
    left = [name for name, p in names.parameters.items() if p.requires_grad and id(p) not in updated]
    if left:
        log.warning(
            "%d parameters require gradients but are in no optimizer that wrap_optimizer() was given (%s). Their "
            "weights are saved, but no state of an optimizer that updates them: give wrap_optimizer() all optimizers. "
            "Weights that the program itself writes, from fp32 master weights or as a target network, need none",
            len(left),
            first_of(left, _LISTED_MAX),
        )
