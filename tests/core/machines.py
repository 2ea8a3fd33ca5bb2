"""Machines as numbers: two that know the same have the same number, whatever happened to them.

A step of a machine depends on nothing but the machine, the event and the time, so each is made once.
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.membership import Membership
from ttp.core.layout import Layout

GONE = 0
"""The number of no machine."""

SILENT = {"patience", "timeouts", "_patience", "_timeouts", "_new_id", "_record", "_attempts", "program"}
"""Constants, and what has no influence in the worlds that are explored."""


class Machines:
    """All machines of one exploration."""

    def __init__(self) -> None:
        self._dumps: list[bytes] = [b""]
        self._numbers: dict[int, int] = {}
        self._steps: dict[tuple[int, Any, float], tuple[list[Any], int]] = {}
        self._answers: dict[tuple[int, Callable[[Any], Any]], Any] = {}

    def number(self, machine: object) -> int:
        """The number of a machine; it may be changed afterwards."""
        key = hash(canonical(machine))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._dumps)
            self._dumps.append(dump(machine))
        return number

    def load(self, number: int) -> Any:
        """A machine of its own."""
        return load(self._dumps[number])

    def step(self, number: int, event: Any, now: float) -> tuple[list[Any], int]:
        """What the machine does on an event, and what it is then."""
        key = (number, event, now)
        known = self._steps.get(key)
        if known is None:
            machine = self.load(number)
            actions = machine.on_event(event, now)
            known = self._steps[key] = (actions, self.number(machine))
        return known

    def ask(self, number: int, question: Callable[[Any], Any]) -> Any:
        """Something that a machine knows."""
        key = (number, question)
        if key not in self._answers:
            self._answers[key] = question(self.load(number))
        return self._answers[key]


# -------------------------------------------------------------------------------------------------- dump and load

_SHARED: dict[tuple[str, str], object] = {}
"""Layouts and hellos never change: one object of each is enough for all states."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, str] | None:
        if not isinstance(obj, (Layout, m.Hello)):
            return None
        key = (type(obj).__name__, repr(obj))
        _SHARED.setdefault(key, obj)
        return key


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> object:
        return _SHARED[pid]


def dump(machine: object) -> bytes:
    """All that a machine knows."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(machine)
    return buffer.getvalue()


def load(dumped: bytes) -> Any:
    """The machine again."""
    return _Unpickler(io.BytesIO(dumped)).load()


@functools.cache
def _words(value: object) -> str:
    return repr(value)


def canonical(value: Any, met: set[int] | None = None) -> Any:  # noqa: PLR0911 - one line for each kind of value
    """What a machine knows, without the order in which it came to know it.

    Args:
        value: the machine, or something in it.
        met: parts of the machine that were looked at already: several parts know each other.
    """
    met = set() if met is None else met
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return value
    if isinstance(value, Layout):
        return value.digest
    if isinstance(value, (m.Hello, enum.Enum)):
        return _words(value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(repr(canonical(v, met)) for v in value))
    if isinstance(value, (dict, MappingProxyType)):
        return tuple(sorted((repr(canonical(k, met)), canonical(v, met)) for k, v in value.items()))
    if isinstance(value, (list, tuple, deque)):
        return tuple(canonical(v, met) for v in value)
    if isinstance(value, Membership) or hasattr(value, "__dict__"):
        if id(value) in met:
            return type(value).__name__
        met.add(id(value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(canonical(getattr(value, f.name), met) for f in fields(value)))
    if hasattr(value, "__dict__"):
        return (type(value).__name__, *(canonical(v, met) for k, v in sorted(vars(value).items()) if k not in SILENT))
    return repr(value)
