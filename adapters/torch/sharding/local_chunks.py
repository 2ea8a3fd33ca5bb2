"""Divides a range of a tensor's memory into boxes of the tensor.

FSDP1 and Megatron's distributed optimizer cut a flat buffer of many parameters into equal ranges, without regard to
where a tensor or one of its rows begins. Checkpoints are made of boxes (offsets and sizes per dimension). A range of a
tensor of n dimensions consists of at most 2n - 1 boxes: a part of the first row, whole rows, a part of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A box of a tensor, and its place in memory.

    Args:
        offsets: position of the box's first element in the tensor, one number per dimension.
        sizes: sizes of the box, one number per dimension.
        strides: strides of the tensor, in elements.
        start: position of the box's first element in the memory, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def of(self, memory: Tensor, begin: int) -> Tensor:
        """Return the elements of this box as a view of ``memory``.

        Args:
            memory: a vector over the memory of the tensor, or over a range of it.
            begin: position of the vector's first element in the tensor's memory, in elements.
        """
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.start - begin)


def boxes(sizes: Sequence[int], strides: Sequence[int], first: int, begin: int, end: int) -> Iterator[LocalChunk]:
    """Yield the boxes of a tensor that lie in the range ``begin .. end`` of the memory, in ascending order.

    Args:
        sizes: sizes of the tensor.
        strides: strides of the tensor, in elements; each must span all dimensions after its own.
        first: position of the tensor's first element in the memory, in elements.
        begin: first position of the range.
        end: position after the last one of the range.

    Raises:
        ValueError: the tensor does not lie in the memory in the order of its elements.
    """
    if prod(sizes) == 0:
        return
    _check_order(sizes, strides)
    for offsets, part in _cut(tuple(sizes), tuple(strides), first, begin, end):
        start = first + sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        yield LocalChunk(offsets, part, tuple(strides), start)


def _check_order(sizes: Sequence[int], strides: Sequence[int]) -> None:
    span = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride < span:
            raise ValueError(f"a tensor of sizes {tuple(sizes)} and strides {tuple(strides)} is not in memory order")
        span = max(span, (size - 1) * stride + span)


def _cut(
    sizes: tuple[int, ...], strides: tuple[int, ...], first: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes; whole rows that follow each other are one box."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if begin >= first + span or end <= first:
        return
    if begin <= first and first + span <= end:
        yield (0,) * len(sizes), sizes
        return
    inner = span - (sizes[0] - 1) * strides[0]  # elements that one row spans
    low = max(0, -(-(begin - first) // strides[0]))  # rows low .. high - 1 lie inside with all of their elements
    high = min(sizes[0], (end - first - inner) // strides[0] + 1)
    if low < high:
        yield from _rows(low - 1, low, sizes, strides, first, begin, end)
        yield (low, *(0,) * (len(sizes) - 1)), (high - low, *sizes[1:])
        yield from _rows(high, high + 1, sizes, strides, first, begin, end)
        return
    at = max(0, begin - first) // strides[0]
    yield from _rows(at, at + 2, sizes, strides, first, begin, end)


def _rows(
    low: int, high: int, sizes: tuple[int, ...], strides: tuple[int, ...], first: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes of the single rows ``low .. high``."""
    for row in range(max(0, low), min(high, sizes[0])):
        for offsets, part in _cut(sizes[1:], strides[1:], first + row * strides[0], begin, end):
            yield (row, *offsets), (1, *part)
