"""Read the bytes of a tensor from a checkpoint file, in parts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import xxhash

from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor
from ttp.store.digest import Progress
from ttp.store.plain_file import open_plain

_BLOCK = 1 << 20


def read_bytes(tensor: FileTensor, start: int = 0, length: int | None = None) -> bytearray:
    """Read bytes of a tensor's content.

    Args:
        tensor: the tensor.
        start: offset of the first byte within the content.
        length: number of bytes; None for all that follow.

    Raises:
        CheckpointError: the file has become shorter since its tensors were located.
        OSError: the file cannot be read.
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


def read_rows(tensor: FileTensor, first: int, last: int) -> np.ndarray:
    """Read the rows from ``first`` up to, but not including, ``last`` of the first axis. A scalar has one row.

    The result has the bits of the elements as unsigned integers of the same size.
    """
    shape = tensor.dims or (1,)
    row = math.prod(shape[1:]) * tensor.item_size
    data = read_bytes(tensor, first * row, (last - first) * row)
    return np.frombuffer(data, bits(tensor.item_size)).reshape(last - first, *shape[1:])


def bits(item_size: int) -> np.dtype:
    """Return a numpy type of this size whose values are equal if and only if their bits are equal."""
    return np.dtype(f"u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size or 1}")


def digest(tensor: FileTensor, progress: Progress | None = None) -> tuple[str, bool]:
    """Return the digest of the content, and whether all elements are equal."""
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
