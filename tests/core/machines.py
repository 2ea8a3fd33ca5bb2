"""Numbers the states of machines: two machines with the same knowledge have the same number, whatever their history.

A step of a machine depends only on the machine, the event and the time, so each step is computed once.
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
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.layout import Layout
from ttp.core.rank.machine import RankTimeouts

GONE = 0
"""The number of no machine."""

SILENT = {"patience", "timeouts", "_patience", "_timeouts", "_new_id", "_record", "_attempts", "program"}
"""Constants, and what has no influence in the worlds that are explored."""

CONSTANT = {Layout, m.Hello, ControllerTimeouts, RankTimeouts}
"""What never changes: one object is enough for all states."""


class Machines:
    """All states of machines that one exploration has seen, by number."""

    def __init__(self) -> None:
        self._dumps: list[bytes] = [b""]
        self._canon = Canon()
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Any, float], tuple[list[Any], int]] = {}
        self._answers: dict[tuple[int, Callable[[Any], Any]], Any] = {}
        self._look = functools.lru_cache(maxsize=512)(self._load)
        self._constants: list[object] = []
        self._places: dict[int, int] = {}

    def number(self, machine: object) -> int:
        """Return the number of a machine's state. The machine may be changed afterwards."""
        key = self._canon(machine)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._dumps)
            self._dumps.append(self._dump(machine))
        return number

    def look(self, number: int) -> Any:
        """Return a machine for reading only; it may not be changed."""
        return self._look(number)

    def step(self, number: int, event: Any, now: float) -> tuple[list[Any], int]:
        """Return the actions of a machine on an event, and the number of its state afterwards."""
        key = (number, event, now)
        known = self._steps.get(key)
        if known is None:
            machine = self._load(number)
            actions = machine.on_event(event, now)
            known = self._steps[key] = (actions, self.number(machine))
        return known

    def ask(self, number: int, question: Callable[[Any], Any]) -> Any:
        """Return the answer to a question about a machine. Answers are cached."""
        key = (number, question)
        if key not in self._answers:
            self._answers[key] = question(self.look(number))
        return self._answers[key]

    def _load(self, number: int) -> Any:
        """Return a new copy of a machine."""
        return _Unpickler(self._dumps[number], self._constants).load()

    def _dump(self, machine: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._constant).dump(machine)
        return buffer.getvalue()

    def _constant(self, obj: object) -> int | None:
        if type(obj) not in CONSTANT:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self._constants)
            self._constants.append(obj)
        return self._places[id(obj)]


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, place: Callable[[object], int | None]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.persistent_id = place  # type: ignore[method-assign] # an attribute saves a call for every object


class _Unpickler(pickle.Unpickler):
    def __init__(self, dumped: bytes, constants: list[object]) -> None:
        super().__init__(io.BytesIO(dumped))
        self._constants = constants

    def persistent_load(self, pid: Any) -> object:
        return self._constants[pid]


@functools.cache
def _words(value: object) -> str:
    return repr(value)


class Canon:
    """Numbers the states of machines. Equal states have equal numbers, in whatever order they were reached.

    Every object gets a number for its contents, so that an object that several others share (all parts of a controller
    share
    the membership) is read once.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, tuple[str, int]] = {}
        self._kinds: dict[type, Callable[[Any], Any]] = {}
        self._seen: dict[int, Any] = {}

    def __call__(self, machine: object) -> Any:
        """Return the number of a whole machine, which may not change during the call."""
        self._seen = {}
        return self._of(machine)

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        of = self._kinds.get(kind)
        if of is None:
            of = self._kinds[kind] = self._kind(value)
        return of(value)

    def _kind(self, value: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one line for each kind of value
        if isinstance(value, _PLAIN):
            return lambda v: v
        if isinstance(value, Layout):
            return lambda v: v.digest
        if isinstance(value, (m.Hello, enum.Enum)):
            return _words
        if isinstance(value, (set, frozenset)):
            return lambda v: tuple(sorted(map(repr, map(self._of, v))))
        if isinstance(value, (dict, MappingProxyType)):
            return lambda v: tuple(sorted((repr(self._of(k)), self._of(each)) for k, each in v.items()))
        if isinstance(value, (list, tuple, deque)):
            return lambda v: tuple(map(self._of, v))
        if is_dataclass(value) and not isinstance(value, type):
            return functools.partial(self._object, names=tuple(f.name for f in fields(value)))
        if hasattr(value, "__dict__"):
            return lambda v: self._object(v, tuple(sorted(vars(v).keys() - SILENT)))
        return repr

    def _object(self, value: Any, names: tuple[str, ...]) -> Any:
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = ("within", type(value).__name__)  # for a part of it that knows it
            known = (type(value).__name__, names, *(self._of(getattr(value, name)) for name in names))
            number = self._seen[id(value)] = self._numbers.setdefault(known, ("object", len(self._numbers)))
        return number


_PLAIN = (str, int, float, bool, bytes, type(None))
