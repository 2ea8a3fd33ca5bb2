"""Copies the hyperparameters of param groups as they are at one moment.

They are copied twice in each step. A few groups are copied as dictionaries. A job may have a thousand groups, for which
new dictionaries in each step would keep the garbage collector busy. So all values of an optimizer are copied into one
list then, which is compared as a whole, and dictionaries are made only when a caller needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any

from torch.optim import Optimizer

from ttp.adapters.torch.loop.schedule_habit import PLAIN, copied

_FEW = 32
"""Number of groups up to which dictionaries are faster than lists."""
_chained = chain.from_iterable
_groups_of = attrgetter("param_groups")

ParamGroups = list[dict[str, Any]]
"""The hyperparameters of an optimizer's param groups, without the parameters."""
Setting = tuple[int, int, str]
"""A hyperparameter: the numbers of its optimizer and of its group, and its name."""


@dataclass(slots=True)  # making a frozen one would take three times as long
class GroupValues:
    """The hyperparameters of all groups of one optimizer. Immutable.

    Args:
        lengths: number of values in each group; if there are few groups, not kept up to date.
        names: names of all values, group after group; if there are few groups, not kept up to date.
        values: all values, in the order of ``names``.
        types: types of the values.
        others: positions of the values that are not of a ``PLAIN`` type: the parameters, tuples, tensors.
        copies: copies of the groups, if some values can change in place; None: values can only be replaced.
        few: the groups with their parameters as dictionaries, which compare faster if there are few; else None.
    """

    lengths: list[int]
    names: list[str]
    values: list[Any]
    types: list[type]
    others: list[int]
    copies: ParamGroups | None
    few: ParamGroups | None

    def groups(self) -> ParamGroups:
        """Return the groups as dictionaries, without the parameters."""
        if self.copies is not None:
            return self.copies
        if self.few is not None:
            return [{name: value for name, value in group.items() if name != "params"} for group in self.few]
        items = zip(self.names, self.values, strict=True)
        found = [dict(islice(items, length)) for length in self.lengths]
        for group in found:
            group.pop("params", None)
        return found


Hyperparameters = list[GroupValues]
"""The hyperparameters of some optimizers: an entry for each optimizer."""


def hyperparameters_of(optimizers: Sequence[Optimizer], before: Hyperparameters | None = None) -> Hyperparameters:
    """Copy the hyperparameters as they are now. May be called on any thread.

    Args:
        optimizers: the optimizers whose param groups are copied.
        before: an earlier copy, of which unchanged parts are used again; None: there is none.
    """
    if before is None:
        return [_looked_at(each.param_groups, None) for each in optimizers]
    now = [*map(_looked_at, map(_groups_of, optimizers), before)]
    return before if all(map(is_, now, before)) else now


def plain_settings(optimizers: Sequence[ParamGroups]) -> ParamGroups:
    """Return the groups of all optimizers in one list, with only those values that are numbers, texts or tuples."""
    groups = _chained(optimizers)
    return [{name: v for name, v in group.items() if type(v) in PLAIN or _is_fixed(v)} for group in groups]


def _put_back(before: Hyperparameters, between: Hyperparameters, after: Hyperparameters) -> set[Setting]:
    """Return the numbers, texts and tuples that are equal ``before`` and ``after``, and had another value between."""
    found: set[Setting] = set()
    for number, moments in enumerate(zip(before, between, after, strict=True)):
        for place, (first, other, last) in enumerate(zip(*(each.groups() for each in moments), strict=False)):
            for name in first.keys() & other.keys() & last.keys():
                values = first[name], other[name], last[name]
                if all(type(v) in PLAIN or _is_fixed(v) for v in values) and values[0] == values[2] != values[1]:
                    found.add((number, place, name))
    return found


class PutBack:
    """Learns which hyperparameters a wrapper sets for the step inside only, and puts back behind it."""

    def __init__(self) -> None:
        self.usual: Hyperparameters | None = None
        """Those of the last forward pass that was the first one after an update; None: they are not looked at."""
        self.looked: int | None = -1
        """The version before that forward pass; None: no look is needed any more."""
        self._settings: set[Setting] = set()

    def begin(self) -> None:
        """Note that a loop begins."""
        self.usual, self.looked = None, -1

    def end(self) -> None:
        """Note that no look is needed: every version ends when all has been put back, or nothing ever is."""
        self.usual = self.looked = None

    def look(self, now: Hyperparameters, stepped: Hyperparameters, version: int, *, learning: bool) -> None:
        """Note the hyperparameters of a forward pass, and learn which of them the step before it had changed.

        Args:
            now: the hyperparameters now.
            stepped: those when the step had ended.
            version: the version that the step has made.
            learning: whether this is one of the first forward passes.
        """
        before, self.usual, self.looked = self.usual, now, version
        if learning and before is not None and now is not stepped:
            self._settings = self._settings | _put_back(before, stepped, now)  # a saver may read the old set
        elif not (learning or self._settings):
            self.end()

    def applied(self, groups: list[ParamGroups], usual: Hyperparameters) -> list[ParamGroups]:
        """Return the groups of some optimizers with these settings as they are in ``usual``; changes no argument."""
        found, known = [[*each] for each in groups], [each.groups() for each in usual]
        for number, place, name in self._settings:
            if place < len(known[number]) and name in known[number][place]:
                found[number][place] = found[number][place] | {name: known[number][place][name]}
        return found


def _looked_at(groups: list[dict[str, Any]], last: GroupValues | None) -> GroupValues:
    """Copy the groups of one optimizer; returns ``last`` itself if nothing has changed."""
    if last is None:
        return _new(groups)
    few = last.few is not None
    if few and _equal(groups, last.few):
        return last
    values = [*_chained(map(dict.values, groups))]
    if not few:
        if last.copies is not None or last.lengths != [*map(len, groups)] or last.names != [*_chained(groups)]:
            return _new(groups)
        if _equal(values, last.values):
            return last
    others, known = last.others, last.values
    if [*map(type, values)] == last.types and _equal([values[n] for n in others], [known[n] for n in others]):
        return GroupValues(last.lengths, last.names, values, last.types, others, None, _few(groups))
    return _new(groups)


def _new(groups: list[dict[str, Any]]) -> GroupValues:
    """Copy all values with their types; needed if types may have changed, or if values can change in place."""
    lengths, names = [*map(len, groups)], [*_chained(groups)]
    values = [*_chained(map(dict.values, groups))]
    types = [*map(type, values)]
    others = [index for index, kind in enumerate(types) if kind not in PLAIN]
    copies = None
    if not all(names[index] == "params" or _is_fixed(values[index]) for index in others):
        copies = [{name: copied(value) for name, value in group.items() if name != "params"} for group in groups]
    return GroupValues(lengths, names, values, types, others, copies, None if copies is not None else _few(groups))


def _few(groups: list[dict[str, Any]]) -> ParamGroups | None:
    return [*map(dict.copy, groups)] if len(groups) <= _FEW else None


def _equal(values: list[Any], last: list[Any] | None) -> bool:
    try:
        return values == last
    except Exception:  # comparing lists of different tensors raises
        return False


def _is_fixed(value: Any) -> bool:
    """Return whether a value cannot change in place."""
    return type(value) is tuple and PLAIN.issuperset(map(type, value))
