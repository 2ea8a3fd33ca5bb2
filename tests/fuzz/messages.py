"""Malformed messages of the protocol: every field at its limit, or beyond it."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from ttp.wire.v1 import controller_pb2 as pb

TEXTS = ["", "i1", "i2", "job", "n0", "s0", "model", "/save", "10.0.0.1:5", "a" * 5000, "\0", "../x", "é\n\x1b[2J"]
NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_INT32: [0, 1, 2, -1, 3, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 1 << 20],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2, 7, 2**32, 10**18 - 2, 10**18, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_BOOL: [False, True],
}


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return message(field.message_type)
    if field.enum_type is not None:
        return st.integers(0, len(field.enum_type.values) + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=50)
    return st.sampled_from(NUMBERS[field.type])


def _field(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    value = _value(field)
    return st.lists(value, max_size=3) if _repeated(field) else value


def _repeated(field: FieldDescriptor) -> bool:
    return bool(getattr(field, "is_repeated", None) or getattr(field, "label", 0) == 3)


def message(kind: Descriptor, names: list[str] | None = None) -> st.SearchStrategy[Any]:
    """Return messages of a kind; with ``names`` only these fields are set."""
    fields = [f for f in kind.fields if names is None or f.name in names]
    make = getattr(pb, kind.name)
    return st.fixed_dictionaries({}, optional={f.name: _field(f) for f in fields}).map(lambda v: make(**v))


def one_of(envelope: Descriptor) -> st.SearchStrategy[Any]:
    """Return ``RankReport`` or ``ControllerOrder`` messages with any content."""
    make = getattr(pb, envelope.name)
    contents = [_inside(make, f.name, f.message_type) for f in envelope.fields if f.message_type is not None]
    return st.one_of(contents)


def _inside(make: Any, name: str, kind: Descriptor) -> st.SearchStrategy[Any]:
    return message(kind).map(lambda content: make(**{name: content}))


REPORTS = one_of(pb.RankReport.DESCRIPTOR)
ORDERS = one_of(pb.ControllerOrder.DESCRIPTOR)


@st.composite
def damaged(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> bytes:
    """Return the bytes of a message with some of them changed, or cut short."""
    data = bytearray(draw(messages).SerializeToString())
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@st.composite
def changed(draw: st.DrawFn, honest: Any) -> Any:
    """Return an honest message with some fields at their limits."""
    copy = type(honest)()
    copy.CopyFrom(honest)
    which = copy.WhichOneof(copy.DESCRIPTOR.oneofs[0].name)
    inner = copy.DESCRIPTOR.fields_by_name[which].message_type
    names = draw(st.lists(st.sampled_from([f.name for f in inner.fields]), max_size=3, unique=True))
    for field in (f for f in inner.fields if f.name in names):
        getattr(copy, which).ClearField(field.name)
    getattr(copy, which).MergeFrom(draw(message(inner, names)))
    return copy
