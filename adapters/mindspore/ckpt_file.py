"""Writes the files of ``mindspore.save_checkpoint``, from any thread and without MindSpore.

Format, as MindSpore 2.10 reads it: messages ``Checkpoint`` (protobuf) one behind the other, each with one ``Value``::

    Checkpoint { repeated Value value = 1; }
    Value { required string tag = 1; TensorProto tensor = 2; }
    TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3; }

A large tensor is cut into several messages of one tag. At the end ``crc_num`` and the CRC-32 of all before, ten bytes,
big-endian. Text has dims 0, type ``str``, and its characters as UTF-32.

``save_checkpoint`` itself copies every tensor, holds a lock that the training thread may hold too, and does not say
when the bytes are on the disk.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttp.processor.source import Cancelled
from ttp.store.digest import HashingFile

CHUNK_BYTES = 256 << 20
"""Bytes of a tensor in one message; MindSpore's own limit is 512 MiB."""

_SLICE = 8 << 20
"""Bytes written between two looks at ``cancelled``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, number or text.

    Args:
        name: its key.
        dtype: MindSpore's name of the type, such as ``Float32``; ``str`` for text.
        shape: of the tensor.
        memory: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: memoryview


def number(name: str, value: int | float) -> Entry:
    """A scalar as ``append_dict`` of ``save_checkpoint`` stores it: 64 bits of an int, 32 of a float."""
    if isinstance(value, int):
        return Entry(name, "Int64", (), memoryview(struct.pack("<q", value)))
    return Entry(name, "Float32", (), memoryview(struct.pack("<f", value)))


def write_entries(target: HashingFile, entries: Iterable[Entry], cancelled: Callable[[], bool]) -> None:
    """Write ``entries`` and the checksum. Nobody changes their memory meanwhile.

    Raises:
        Cancelled: ``cancelled()`` became true; asked every 8 MiB.
        OSError: the disk refused.
    """
    crc = 0
    for entry in entries:
        head = _text(1, entry.name)
        for start in range(0, len(entry.memory), CHUNK_BYTES):
            content = entry.memory[start : start + CHUNK_BYTES]
            opening = _opening(head, entry, len(content))
            target.write(opening)
            crc = zlib.crc32(opening, crc)
            for at in range(0, len(content), _SLICE):
                if cancelled():
                    raise Cancelled
                piece = content[at : at + _SLICE]
                target.write(piece)
                crc = zlib.crc32(piece, crc)
    target.write(b"crc_num" + crc.to_bytes(10, "big"))


def _opening(head: bytes, entry: Entry, size: int) -> bytes:
    """All of a message up to the bytes of the tensor."""
    dims = b"".join(b"\x08" + _varint(extent) for extent in entry.shape)
    tensor = dims + _text(2, entry.dtype) + b"\x1a" + _varint(size)
    value = head + b"\x12" + _varint(len(tensor) + size) + tensor
    return b"\x0a" + _varint(len(value) + size) + value


def _text(field: int, text: str) -> bytes:
    data = text.encode()
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
