"""Protobuf's wire format, as far as MindSpore's files use it. Whatever is malformed is a ``ValueError``, nothing else.

Read here and not by the protobuf library: its pure Python parser raises errors of several classes on damaged files, it
wants the whole file in memory, and MindSpore's generated code needs a newer protobuf than ttp does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_VARINT_MAX = 10

Field = tuple[int, int, "int | memoryview"]
"""Number, wire type, value: a number for ``VARINT``, the bytes otherwise."""


def fields(data: memoryview) -> Iterator[Field]:
    """The fields of one message, in the order of the file.

    Raises:
        ValueError: malformed.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"field {number} has the unknown wire type {kind}")
        if size > len(data) - at:
            raise ValueError(f"field {number} is cut off: {size} bytes announced, {len(data) - at} left")
        yield number, kind, data[at : at + size]
        at += size


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of variable length at ``at``, and where it ends."""
    value = 0
    for place in range(_VARINT_MAX):
        if at + place >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >= 1 << 64:
                raise ValueError("a number has more than 64 bits")
            return value, at + place + 1
    raise ValueError("a number does not end")


def message(field: Field) -> memoryview:
    """The bytes of a field that holds a message, a text or bytes."""
    number, kind, value = field
    if kind != BYTES or isinstance(value, int):
        raise ValueError(f"field {number} is no message")
    return value


def number(field: Field) -> int:
    """The number in a field."""
    name, kind, value = field
    if kind != VARINT or not isinstance(value, int):
        raise ValueError(f"field {name} is no number")
    return value


def signed(value: int, bits: int = 64) -> int:
    """Two's complement: negative numbers are written with 64 bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def numbers(found: Iterable[Field], wanted: int) -> list[int]:
    """All numbers of the repeated field ``wanted``, one by one or packed."""
    values: list[int] = []
    for field in found:
        if field[0] != wanted:
            continue
        if field[1] == VARINT:
            values.append(number(field))
            continue
        packed, at = message(field), 0
        while at < len(packed):
            item, at = varint(packed, at)
            values.append(item)
    return values


def text(data: memoryview) -> str:
    """UTF-8; a ``UnicodeDecodeError`` is a ``ValueError``, but says nothing to a reader."""
    try:
        return bytes(data).decode()
    except UnicodeDecodeError:
        raise ValueError("a text is not UTF-8") from None


def put_varint(value: int) -> bytes:
    """The bytes of a number from 0 on."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_bytes(number: int, data: bytes) -> bytes:
    """A field that holds a message, a text or bytes."""
    return put_varint(number << 3 | BYTES) + put_varint(len(data)) + data


def put_number(number: int, value: int) -> bytes:
    """A field that holds a number from 0 on."""
    return put_varint(number << 3 | VARINT) + put_varint(value)
