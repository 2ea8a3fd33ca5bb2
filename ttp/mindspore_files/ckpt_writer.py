"""Write a ``.ckpt`` file as ``mindspore.save_checkpoint`` does, but on any thread and without MindSpore.

The format, as MindSpore 2.10 reads it: protobuf messages ``Checkpoint`` one after another, each with one ``Value``::

    Checkpoint { repeated Value value = 1; }
    Value { required string tag = 1; TensorProto tensor = 2; }
    TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3; }

A large tensor is split into several messages with the same tag. At the end of the file are ``crc_num`` and ten bytes,
big-endian: the CRC-32 of everything before. A text has the shape ``[0]``, the type ``str``, and its characters as
UTF-32.

``save_checkpoint`` itself cannot be used in a rescue: it copies every tensor, takes a lock that the training thread may
hold, and does not report when the bytes are on disk.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ttp.mindspore_files.file_messages import BYTES, make, varint
from ttp.processor.source import Cancelled
from ttp.store.digest import HashingFile

CHUNK_BYTES = 512 << 20
"""Largest number of bytes of a tensor in one message. MindSpore splits at the same size."""

_SLICE = 8 << 20
"""Bytes written between two calls of ``cancelled``."""

_VALUE, _TENSOR, _BYTES_OF_TENSOR = (varint(number << 3 | BYTES) for number in (1, 2, 3))

Block = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor, number or text to write.

    Args:
        name: its key in the file.
        dtype: its type in MindSpore's words, such as ``Float32``; ``str`` for a text.
        shape: its shape.
        memory: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: memoryview


def number(name: str, value: int | float) -> TensorToWrite:
    """Return a number as ``append_dict`` of ``save_checkpoint`` stores it: an int in 64 bits, a float in 32."""
    if isinstance(value, int):
        return TensorToWrite(name, "Int64", (), memoryview(struct.pack("<q", value)))
    return TensorToWrite(name, "Float32", (), memoryview(struct.pack("<f", value)))


class CkptWriter:
    """Writes entries one after another, and the CRC at the end. The caller has to make the file durable.

    Args:
        file: the file to write to.
    """

    def __init__(self, file: HashingFile) -> None:
        self._file, self._crc = file, 0

    def add(self, name: str, dtype: str, dims: tuple[int, ...], nbytes: int, blocks: Iterable[Block]) -> None:
        """Append one entry.

        Args:
            name: its key in the file.
            dtype: its type in MindSpore's words.
            dims: its shape.
            nbytes: size of its content in bytes.
            blocks: its content in order, ``nbytes`` bytes in total.

        Raises:
            OSError: writing failed.
        """
        left = nbytes
        source = iter(blocks)
        pending: Block = b""
        while True:
            need = min(left, CHUNK_BYTES)
            left -= need
            self._put(_opening(name, dtype, dims, need))
            while need:
                block = pending or next(source)
                taken, pending = block[:need], block[need:]
                self._put(taken)
                need -= len(taken)
            if not left:
                break
        assert not pending and next(source, None) is None, name

    def finish(self) -> None:
        """Append the CRC."""
        self._file.write(b"crc_num" + self._crc.to_bytes(10, "big"))

    def _put(self, data: Block) -> None:
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)


def write_entries(target: HashingFile, entries: Iterable[TensorToWrite], cancelled: Callable[[], bool]) -> None:
    """Write all ``entries`` and the CRC. The memory of the entries must not change meanwhile.

    Args:
        target: the file.
        entries: the entries, in order.
        cancelled: is called every 8 MiB; writing ends if it returns True.

    Raises:
        Cancelled: ``cancelled()`` returned True.
        OSError: writing failed.
    """
    writer = CkptWriter(target)
    for entry in entries:
        slices = _until_cancelled(entry.memory, cancelled)
        writer.add(entry.name, entry.dtype, entry.shape, len(entry.memory), slices)
    writer.finish()


def _until_cancelled(memory: memoryview, cancelled: Callable[[], bool]) -> Iterator[memoryview]:
    for at in range(0, len(memory), _SLICE):
        if cancelled():
            raise Cancelled
        yield memory[at : at + _SLICE]


def _opening(name: str, dtype: str, dims: tuple[int, ...], size: int) -> bytes:
    """Return the beginning of a message: everything before the bytes of the tensor."""
    head: bytes = make("TensorHead", dims=dims, tensor_type=dtype).SerializeToString()
    tensor = head + _BYTES_OF_TENSOR + varint(size)
    tag: bytes = make("ValueHead", tag=name).SerializeToString()
    value = tag + _TENSOR + varint(len(tensor) + size) + tensor
    return _VALUE + varint(len(value) + size) + value
