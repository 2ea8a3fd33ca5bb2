"""Read the bytes of a tensor from a checkpoint file, in parts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor
from ttp.store.digest import Progress
from ttp.store.plain_file import open_plain

_BLOCK = 1 << 20

Box = Sequence[tuple[int, int]]
"""A part of a tensor: along each axis the first index, and the index after the last."""


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


def read_box(tensor: FileTensor, box: Box) -> np.ndarray:
    """Read the elements in a box. A scalar counts as one row.

    The result has the bits of the elements as unsigned integers of the same size. What is read is contiguous in the
    file: whole rows of the first axis along which the box is longer than 1.
    """
    shape = tensor.dims or (1,)
    axis = next((axis for axis, (low, high) in enumerate(box) if high - low > 1), len(shape) - 1)
    row = math.prod(shape[axis + 1 :]) * tensor.item_size
    place = 0
    for (low, _), extent in zip(box[: axis + 1], shape, strict=False):
        place = place * extent + low
    data = read_bytes(tensor, place * row, (box[axis][1] - box[axis][0]) * row)
    rows = np.frombuffer(data, bits(tensor.item_size)).reshape(-1, *shape[axis + 1 :])
    inside = tuple(slice(low, high) for low, high in [(0, len(rows)), *box[axis + 1 :]])
    return rows[inside].reshape([high - low for low, high in box])


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
