"""Param groups of a checkpoint as those of this rank's optimizer, where the two are not the same.

Pipeline stages have different parameters in their groups. Their checkpoint keeps the settings of each parameter by its
name, as torch's ``flatten_optimizer_state_dict`` does, and any number of stages can be made of it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

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
