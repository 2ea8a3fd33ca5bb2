"""Numbers the states of machines: two machines with the same knowledge have the same number, whatever their history.

A step of a machine depends only on the machine, the event and the time, so each step is computed once.
"""

from __future__ import annotations

import copyreg
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
        return pickle.loads(self._dumps[number])

    @staticmethod
    def _dump(machine: object) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(machine)
        return buffer.getvalue()


_constants: dict[int, object] = {}
"""The objects of ``CONSTANT`` types that dumps refer to, by identity; they live as long as the process."""


def _constant(identity: int) -> object:
    return _constants[identity]


def _refer(constant: object) -> tuple[Callable[[int], object], tuple[int]]:
    _constants[id(constant)] = constant
    return _constant, (id(constant),)


_REDUCERS: dict[type, Any] = {**copyreg.dispatch_table, **dict.fromkeys(CONSTANT, _refer)}
"""How a dump is made of each type; a table costs no call for the objects of all other types."""


@functools.cache
def _words(value: object) -> str:
    return repr(value)


class Canon:
    """Numbers the states of machines. Equal states have equal numbers, in whatever order they were reached.

    Every object gets a number for its contents, so that an object that several others share (all parts of a controller
    share the membership) is read once. Half of an exploration's time is spent here, and most values are plain ones:
    they are passed on where they are met, without a call.
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
        if isinstance(value, tuple(_PLAIN)):
            return lambda v: v
        if isinstance(value, Layout):
            return lambda v: v.digest
        if isinstance(value, (m.Hello, enum.Enum, type)):
            return _words
        if isinstance(value, (set, frozenset)):
            return lambda v: tuple(sorted(map(repr, map(self._of, v)))) if v else ()
        if isinstance(value, (dict, MappingProxyType)):
            return lambda v: tuple(sorted((repr(self._of(k)), self._of(each)) for k, each in v.items())) if v else ()
        if isinstance(value, (list, tuple, deque)):
            return lambda v: tuple(map(self._of, v))
        if is_dataclass(value) and not isinstance(value, type):
            return functools.partial(self._object, names=tuple(f.name for f in fields(value)))
        if hasattr(value, "__dict__"):
            return lambda v: self._object(v, tuple([name for name in vars(v) if name not in SILENT]))
        return repr

    def _object(self, value: Any, names: tuple[str, ...]) -> Any:
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = ("within", type(value).__name__)  # for a part of it that knows it
            known: list[Any] = [type(value).__name__, names]
            for name in names:
                each = getattr(value, name)
                known.append(each if type(each) in _PLAIN else self._of(each))
            number = self._seen[id(value)] = self._numbers.setdefault(tuple(known), ("object", len(self._numbers)))
        return number


_PLAIN: frozenset[type] = frozenset({str, int, float, bool, bytes, type(None)})
