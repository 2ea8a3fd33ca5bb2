"""The hyperparameters of param groups, as they were: copied for a group when one of its values has changed.

A job may have a thousand groups, and they are looked at twice in each step. So what did not change is only compared, by
the list of values as they lie in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ttp.adapters.torch.habit import PLAIN, copied

Groups = list[dict[str, Any]]
"""The hyperparameters of an optimizer's param groups, without the parameters."""


class _Group(NamedTuple):
    """A group as it was.

    Args:
        names: of all its values, in its order.
        values: of these, where all of them can only be replaced; None: some can change in place.
        types: of the values.
        others: where those are that are no numbers: the parameters, tuples.
        copy: of it, without the parameters.
    """

    names: list[str]
    values: list[Any] | None
    types: list[type]
    others: list[int]
    copy: dict[str, Any]

    def is_number_in_place_of_number(self, values: list[Any]) -> bool:
        """Whether all that is new among these values is."""
        known = self.values
        if known is None or [*map(type, values)] != self.types:
            return False
        return _equal([values[index] for index in self.others], [known[index] for index in self.others])


class Hyperparameters(NamedTuple):
    """Of all param groups of some optimizers, at one moment; nobody changes it.

    Args:
        groups: of each optimizer.
        known: the same, with what they are compared by.
    """

    groups: list[Groups]
    known: list[list[_Group]]

    @staticmethod
    def of(optimizers: Sequence[Optimizer], before: Hyperparameters | None = None) -> Hyperparameters:
        """As they are now: ``before`` itself when none has changed since."""
        olds = before.known if before is not None else [[]] * len(optimizers)
        known = [_looked_at(optimizer.param_groups, old) for optimizer, old in zip(optimizers, olds, strict=True)]
        if before is not None and all(new is old for new, old in zip(known, olds, strict=True)):
            return before
        return Hyperparameters([[group.copy for group in groups] for groups in known], known)


def _looked_at(groups: list[dict[str, Any]], before: list[_Group]) -> list[_Group]:
    """``before`` itself when no group has changed."""
    found: list[_Group] = []
    changed = len(groups) != len(before)
    for index, group in enumerate(groups):
        values, names = [*group.values()], [*group]
        last = before[index] if index < len(before) else None
        if last is not None and names == last.names:
            if last.values is not None and _equal(values, last.values):
                found.append(last)
                continue
            if last.is_number_in_place_of_number(values):
                copy = group.copy()
                copy.pop("params", None)
                found.append(_Group(names, values, last.types, last.others, copy))
                changed = True
                continue
        found.append(_new(group, names, values))
        changed = True
    return found if changed else before


def _new(group: dict[str, Any], names: list[str], values: list[Any]) -> _Group:
    """The long way, for a group that is new, or has values that can change in place."""
    items = [(name, value) for name, value in group.items() if name != "params"]
    copy = {name: value if type(value) in PLAIN else copied(value) for name, value in items}
    others = [index for index, value in enumerate(values) if type(value) not in PLAIN]
    fixed = all(map(_is_fixed, (value for _, value in items)))
    return _Group(names, values if fixed else None, [*map(type, values)], others, copy)


def _equal(values: list[Any], last: list[Any]) -> bool:
    try:
        return values == last
    except Exception:  # tensors of other parameters, compared
        return False


def _is_fixed(value: Any) -> bool:
    """Whether this can only be replaced, not changed."""
    kind = type(value)
    return kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value)))
