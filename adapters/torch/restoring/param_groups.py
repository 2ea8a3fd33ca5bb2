"""Converts the param groups of a checkpoint to those of this rank's optimizer, where the two differ, and loads them.

A program may add groups in mid-run, for layers that are trained later. If it resumes after that step, it does not add
them again, so the restore adds them.

Pipeline stages have different parameters in their groups. Their checkpoint has the settings of each parameter by its
name, as torch's ``flatten_optimizer_state_dict`` does, so that another number of stages can load it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.loop.unwrap_optimizer import members_of
from ttp.adapters.torch.sharding.names import ModelNames, parameters_of

SavedGroups = Sequence[Mapping[str, Any]]


def groups_for(saved: Any, names: ModelNames, optimizer: Optimizer, elsewhere: Collection[str]) -> SavedGroups:
    """Return the saved settings, arranged in the groups that ``optimizer`` has, with names of parameters in ``params``.

    Args:
        saved: a list of groups, or a mapping from the name of each parameter to its settings.
        names: names of this rank's model.
        optimizer: the optimizer of this rank.
        elsewhere: names of parameters of other stages, which are left out.
    """
    if isinstance(saved, list) and not elsewhere:
        return saved
    each = dict(saved) if isinstance(saved, dict) else {name: g for g in saved for name in g.get("params", ())}
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        present = [name for name in map(names.of, group["params"]) if name in each]
        found.append({**(each[present[0]] if present else {}), "params": present})
    unowned = each.keys() - {name for group in found for name in group["params"]} - set(elsewhere)
    if unowned and found:
        found[-1]["params"] = [*found[-1]["params"], *sorted(unowned)]  # so that optimizer_differences reports them
    return found


def added_since(saved: SavedGroups, names: ModelNames, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the saved groups that this optimizer lacks, in the form for ``add_param_group``; empty if none fit.

    Args:
        saved: groups as ``groups_for`` returns them.
        names: names of this rank's model.
        optimizer: the optimizer of this rank. For a ``CombinedOptimizer`` the result is empty, because the checkpoint
            does not tell which member had these groups.
    """
    more = saved[len(optimizer.param_groups) :]
    owned = {names.of(parameter) for parameter in parameters_of(optimizer)}
    wanted = [name for group in more for name in group.get("params", ())]
    if len(members_of(optimizer)) > 1 or not (names.parameters.keys() - owned).issuperset(wanted):
        return []
    return [_for_adding(group, names) for group in more]


def _for_adding(group: Mapping[str, Any], names: ModelNames) -> dict[str, Any]:
    settings = dict(group)
    parameters: list[Any] = [names.parameters[name] for name in group["params"]]
    if (given := settings.pop("param_names", None)) is not None:
        parameters = list(zip(given, parameters, strict=True))
    return settings | {"params": parameters}


def load_groups(saved: SavedGroups, optimizer: Optimizer) -> None:
    """Load the settings of groups as ``groups_for`` returns them. Tensors are written in place."""
    for group, other in zip(optimizer.param_groups, saved, strict=True):
        for key, value in other.items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
                current.detach().copy_(value)  # in place: schedulers and compiled steps keep references to the tensor
            elif key != "params":
                group[key] = value
