"""The hyperparameters of param groups, kept as they were: copied for a group when one of its values has changed.

A job may have a thousand groups, and this happens twice in each step. So what did not change is only compared, by
lists of values as they lie in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""The hyperparameters of an optimizer's param groups, without the parameters."""

PLAIN = frozenset({float, int, bool, str, type(None)})
"""Types of values that stay as they are."""

_NEVER: list[Any] = [object()]


class _Group:
    """A group as it was when last looked at."""

    __slots__ = ("copy", "names", "others", "types", "values")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values = _NEVER
        """In the group's order; ``_NEVER`` where some can change in place."""
        self.types: list[type] = []
        """Of the values."""
        self.others: list[int] = []
        """Where values are that are no numbers: the parameters, tuples."""
        self.copy: dict[str, Any] = {}

    def only_numbers_changed(self, values: list[Any]) -> bool:
        """Whether all that is new among these values are numbers in the place of numbers."""
        known = self.values
        if [*map(type, values)] != self.types or known is _NEVER:
            return False
        return [values[index] for index in self.others] == [known[index] for index in self.others]

    def look_at(self, group: dict[str, Any], names: list[str], values: list[Any], copied: Callable[[Any], Any]) -> None:
        """The long way, for a group that is new, or has values that can change in place."""
        items = [(name, value) for name, value in group.items() if name != "params"]
        self.copy = {name: value if type(value) in PLAIN else copied(value) for name, value in items}
        self.names, self.types = names, [*map(type, values)]
        self.others = [index for index, value in enumerate(values) if type(value) not in PLAIN]
        self.values = values if all(_is_fixed(value) for _, value in items) else _NEVER


class Hyperparameters:
    """Of all param groups of some optimizers.

    Args:
        optimizers: whose groups.
        copied: copies a value that can change in place.
    """

    def __init__(self, optimizers: Sequence[Optimizer], copied: Callable[[Any], Any]) -> None:
        self._optimizers = optimizers
        self._copied = copied
        self._known: list[list[_Group]] = [[] for _ in optimizers]
        self._taken: list[Groups] = [[] for _ in optimizers]

    def now(self) -> list[Groups]:
        """Of each optimizer, as they are now; for the training thread. What is returned is not changed any more."""
        self._taken = [
            self._groups(optimizer.param_groups, known, taken)
            for optimizer, known, taken in zip(self._optimizers, self._known, self._taken, strict=True)
        ]
        return self._taken

    def copies(self) -> list[Groups]:
        """The same from any thread, without a look at what was known."""
        return [
            [
                {k: v if type(v) in PLAIN else self._copied(v) for k, v in group.items() if k != "params"}
                for group in groups
            ]
            for groups in (optimizer.param_groups for optimizer in self._optimizers)
        ]

    def _groups(self, groups: list[dict[str, Any]], known: list[_Group], taken: Groups) -> Groups:
        while len(known) < len(groups):
            known.append(_Group())
        del known[len(groups) :]
        changed = len(taken) != len(groups)
        for group, last in zip(groups, known, strict=True):
            values, names = [*group.values()], [*group]
            if names == last.names and _equal(values, last.values):
                continue
            changed = True
            if names == last.names and last.only_numbers_changed(values):
                last.copy, last.values = group.copy(), values
                last.copy.pop("params", None)
            else:
                last.look_at(group, names, values, self._copied)
        return [last.copy for last in known] if changed else taken


def _equal(values: list[Any], last: list[Any]) -> bool:
    try:
        return values == last
    except Exception:  # tensors of other parameters, compared
        return False


def _is_fixed(value: Any) -> bool:
    """Whether this can only be replaced, not changed."""
    kind = type(value)
    return kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value)))
