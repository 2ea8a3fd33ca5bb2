"""What a ``.ckpt`` of MindSpore holds and whether it is whole, without MindSpore and without having it in memory.

The file is one protobuf message after the other, ``Checkpoint { Value { tag = 1; TensorProto = 2; } = 1; }`` with
``TensorProto { dims = 1; tensor_type = 2; tensor_content = 3; }``; a large tensor is cut into several values of a tag.
With ``crc_check=True`` it ends with ``crc_num`` and the CRC-32 of all before in ten bytes, big-endian.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ttp.adapters.mindspore.wire_format import BYTES, fields, message, numbers, put_varint, signed, text
from ttp.errors import CheckpointError
from ttp.store.digest import Progress
from ttp.store.plain_file import open_plain

CRC_MARK = b"crc_num"
TRAILER = len(CRC_MARK) + 10
BLOCK = 1 << 20
HEADER_MAX = 1 << 20
"""Bytes of the name and shape of one tensor; more is damage."""

ITEM_BYTES = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Int16": 2, "UInt16": 2, "Float16": 2, "BFloat16": 2, "Int32": 4, "UInt32": 4,
    "Float32": 4, "Int64": 8, "UInt64": 8, "Float64": 8, "Complex64": 8, "Complex128": 16,
}  # fmt: skip
_NUMBERS = {"Int32": "<i", "UInt32": "<I", "Int64": "<q", "UInt64": "<Q", "Float32": "<f", "Float64": "<d"}

COUNTERS = ("epoch_num", "step_num", "global_step")
"""Entries that say of which step a checkpoint is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: type in MindSpore's words, shape, and the digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What one file holds.

    Args:
        entries: by name.
        counters: those of ``COUNTERS`` that it has.
        checked: whether it ends with a CRC, which was right.
        size: bytes of the file.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    checked: bool
    size: int


def read_contents(path: Path, progress: Progress | None = None) -> Contents:
    """Read a checkpoint to its last byte.

    Raises:
        CheckpointError: it is absent, damaged, cut off, or something else.
    """
    try:
        with open_plain(path) as raw:
            size = os.fstat(raw.fileno()).st_size
            expected = _trailer(raw, size)
            source = _Source(io.BufferedReader(raw, BLOCK), size if expected is None else size - TRAILER, progress)
            found = _Found()
            while source.left:
                _value(source, found)
            source.check(expected)
            return Contents(found.finished(), found.counters, expected is not None, size)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from None


class _Source:
    """A file read from start to end, with a running CRC."""

    def __init__(self, file: io.BufferedReader, size: int, progress: Progress | None) -> None:
        self._file, self.left, self._progress, self._crc = file, size, progress, 0

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.left else b""
        if len(data) < count:
            raise ValueError("it is cut off")
        self.left -= count
        self._crc = zlib.crc32(data, self._crc)
        if self._progress is not None:
            self._progress(count)
        return data

    def varint(self) -> int:
        value = 0
        for place in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value
        raise ValueError("a number does not end")

    def check(self, expected: int | None) -> None:
        if expected is not None and self._crc != expected:
            raise ValueError("its CRC is not the one it was written with")


def _trailer(raw: io.FileIO, size: int) -> int | None:
    if size == 0:
        raise ValueError("it is empty")
    raw.seek(max(0, size - TRAILER))
    end = raw.read(TRAILER)
    raw.seek(0)
    return int.from_bytes(end[-10:], "big") if len(end) == TRAILER and end.startswith(CRC_MARK) else None


class _Found:
    """Entries as they come; the parts of one tensor follow each other."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._name: str | None = None
        self._head: tuple[str, tuple[int, ...]] = ("", ())
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._small = b""
        self.counters: dict[str, int] = {}

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if name == self._name and (dtype, shape) == self._head:
            return
        self._finish()
        if name in self._entries:
            raise ValueError(f"{name:.80} is there twice")
        self._name, self._head, self._hash, self._bytes, self._small = name, (dtype, shape), xxhash.xxh3_128(), 0, b""

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        if self._bytes <= 8:
            self._small += data

    def finished(self) -> dict[str, Entry]:
        self._finish()
        if not self._entries:
            raise ValueError("it holds nothing")
        return self._entries

    def _finish(self) -> None:
        if self._name is None:
            return
        dtype, shape = self._head
        wanted = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else self._bytes
        if self._bytes != wanted:
            raise ValueError(f"{self._name:.80} has {self._bytes} bytes, its shape {list(shape)} needs {wanted}")
        self._entries[self._name] = Entry(dtype, shape, self._hash.hexdigest())
        if self._name in COUNTERS and dtype in _NUMBERS and math.prod(shape) == 1:
            value = struct.unpack(_NUMBERS[dtype], self._small)[0]
            if math.isfinite(value):
                self.counters[self._name] = int(value)


def _value(source: _Source, found: _Found) -> None:
    """One ``Checkpoint`` message with one value: headers are small, and the bytes of the tensor come last."""
    if source.varint() != _key(1):
        raise ValueError("it is no checkpoint of MindSpore")
    end = _end(source)
    name, tensor = None, False
    while source.left > end:
        key = source.varint()
        if key == _key(1):
            name = text(memoryview(source.take(_length(source, end, HEADER_MAX))))
        elif key == _key(2) and name is not None:
            tensor = True
            _tensor(source, _end(source, end), name, found)
        else:
            _skip(source, key, end)
    if name is None or not tensor or source.left != end:
        raise ValueError("a value has no name or no tensor")


def _tensor(source: _Source, end: int, name: str, found: _Found) -> None:
    head = bytearray()
    while source.left > end:
        key = source.varint()
        if key == _key(3):
            parsed = list(fields(memoryview(bytes(head))))
            dims = tuple(signed(extent) for extent in numbers(parsed, 1))
            if any(extent < 0 for extent in dims):
                raise ValueError(f"{name:.80} has the shape {list(dims)!r:.80}")
            kinds = [text(message(field)) for field in parsed if field[0] == 2]
            length = _length(source, end, source.left)
            found.begin(name, kinds[-1] if kinds else "", () if dims == (0,) and length else dims)
            while length:
                block = source.take(min(length, BLOCK))
                found.add(block)
                length -= len(block)
            if source.left != end:
                raise ValueError(f"{name:.80} has something behind its bytes")
            return
        head += put_varint(key)
        if key & 7 == BYTES:
            length = _length(source, end, HEADER_MAX)
            head += put_varint(length) + source.take(length)
        else:
            head += put_varint(source.varint())
        if len(head) > HEADER_MAX:
            raise ValueError(f"{name:.80} has a header of more than {HEADER_MAX} bytes")
    raise ValueError(f"{name:.80} has no bytes")


def _skip(source: _Source, key: int, end: int) -> None:
    if key & 7 != BYTES:
        raise ValueError(f"it has an unknown field {key >> 3}")
    left = _length(source, end, source.left)
    while left:
        left -= len(source.take(min(left, BLOCK)))


def _key(number: int) -> int:
    return number << 3 | BYTES


def _end(source: _Source, outer: int = 0) -> int:
    """What will be left of the file behind the message that begins here."""
    length = _length(source, outer, None)
    return source.left - length


def _length(source: _Source, end: int, limit: int | None) -> int:
    length = source.varint()
    if length > source.left - end:
        raise ValueError("it is cut off")
    if limit is not None and length > limit:
        raise ValueError("it announces more than can be")
    return length
