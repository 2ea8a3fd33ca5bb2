"""Converts between the core's values and protobuf messages. Protobuf types stop here.

Both sides use the same field names, so the conversion is driven by the dataclasses: enums by name, nested values and
tuples recursively. A field that one side does not know is an error at import time of the tests, not in production.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import DecodeError

from ttp.core import layout_messages as lm
from ttp.core import messages as m
from ttp.mindio.protocol import messages as rm
from ttp.wire import limits
from ttp.wire.limits import WireError
from ttp.wire.v1 import controller_pb2 as pb

__all__ = [
    "ORDERS",
    "REPORTS",
    "WireError",
    "enum_from_wire",
    "enum_to_wire",
    "order_from_wire",
    "order_to_wire",
    "pages_from_wire",
    "parse_report",
    "report_from_wire",
    "report_to_wire",
]


def _kinds(union: Any, opaque: type, instead: Any) -> tuple[type, ...]:
    """What goes over the wire: the core's own kinds, and those that it only knows by their base."""
    own = (kind for kind in typing.get_args(union) if kind is not opaque)
    return (*own, *(typing.get_args(instead) or (instead,)))


REPORTS: tuple[type, ...] = _kinds(m.Report, m.ProgramReport, rm.Report)
ORDERS: tuple[type, ...] = _kinds(m.Order, m.ProgramOrder, rm.Order)


def report_to_wire(report: m.Report) -> pb.RankReport:
    """Core report -> protobuf."""
    return pb.RankReport(**{_snake(type(report).__name__): _to_wire(report)})


def order_to_wire(order: m.Order) -> pb.ControllerOrder:
    """Core order -> protobuf."""
    return pb.ControllerOrder(**{_snake(type(order).__name__): _to_wire(order)})


def parse_report(data: bytes) -> m.Report:
    """Bytes of a stream -> core report.

    Raises:
        WireError: they are no report, or one that does not make sense, or one that would take too much memory.
    """
    limits.check_size(data)
    try:
        message = pb.RankReport.FromString(data)
    except DecodeError:
        raise WireError(f"{len(data)} bytes that are no report") from None
    return report_from_wire(message)


def report_from_wire(message: pb.RankReport) -> m.Report:
    """Protobuf -> core report.

    Raises:
        WireError: the message is empty or holds a value that this version does not know.
    """
    return typing.cast(m.Report, _one_of(message, "report", _REPORT_TYPES))


def order_from_wire(message: pb.ControllerOrder) -> m.Order:
    """Protobuf -> core order.

    Raises:
        WireError: the message is empty or holds a value that this version does not know.
    """
    return typing.cast(m.Order, _one_of(message, "order", _ORDER_TYPES))


def pages_from_wire(messages: Iterable[pb.Mirror]) -> tuple[m.Mirror, ...]:
    """Pages that a launcher hands over.

    Raises:
        WireError: one of them makes no sense.
    """
    return tuple(typing.cast(m.Mirror, _from_wire(m.Mirror, message)) for message in messages)


@functools.cache
def enum_to_wire(value: enum.Enum) -> int:
    """Core enum -> protobuf number."""
    kind = type(value)
    number: int = getattr(pb, f"{_snake(kind.__name__).upper()}_{value.name}")
    return number


@functools.cache  # of what is known: nothing is kept of an error
def enum_from_wire(kind: type[enum.Enum], number: int) -> Any:
    """Protobuf number -> core enum.

    Raises:
        WireError: this version does not know it.
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
    message = getattr(pb, kind.__name__)()
    for name, _ in _FIELDS[kind]:
        item = getattr(value, name)
        if isinstance(item, tuple):
            getattr(message, name).extend([_plain(x) for x in item])
        elif dataclasses.is_dataclass(item):
            getattr(message, name).CopyFrom(_to_wire(item))
        else:
            setattr(message, name, _plain(item))
    return message


def _plain(item: Any) -> Any:
    if isinstance(item, enum.Enum):
        return enum_to_wire(item)
    return _to_wire(item) if dataclasses.is_dataclass(item) else item


def _from_wire(kind: type, message: Any) -> Any:
    return kind(*[read(getattr(message, name)) for name, read in _FIELDS[kind]])


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    """What makes a field's value of what protobuf has; every message of every rank goes through these."""
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


def _entries(name: str, read: Callable[[Any], Any], items: Any) -> tuple[Any, ...]:
    taken = items[: limits.entries(name, len(items))]
    if taken and isinstance(taken[0], int):
        return tuple(taken)  # ranks: there may be a hundred thousand
    return tuple(map(read, taken))


@functools.cache
def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _known_fields() -> dict[type, list[tuple[str, Callable[[Any], Any]]]]:
    values = [lm.ShardGroup, m.Mirror, m.ShardDigest, m.Piece, m.KeptCopy, m.SaverOrder, m.Candidate, m.Reading]
    values += [rm.ReplicaSet, rm.TypeRanks, rm.Transfer]
    kinds = [*REPORTS, *ORDERS, *values]
    fields: dict[type, list[tuple[str, Callable[[Any], Any]]]] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        fields[kind] = [(f.name, _reader(f.name, hints[f.name])) for f in dataclasses.fields(kind)]
    return fields


_FIELDS = _known_fields()
_REPORT_TYPES = {_snake(kind.__name__): kind for kind in REPORTS}
_ORDER_TYPES = {_snake(kind.__name__): kind for kind in ORDERS}

assert isinstance(m.Report, types.UnionType)
