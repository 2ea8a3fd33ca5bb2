"""Read MindSpore's ``.ckpt`` files: which tensors a file holds, at which offsets, and whether the file is whole.

This needs no MindSpore, and never has a whole file in memory.

The file is one protobuf message after another, ``Checkpoint { Value { tag = 1; TensorProto = 2; } = 1; }`` with
``TensorProto { dims = 1; tensor_type = 2; tensor_content = 3; }`` (``mindspore/train/checkpoint_pb2.py`` of 2.10). A
large tensor is split into several values with the same tag. A file saved with ``crc_check=True`` ends with ``crc_num``
and ten bytes, big-endian: the CRC-32 of everything before.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ttp.errors import CheckpointError
from ttp.mindspore_files.file_messages import BYTES, DIMS_MAX, parse, text, varint
from ttp.store.digest import Progress
from ttp.store.plain_file import open_plain

CRC_MARK = b"crc_num"
TRAILER = len(CRC_MARK) + 10
BLOCK = 1 << 20
HEADER_MAX = 1 << 20
"""Largest size of a tensor's name or shape in bytes. A larger one means that the file is damaged."""

_WINDOW = 1 << 12
"""Number of bytes to read at once when contents are skipped."""

ITEM_BYTES = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Int16": 2, "UInt16": 2, "Float16": 2, "BFloat16": 2, "Int32": 4, "UInt32": 4,
    "Float32": 4, "Int64": 8, "UInt64": 8, "Float64": 8, "Complex64": 8, "Complex128": 16,
}  # fmt: skip
_NUMBERS = {"Int32": "<i", "UInt32": "<I", "Int64": "<q", "UInt64": "<Q", "Float32": "<f", "Float64": "<d"}

COUNTERS = ("epoch_num", "step_num", "global_step")
"""Names of the entries that tell the step of a checkpoint."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """An entry of a checkpoint file: its type, its shape, and the place of its bytes.

    Args:
        path: the file.
        dtype: the type in MindSpore's words: ``Float32``, ``BFloat16``, ``str``, ...
        dims: the shape; ``()`` for a scalar.
        chunks: offset and length in bytes of each part of the content in the file, in order.
        kept_dims: the shape as the file states it, where a scalar may be ``[]`` or ``[0]``.
    """

    path: str
    dtype: str
    dims: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    kept_dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the content, in bytes."""
        return sum(length for _, length in self.chunks)

    @property
    def item_size(self) -> int:
        """Size of an element in bytes."""
        return self.nbytes // max(1, math.prod(self.dims))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its type in MindSpore's words, its shape, and the digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class CkptContents:
    """The contents of a checkpoint file that was read to its end.

    Args:
        entries: name -> tensor.
        counters: name -> value, for the names of ``COUNTERS`` that the file has.
    """

    entries: Mapping[str, StoredTensor]
    counters: Mapping[str, int]


def index(path: Path) -> dict[str, FileTensor]:
    """Find the place of each tensor in a checkpoint file, reading only a few bytes of each.

    Returns:
        Name -> tensor, in the order of the file.

    Raises:
        CheckpointError: the file is absent, damaged, cut off, encrypted, or no checkpoint.
    """
    with _opened(path, None, _WINDOW) as source:
        return _tensors(path, source, source.skip)


def read_contents(path: Path, progress: Progress | None = None) -> CkptContents:
    """Read a checkpoint to its last byte, and check its CRC if it has one.

    Args:
        path: the file.
        progress: is called with the number of bytes newly read.

    Raises:
        CheckpointError: the file is absent, damaged, cut off, encrypted, or no checkpoint.
    """
    hashes: dict[str, xxhash.xxh3_128] = {}
    counted: dict[str, bytes] = {}

    def digest(name: str, length: int) -> None:
        made = hashes.setdefault(name, xxhash.xxh3_128())
        for data in source.blocks(length):
            made.update(data)
            if name in COUNTERS:
                counted[name] = (counted.get(name, b"") + data)[:9]

    with _opened(path, progress, BLOCK) as source:
        tensors = _tensors(path, source, digest)
        source.check()
        entries = {name: StoredTensor(one.dtype, one.dims, hashes[name].hexdigest()) for name, one in tensors.items()}
        counters = {name: value for name in counted if (value := _count(tensors[name], counted[name])) is not None}
        return CkptContents(entries, counters)


def crc_problem(path: Path, progress: Progress | None = None) -> str | None:
    """Check the CRC of a file. Return the problem in words; None if the CRC is right or the file has none."""
    try:
        with _opened(path, progress, BLOCK) as source:
            if source.expected is not None:
                for _ in source.blocks(source.left):
                    pass
                source.check()
    except CheckpointError as problem:
        return str(problem)
    return None


@contextmanager
def _opened(path: Path, progress: Progress | None, window: int) -> Iterator[_Source]:
    """Open the file for reading, and turn ``OSError`` and ``ValueError`` into ``CheckpointError``."""
    source: _Source | None = None
    try:
        with open_plain(path) as raw:
            source = _Source(raw, progress, window)
            yield source
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        at = 0 if source is None else source.at
        raise CheckpointError(f"{path} is damaged at byte {at}: {problem}") from None


class _Source:
    """Reads a file from its start up to its CRC, and computes the CRC of the bytes that were read."""

    def __init__(self, raw: io.FileIO, progress: Progress | None, window: int) -> None:
        size = os.fstat(raw.fileno()).st_size
        if not size:
            raise ValueError("it is empty")
        tail = os.pread(raw.fileno(), TRAILER, max(0, size - TRAILER))
        marked = len(tail) == TRAILER and tail.startswith(CRC_MARK)
        self.expected = int.from_bytes(tail[len(CRC_MARK) :], "big") if marked else None
        self.left = size - TRAILER if marked else size
        self.at = 0
        self._file, self._progress, self._crc = io.BufferedReader(raw, window), progress, 0

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.left else b""
        if len(data) < count:
            raise ValueError("it is cut off")
        self._forward(count)
        self._crc = zlib.crc32(data, self._crc)
        if self._progress is not None:
            self._progress(count)
        return data

    def blocks(self, length: int) -> Iterator[bytes]:
        while length:
            data = self.take(min(length, BLOCK))
            length -= len(data)
            yield data

    def skip(self, _name: str, length: int) -> None:
        """Skip ``length`` bytes without reading them. ``check`` cannot be used after that."""
        self._file.seek(length, os.SEEK_CUR)
        self._forward(length)

    def varint(self) -> int:
        value = 0
        for place in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value
        raise ValueError("a protobuf number has more than 10 bytes")

    def length(self, end: int, limit: int | None = None) -> int:
        """Read the length of a field, in bytes, and check it.

        Args:
            end: number of bytes of the file after the message that the field is part of.
            limit: largest valid length; None for no limit.
        """
        length = self.varint()
        if length > self.left - end:
            raise ValueError("it is cut off")
        if limit is not None and length > limit:
            raise ValueError("a name or a shape is too long")
        return length

    def end(self, outer: int = 0) -> int:
        """Read the length of the message that begins here, and return the number of bytes of the file after it."""
        length = self.length(outer)
        return self.left - length

    def check(self) -> None:
        if self.expected is not None and self._crc != self.expected:
            raise ValueError(f"its CRC is {self._crc}, but {self.expected} was written into it")

    def _forward(self, count: int) -> None:
        self.left -= count
        self.at += count


_Take = Callable[[str, int], None]
"""A function (name, length) that takes the content of the tensor ``name``, ``length`` bytes, from the source."""


def _tensors(path: Path, source: _Source, take: _Take) -> dict[str, FileTensor]:
    """Return name -> tensor for the whole file. The parts of a tensor follow each other, and are joined."""
    found: dict[str, FileTensor] = {}
    last = None
    for name, dtype, dims, length in _values(source):
        chunk = (source.at, length)
        known = found.get(name)
        if known is None:
            shape = () if dims == (0,) and length else dims
            found[name] = FileTensor(str(path), dtype, shape, (chunk,), dims)
        elif name == last and (dtype, dims) == (known.dtype, known.kept_dims):
            found[name] = FileTensor(known.path, dtype, known.dims, (*known.chunks, chunk), dims)
        else:
            raise ValueError(f"{name:.80} occurs twice")
        take(name, length)
        last = name
    for name, tensor in found.items():
        _check_size(name, tensor)
    if not found:
        raise ValueError("it holds no entry, so it is no checkpoint of MindSpore")
    return found


def _check_size(name: str, tensor: FileTensor) -> None:
    count = math.prod(tensor.dims)
    if tensor.dtype in ITEM_BYTES:
        wrong = tensor.nbytes != count * ITEM_BYTES[tensor.dtype]
    else:
        wrong = tensor.dtype != "str" and bool(tensor.nbytes % count if count else tensor.nbytes)
    if wrong:
        raise ValueError(f"{name:.80} has {tensor.nbytes} bytes, wrong for its shape {tensor.dims} of {tensor.dtype}")


def _count(tensor: FileTensor, data: bytes) -> int | None:
    if tensor.dtype not in _NUMBERS or math.prod(tensor.dims) != 1:
        return None
    value = struct.unpack(_NUMBERS[tensor.dtype], data)[0]
    return int(value) if math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------- the message


def _values(source: _Source) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield the name, type, shape and number of bytes of each value.

    The caller takes the bytes of a value before it asks for the next value.
    """
    while source.left:
        if source.varint() != _key(1):
            raise ValueError("it is encrypted, or no checkpoint of MindSpore")
        end, name, tensor = source.end(), None, False
        while source.left > end:
            key = source.varint()
            if key == _key(1):
                name = text(source.take(source.length(end, HEADER_MAX)))
            elif key == _key(2) and name is not None and not tensor:
                tensor, inner = True, source.end(end)
                yield name, *_tensor_head(source, inner, name)
                if source.left != inner:
                    raise ValueError(f"{name:.80} has data after its content")
            elif key == _key(3) and name is not None:
                raise ValueError(f"{name:.80} is a MapParameter, which is not supported")
            else:
                _pass_over(source, key, end)
        if name is None or not tensor or source.left != end:
            raise ValueError("a value has no name or no tensor")


def _tensor_head(source: _Source, end: int, name: str) -> tuple[str, tuple[int, ...], int]:
    """Read a tensor up to its content, which comes last. Return its type, its shape and the content's size in bytes."""
    head = bytearray()
    while source.left > end:
        key = source.varint()
        if key == _key(3):
            told = parse("TensorHead", head)
            dims = tuple(told.dims)
            if len(dims) > DIMS_MAX or any(extent < 0 for extent in dims) or not told.tensor_type:
                raise ValueError(f"{name:.80} has the shape {list(dims)!r:.80}, or no type")
            return told.tensor_type, dims, source.length(end)
        head += varint(key)
        if key & 7 == BYTES:
            length = source.length(end, HEADER_MAX)
            head += varint(length) + source.take(length)
        else:
            head += varint(source.varint())
        if len(head) > HEADER_MAX:
            raise ValueError(f"{name:.80} has a header of more than {HEADER_MAX} bytes")
    raise ValueError(f"{name:.80} has no bytes")


def _pass_over(source: _Source, key: int, end: int) -> None:
    if key & 7 != BYTES:
        raise ValueError(f"it has an unknown field {key >> 3}")
    for _ in source.blocks(source.length(end)):
        pass


def _key(number: int) -> int:
    return number << 3 | BYTES
