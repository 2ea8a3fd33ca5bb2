"""Param groups of a checkpoint as those of this rank's optimizer, where the two are not the same.

A program may add groups in mid-run, for layers that are trained later. Restored behind that step it would never add
them, so that is done for it.

Pipeline stages have different parameters in their groups. Their checkpoint keeps the settings of each parameter by its
name, as torch's ``flatten_optimizer_state_dict`` does, and any number of stages can be made of it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ttp.adapters.torch.loop.combined_optimizer import members_of
from ttp.adapters.torch.sharding.names import ModelNames

SavedGroups = Sequence[Mapping[str, Any]]


def groups_for(saved: Any, names: ModelNames, optimizer: Optimizer, elsewhere: Collection[str]) -> SavedGroups:
    """The saved settings in groups as ``optimizer`` has them, with the names of their parameters in ``params``.

    Args:
        saved: a list of groups, or settings by parameter.
        names: of this rank's model.
        optimizer: of this rank.
        elsewhere: names of other stages: they are left out.
    """
    if isinstance(saved, list) and not elsewhere:
        return saved
    each = dict(saved) if isinstance(saved, dict) else {name: g for g in saved for name in g.get("params", ())}
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        present = [name for name in map(names.of, group["params"]) if name in each]
        found.append({**(each[present[0]] if present else {}), "params": present})
    nobodys = each.keys() - {name for group in found for name in group["params"]} - set(elsewhere)
    if nobodys and found:
        found[-1]["params"] = [*found[-1]["params"], *sorted(nobodys)]  # said to be too many when they are compared
    return found


def added_since(saved: SavedGroups, names: ModelNames, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The last of ``saved``, for ``add_param_group``, where ``optimizer`` has less and could take them; else none.

    Args:
        saved: as ``groups_for`` returns them.
        names: of this rank's model.
        optimizer: of this rank; of several nobody knows which one had them.
    """
    more = saved[len(optimizer.param_groups) :]
    owned = {names.of(parameter) for group in optimizer.param_groups for parameter in group["params"]}
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
