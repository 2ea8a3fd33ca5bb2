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
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from tests.core.talk import apart
from ttp.core.layout import Layout

GONE = 0
"""The number of no machine."""

SILENT = {"timeouts", "_timeouts", "_new_id", "_record", "_attempts", "program"}
"""Constants, and what has no influence in the worlds that are explored."""

SPARE_MAX, SPARE_EACH = 2000, 4
"""Of states whose machines are kept beside their dumps, and of machines in each."""


class Machines:
    """All states of machines that one exploration has seen, by number."""

    def __init__(self) -> None:
        self._dumps: list[bytes | None] = [b""]
        """Of each state; None: the machine that first came to it is still among the spare ones."""
        self._spare: dict[int, deque[Any]] = {}
        """Machines that the last steps have left in these states, so that the next steps from there need no copy."""
        self._canon = Canon()
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Any, float], tuple[list[Any], int]] = {}
        self._answers: dict[tuple[int, Callable[[Any], Any]], Any] = {}
        self._look = functools.lru_cache(maxsize=512)(self._load)

    def number(self, machine: object, *, kept: bool = False) -> int:
        """Return the number of a machine's state. Unless it is ``kept``, the machine may be changed afterwards."""
        key = self._canon(machine)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._dumps)
            self._dumps.append(None if kept else self._dump(machine))
        return number

    def look(self, number: int) -> Any:
        """Return a machine for reading only; it may not be changed."""
        return self._spare[number][-1] if number in self._spare else self._look(number)

    def step(self, number: int, event: Any, now: float) -> tuple[list[Any], int]:
        """Return the actions of a machine on an event, ``apart``, and the number of its state afterwards."""
        key = (number, event, now)
        known = self._steps.get(key)
        if known is None:
            machine = self._take(number)
            actions = apart(machine.on_event(event, now))
            after = self.number(machine, kept=True)
            known = self._steps[key] = (actions, after)
            self._spare.setdefault(after, deque(maxlen=SPARE_EACH)).append(machine)
            if len(self._spare) > SPARE_MAX:
                eldest = next(iter(self._spare))
                self._dump_once(eldest, self._spare.pop(eldest)[-1])
        return known

    def _take(self, number: int) -> Any:
        """Return a machine that may be changed."""
        spare = self._spare.get(number)
        if spare is None:
            return self._load(number)
        machine = spare.pop()
        if not spare:
            del self._spare[number]
            self._dump_once(number, machine)
        return machine

    def _dump_once(self, number: int, machine: object) -> None:
        if self._dumps[number] is None:
            self._dumps[number] = self._dump(machine)

    def ask(self, number: int, question: Callable[[Any], Any]) -> Any:
        """Return the answer to a question about a machine. Answers are cached."""
        key = (number, question)
        if key not in self._answers:
            self._answers[key] = question(self.look(number))
        return self._answers[key]

    def _load(self, number: int) -> Any:
        """Return a new copy of a machine."""
        dump = self._dumps[number]
        assert dump is not None
        return pickle.loads(dump)

    @staticmethod
    def _dump(machine: object) -> bytes:
        buffer = io.BytesIO()
        _Dumper(buffer, pickle.HIGHEST_PROTOCOL).dump(machine)
        return buffer.getvalue()


class _Unchanging(dict[type, bool]):
    """Whether objects of a type never change: classes, members of enumerations and frozen objects."""

    def __missing__(self, kind: type) -> bool:
        frozen = getattr(kind, "__dataclass_params__", None)
        constant = issubclass(kind, (type, enum.Enum, Layout)) or (frozen is not None and frozen.frozen)
        return self.setdefault(kind, constant)


_is_constant = _Unchanging()
_constants: list[object] = []
"""The objects that dumps refer to, by number; they live as long as the process."""
_places: dict[int, int] = {}
"""Their numbers, by identity."""


class _Dumper(pickle.Pickler):
    """Writes a machine with references to what never changes, instead of its contents."""

    def reducer_override(self, value: object) -> Any:
        if not _is_constant[type(value)]:
            return NotImplemented
        place = _places.get(id(value))
        if place is None:
            place = _places[id(value)] = len(_constants)
            _constants.append(value)
        return _constant, (place,)


def _constant(place: int) -> object:
    return _constants[place]


class Canon:
    """Numbers the states of machines. Equal states have equal numbers, in whatever order they were reached.

    Every object gets a number for its contents, so that an object that several others share (all parts of a controller
    share the membership) is read once, and one that never changes once for all states. Much of an exploration's time is
    spent here, and most values are plain ones: they are passed on where they are met, without a call.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, tuple[str, int]] = {}
        self._kinds: dict[type, Callable[[Any], Any]] = {}
        self._seen: dict[int, Any] = {}
        self._fixed: dict[int, Any] = {}

    def __call__(self, machine: object) -> Any:
        """Return the number of a whole machine, which may not change during the call."""
        self._seen.clear()
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
        of = self._of
        if isinstance(value, tuple(_PLAIN)):
            return lambda v: v
        if isinstance(value, Layout):
            return self._frozen(value, attrgetter("digest"))
        if isinstance(value, enum.Enum):
            return attrgetter("_name_")  # all values in one place are of one enumeration
        if isinstance(value, (set, frozenset)):
            return lambda v: frozenset(map(of, v)) if v else ()
        if isinstance(value, (dict, MappingProxyType)):
            return lambda v: frozenset(zip(map(of, v), map(of, v.values()), strict=True)) if v else ()
        if isinstance(value, (list, tuple, deque)):
            return lambda v: tuple(map(of, v))
        if hasattr(value, "__dataclass_params__"):
            contents = self._contents(value, tuple(f.name for f in fields(value)))
            return self._frozen(value, contents) if value.__dataclass_params__.frozen else contents
        if hasattr(value, "__dict__"):
            return self._contents(value, tuple(name for name in vars(value) if name not in SILENT))
        return repr

    def _contents(self, value: object, names: tuple[str, ...]) -> Callable[[Any], Any]:
        """Return a function that numbers objects of the value's type by what these attributes hold."""
        seen, numbers, of, of_kind = self._seen, self._numbers, self._of, self._kinds.get
        contents: Callable[[Any], Any] = attrgetter("__class__", *names) if names else lambda v: (type(v),)
        within = ("within", type(value))  # for a part of it that knows it

        def number(v: Any) -> Any:
            known = seen.get(id(v))
            if known is None:
                seen[id(v)] = within
                key = tuple([e if (k := type(e)) in _PLAIN else (of_kind(k) or of)(e) for e in contents(v)])
                known = numbers.get(key)
                if known is None:
                    known = numbers[key] = ("object", len(numbers))
                seen[id(v)] = known
            return known

        return number

    def _frozen(self, value: object, contents: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that reads each object of the value's type once, if dumps refer to it."""
        fixed = self._fixed

        def number(v: Any) -> Any:
            known = fixed.get(id(v))
            if known is None:
                known = contents(v)
                if id(v) in _places:
                    fixed[id(v)] = known
            return known

        return number


_PLAIN: frozenset[type] = frozenset({str, int, float, bool, bytes, type(None), type})
