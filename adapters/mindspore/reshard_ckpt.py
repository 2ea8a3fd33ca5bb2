"""MindSpore's checkpoint file, read and written a tensor at a time; neither MindSpore nor protobuf is needed for it.

The file is one protobuf message, ``Checkpoint { repeated Value value = 1 }`` with
``Value { string tag = 1; TensorProto tensor = 2 }`` and
``TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }``: see
``mindspore/train/checkpoint_pb2.py`` of 2.10. A large tensor is several values of the same tag in a row, each with the
whole tensor's dims. After the message there may be ``crc_num`` and ten bytes: the CRC32 of all before, big-endian.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ttp.errors import CheckpointError
from ttp.store.plain_file import open_plain

if TYPE_CHECKING:
    from ttp.store.digest import HashingFile, Progress

_CRC_MARK = b"crc_num"
_CRC_SIZE = len(_CRC_MARK) + 10
_WINDOW = 1 << 12
_BLOCK = 1 << 20
_VALUE_MAX = 512 << 20
"""Bytes of content in one value; MindSpore cuts there too."""

_VARINT, _LEN = 0, 2
_NAME_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one entry of a checkpoint lies.

    Args:
        path: the file.
        dtype: MindSpore's word: ``Float32``, ``BFloat16``, ``str``, ...
        dims: the shape; ``()`` for a scalar.
        chunks: offset and length of its bytes in the file, in order.
        kept_dims: the shape as the file spells it: a scalar may be ``[]`` or ``[0]``.
    """

    path: str
    dtype: str
    dims: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    kept_dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return sum(length for _, length in self.chunks)

    @property
    def item_size(self) -> int:
        """Bytes of an element; elements are compared by their bits, so nothing else of the type matters."""
        return self.nbytes // max(1, math.prod(self.dims))


# --------------------------------------------------------------------------------------------------------- reading


def index(path: Path) -> dict[str, Tensor]:
    """What is in the file, in its order. Reads a few bytes of each tensor.

    Raises:
        CheckpointError: it is no checkpoint of MindSpore, is cut off or encrypted, or holds what cannot be resharded.
        OSError: it cannot be read.
    """
    with open_plain(path) as file:
        reader = _Reader(file.fileno(), path)
        found: dict[str, Tensor] = {}
        last = ""
        for name, dtype, dims, chunk in reader.values():
            if name in found:
                old = found[name]
                if name != last or (dtype, dims) != (old.dtype, old.kept_dims):
                    raise CheckpointError(f"{path} holds {name} twice")
                found[name] = Tensor(str(path), dtype, old.dims, (*old.chunks, chunk), dims)
            else:
                found[name] = Tensor(str(path), dtype, () if dims == (0,) and chunk[1] else dims, (chunk,), dims)
            last = name
    for name, tensor in found.items():
        count = math.prod(tensor.dims)
        if tensor.dtype != "str" and (tensor.nbytes % count if count else tensor.nbytes):
            raise CheckpointError(f"{path} is damaged: {name} has {tensor.nbytes} bytes for the shape {tensor.dims}")
    if not found:
        raise CheckpointError(f"{path} holds no tensor: it is no checkpoint of MindSpore")
    return found


def crc_problem(path: Path, progress: Progress | None = None) -> str | None:
    """What the file's own CRC says against it; None when it is right, or has none."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        tail = os.pread(file.fileno(), _CRC_SIZE, max(0, size - _CRC_SIZE))
        if size < _CRC_SIZE or not tail.startswith(_CRC_MARK):
            return None
        crc, left = 0, size - _CRC_SIZE
        while left and (block := file.read(min(left, _BLOCK))):
            crc, left = zlib.crc32(block, crc), left - len(block)
            if progress is not None:
                progress(len(block))
    told = int.from_bytes(tail[len(_CRC_MARK) :], "big")
    return None if crc == told else f"{path} is damaged: its CRC is {crc}, it says {told}"


def read_bytes(tensor: Tensor, start: int = 0, length: int | None = None) -> bytearray:
    """Bytes of the content, from ``start``.

    Raises:
        CheckpointError: the file is shorter than it was.
        OSError: it cannot be read.
    """
    length = tensor.nbytes - start if length is None else length
    data = bytearray(length)
    view, done, at = memoryview(data), 0, 0
    with open_plain(Path(tensor.path)) as file:
        for offset, size in tensor.chunks:
            skip = max(0, start + done - at)
            while skip < size and done < length:
                count = os.preadv(file.fileno(), [view[done : done + size - skip]], offset + skip)
                if not count:
                    raise CheckpointError(f"{tensor.path} has become shorter while it was read")
                done, skip = done + count, skip + count
            at += size
    return data


def read_rows(tensor: Tensor, first: int, last: int) -> np.ndarray:
    """Rows of the first axis as unsigned integers of the elements' size; a scalar has one row."""
    shape = tensor.dims or (1,)
    row = math.prod(shape[1:]) * tensor.item_size
    data = read_bytes(tensor, first * row, (last - first) * row)
    return np.frombuffer(data, bits(tensor.item_size)).reshape(last - first, *shape[1:])


def bits(item_size: int) -> np.dtype:
    """A type of numpy whose values are equal when the bits are."""
    return np.dtype(f"u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size or 1}")


def digest(tensor: Tensor, progress: Progress | None = None) -> tuple[str, bool]:
    """Digest of the content, and whether all elements are the same."""
    hashed, constant = xxhash.xxh3_128(), True
    item = max(1, tensor.item_size)
    block = max(1, _BLOCK // item) * item
    first = bytes(read_bytes(tensor, 0, min(item, tensor.nbytes)))
    for start in range(0, tensor.nbytes, block):
        data = read_bytes(tensor, start, min(block, tensor.nbytes - start))
        hashed.update(data)
        constant = constant and data == first * (len(data) // item)
        if progress is not None:
            progress(len(data))
    return hashed.hexdigest(), constant


class _Reader:
    """The fields of one file, one after another."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle, self._path = handle, path
        self._size = os.fstat(handle).st_size
        if self._size >= _CRC_SIZE and self._pread(self._size - _CRC_SIZE, _CRC_SIZE).startswith(_CRC_MARK):
            self._size -= _CRC_SIZE
        self._start, self._window = 0, b""

    def values(self) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, int]]]:
        """Name, type, dims, and where the content lies."""
        for field, start, end in self._fields(0, self._size):
            if field != 1:
                raise self._damaged(start)
            yield self._value(start, end)

    def _value(self, start: int, end: int) -> tuple[str, str, tuple[int, ...], tuple[int, int]]:
        name = dtype = ""
        dims: list[int] = []
        chunk: tuple[int, int] | None = None
        for field, at, until in self._fields(start, end):
            if field == 1:
                name = self._text(at, until)
            elif field == 3:
                raise CheckpointError(f"{self._path} holds {name}, a MapParameter: that cannot be resharded")
            elif field == 2:
                for inner, first, last in self._fields(at, until):
                    if inner == 1:
                        dims += self._numbers(first, last)
                    elif inner == 2:
                        dtype = self._text(first, last)
                    elif inner == 3:
                        chunk = (first, last - first)
        if not name or not dtype or chunk is None:
            raise self._damaged(start)
        return name, dtype, tuple(dims), chunk

    def _fields(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Number, begin and end of every field; of a varint, begin and end of its bytes."""
        while at < end:
            key, at = self._varint(at, end)
            if key & 7 == _LEN:
                length, at = self._varint(at, end)
                until = at + length
            elif key & 7 == _VARINT:
                until = self._varint(at, end)[1]
            else:
                raise self._damaged(at)
            if until > end:
                raise CheckpointError(
                    f"{self._path} is cut off: a field at byte {at} ends behind the file or its parent"
                )
            yield key >> 3, at, until
            at = until

    def _numbers(self, at: int, end: int) -> Iterator[int]:
        while at < end:
            number, at = self._varint(at, end)
            yield number

    def _text(self, at: int, end: int) -> str:
        if end - at > _NAME_MAX:
            raise self._damaged(at)
        try:
            return bytes(self._byte(i) for i in range(at, end)).decode()
        except UnicodeDecodeError:
            raise self._damaged(at) from None

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        number = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise CheckpointError(f"{self._path} is cut off at byte {at}")
            byte, at = self._byte(at), at + 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at
        raise self._damaged(at)

    def _byte(self, at: int) -> int:
        if not self._start <= at < self._start + len(self._window):
            self._start, self._window = at, self._pread(at, _WINDOW)
        return self._window[at - self._start]

    def _pread(self, at: int, size: int) -> bytes:
        data = os.pread(self._handle, size, at)
        if not data:
            raise CheckpointError(f"{self._path} has become shorter while it was read")
        return data

    def _damaged(self, at: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged at byte {at}, encrypted, or no checkpoint file of MindSpore (.ckpt)"
        )


# --------------------------------------------------------------------------------------------------------- writing


Blocks = Callable[[], Iterable[bytes | bytearray | memoryview]]
"""The bytes of a tensor, in pieces of any size."""


class CkptWriter:
    """Writes entries one after another, and the CRC behind them; the file's own writer makes it durable."""

    def __init__(self, file: HashingFile) -> None:
        self._file, self._crc = file, 0

    def add(self, name: str, dtype: str, dims: tuple[int, ...], nbytes: int, blocks: Iterable[bytes]) -> None:
        """Append one entry; ``blocks`` hold ``nbytes`` together."""
        left, pending = nbytes, b""
        source = iter(blocks)
        while True:
            value = min(left, _VALUE_MAX)
            self._put(_value_head(name, dtype, dims, value))
            need = value
            while need:
                block = pending or next(source)
                taken, pending = block[:need], block[need:]
                self._put(taken)
                need -= len(taken)
            left -= value
            if not left:
                break
        assert not pending and next(source, None) is None, name

    def finish(self) -> None:
        """Append the CRC."""
        self._file.write(_CRC_MARK + self._crc.to_bytes(10, "big"))

    def _put(self, data: bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def _value_head(name: str, dtype: str, dims: tuple[int, ...], size: int) -> bytes:
    """Everything of a value before its content."""
    sizes = b"".join(b"\x08" + varint(dim) for dim in dims)
    tensor = sizes + _text_field(2, dtype) + b"\x1a" + varint(size)
    value = _text_field(1, name) + b"\x12" + varint(len(tensor) + size) + tensor
    return b"\x0a" + varint(len(value) + size) + value


def _text_field(number: int, text: str) -> bytes:
    data = text.encode()
    return varint(number << 3 | _LEN) + varint(len(data)) + data


def varint(number: int) -> bytes:
    """A number as protobuf spells it."""
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
