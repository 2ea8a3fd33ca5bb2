"""Converts messages between the core's dataclasses and protobuf. The core does not know protobuf types.

Dataclasses and protobuf messages have the same field names, so the dataclasses define the conversion: enums by name,
nested values and tuples recursively. ``tests/wire/test_convert.py`` finds fields that one side lacks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import DecodeError

from ttp.core import copy_messages as cm
from ttp.core import layout_messages as lm
from ttp.core import messages as m
from ttp.core import restore_messages as sm
from ttp.mindio.protocol import messages as rm
from ttp.wire import limits
from ttp.wire.limits import WireError
from ttp.wire.v1 import controller_pb2 as pb


def _kinds(base: type) -> tuple[type, ...]:
    """Return all subclasses of ``base`` that have no subclasses themselves, in the order of their modules."""
    everything = [each for module in (m, lm, cm, sm, rm) for each in vars(module).values()]
    found = {each: None for each in everything if isinstance(each, type) and issubclass(each, base)}
    bases = {above for each in found for above in each.__mro__[1:]}
    return tuple(each for each in found if each not in bases)


REPORTS = _kinds(m.Report)
ORDERS = _kinds(m.Order)


def report_to_wire(report: m.Report) -> pb.RankReport:
    """Convert a core report to protobuf. Characters that are not valid Unicode are written as escapes."""
    try:
        return _report_to_wire(report)
    except ValueError:  # the text of an exception may hold a file name that is not UTF-8
        return _report_to_wire(_valid(report))


def _report_to_wire(report: m.Report) -> pb.RankReport:
    return pb.RankReport(**{_snake(type(report).__name__): _to_wire(report)})


def order_to_wire(order: m.Order) -> pb.ControllerOrder:
    """Convert a core order to protobuf. The result for ``SEVERAL`` ranks is cached: callers must not change it."""
    return _order_to_wire(order) if order.rank != m.SEVERAL else _shared_order(order)


def _order_to_wire(order: m.Order) -> pb.ControllerOrder:
    return pb.ControllerOrder(**{_snake(type(order).__name__): _to_wire(order)})


_shared_order = functools.lru_cache(8)(_order_to_wire)


def parse_report(data: bytes) -> m.Report:
    """Parse the bytes that a stream delivered into a core report.

    Raises:
        WireError: the bytes are not a report, have an invalid value, or would take too much memory.
    """
    limits.check_size(data)
    try:
        message = pb.RankReport.FromString(data)
    except DecodeError:
        raise WireError(f"{len(data)} bytes are not a valid report") from None
    return report_from_wire(message)


def report_from_wire(message: pb.RankReport) -> m.Report:
    """Convert a protobuf report to a core report.

    Raises:
        WireError: the report is empty, or has an unknown or invalid value.
    """
    return typing.cast(m.Report, _one_of(message, "report", _REPORT_TYPES))


def order_from_wire(message: pb.ControllerOrder) -> m.Order:
    """Convert a protobuf order to a core order.

    Raises:
        WireError: the order is empty, or has an unknown or invalid value.
    """
    return typing.cast(m.Order, _one_of(message, "order", _ORDER_TYPES))


def pages_from_wire(messages: Iterable[pb.Mirror]) -> tuple[cm.Mirror, ...]:
    """Convert the pages of dead ranks that a launcher sends.

    Raises:
        WireError: a page message has an invalid value.
    """
    return tuple(typing.cast(cm.Mirror, _from_wire(cm.Mirror, message)) for message in messages)


@functools.cache
def enum_to_wire(value: enum.Enum) -> int:
    """Return the protobuf number of a core enum's member."""
    kind = type(value)
    number: int = getattr(pb, f"{_snake(kind.__name__).upper()}_{value.name}")
    return number


@functools.cache  # only known values are cached, as calls that raise are not
def enum_from_wire(kind: type[enum.Enum], number: int) -> Any:
    """Return the member of ``kind`` that has this protobuf number.

    Raises:
        WireError: this version of ttp does not know the number.
    """
    names = getattr(pb, kind.__name__).DESCRIPTOR.values_by_number
    name = names[number].name if number in names else str(number)
    try:
        return kind[name.removeprefix(f"{_snake(kind.__name__).upper()}_")]
    except KeyError:
        raise WireError(f"{kind.__name__} {name} is not known here") from None


def _one_of(message: Any, oneof: str, kinds: dict[str, type]) -> Any:
    which = message.WhichOneof(oneof)
    if which is None:
        raise WireError(f"a message without a {oneof}: sent by a newer ttp?")
    try:
        return _from_wire(kinds[which], getattr(message, which))
    except WireError as problem:
        raise WireError(f"{which}: {problem}") from None


def _to_wire(value: Any) -> Any:
    kind = type(value)
    fields = _FIELDS[kind]
    return fields.message(**dict(zip(fields.names, map(_plain, fields.of(value)), strict=True)))


def _plain(item: Any) -> Any:
    """Return ``item`` as a value for a protobuf field. Scalars and tuples of scalars are passed unchanged."""
    kind = type(item)
    if kind in _SCALARS:
        return item
    if isinstance(item, enum.Enum):
        return enum_to_wire(item)
    if kind is tuple:
        return item if not item or type(item[0]) in _SCALARS else [_plain(x) for x in item]
    return _to_wire(item) if kind in _FIELDS else item


def _valid(item: Any) -> Any:
    """Return a copy of a message, in which halves of surrogate pairs are written as escapes (``\\udcff``)."""
    if isinstance(item, str):
        return item.encode(errors="backslashreplace").decode()
    if type(item) is tuple:
        return tuple(map(_valid, item))
    return type(item)(*map(_valid, _FIELDS[type(item)].of(item))) if type(item) in _FIELDS else item


def _from_wire(kind: type, message: Any) -> Any:
    fields = _FIELDS[kind]
    values = list(fields.of(message))
    for at, read in fields.readers:
        values[at] = read(values[at])
    return kind(*values)


def _reader(name: str, hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that converts and checks a field's protobuf value; None if the field needs neither.

    None saves a call for every such field of every message.
    """
    hint = getattr(hint, "__supertype__", hint)  # Rank is a NewType of int
    if hint in (bool, float, bytes) or (hint is int and name not in limits.NUMBERS):
        return None
    if typing.get_origin(hint) is tuple:
        return functools.partial(_entries, name, _reader(name, typing.get_args(hint)[0]))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(enum_from_wire, hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(_from_wire, hint)
    return functools.partial(_scalar, name)


def _scalar(name: str, item: Any) -> Any:
    if isinstance(item, str):
        return limits.text(name, item)
    return limits.number(name, item) if isinstance(item, int) else item


def _entries(name: str, read: Callable[[Any], Any] | None, items: Any) -> tuple[Any, ...]:
    if not items:
        return ()
    taken = items[: limits.entries(name, len(items))]
    return tuple(taken if read is None else map(read, taken))


@functools.cache
def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Fields:
    """The fields of one dataclass, prepared for the conversion from and to its protobuf message.

    Args:
        kind: a dataclass whose name and field names are those of a protobuf message.
    """

    def __init__(self, kind: type) -> None:
        hints = typing.get_type_hints(kind)
        self.names = tuple(f.name for f in dataclasses.fields(kind))
        readers = ((at, _reader(name, hints[name])) for at, name in enumerate(self.names))
        self.readers = [(at, read) for at, read in readers if read is not None]
        self.message: Callable[..., Any] = getattr(pb, kind.__name__)
        get = operator.attrgetter(*self.names)
        self.of: Callable[[Any], Iterable[Any]] = get if len(self.names) > 1 else lambda value: (get(value),)
        """Returns the fields of a value or of a message, in the order of ``names``."""


_SCALARS = frozenset({int, str, bool, float, bytes})


def _known_fields() -> dict[type, _Fields]:
    values = [lm.ShardGroup, cm.Mirror, m.ShardDigest, m.Piece, m.KeptCopy, m.SaverOrder, sm.Candidate, sm.Reading]
    values += [rm.ReplicaSet, rm.TypeRanks, rm.Transfer]
    return {kind: _Fields(kind) for kind in (*REPORTS, *ORDERS, *values)}


_FIELDS = _known_fields()
_REPORT_TYPES = {_snake(kind.__name__): kind for kind in REPORTS}
_ORDER_TYPES = {_snake(kind.__name__): kind for kind in ORDERS}
