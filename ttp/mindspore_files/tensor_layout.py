"""Compute how MindSpore cuts a tensor over the devices of a pipeline stage, without files or arrays.

The devices of a stage form a matrix; rank r is its r-th element in row-major order. Each axis of a tensor is cut over
some axes of that matrix (counted from the right), or is not cut. With optimizer parallelism, the first axis of each
slice is cut once more over the ranks that would otherwise hold equal slices: over groups of ``opt_size`` of them, in
the order of their ranks. So every strategy cuts a tensor into a grid of equal cells, and each rank holds one cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Cell = tuple[int, ...]
"""The position of a cell in the grid: the index along each axis of the tensor, from 0."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor is cut.

    Args:
        devices: shape of the device matrix.
        axes: for each axis of the tensor, the axes of the device matrix over which it is cut, counted from the right,
            outermost first; empty if it is not cut.
        opt_size: number of parts into which optimizer parallelism cuts each slice. 0 and 1: one; -1: as many as there
            are ranks with equal slices.
        opt_step: the difference between the ranks of neighbouring parts, as the strategy states it.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    opt_size: int = 0
    opt_step: int = 0

    @property
    def device_count(self) -> int:
        """Number of ranks of the stage."""
        return math.prod(self.devices)

    @property
    def copies(self) -> int:
        """Number of ranks that would hold equal slices without optimizer parallelism."""
        return math.prod(self._size(axis) for axis in _unused(self))

    @property
    def opt_parts(self) -> int:
        """Number of parts into which optimizer parallelism cuts each slice."""
        return self.copies if self.opt_size == -1 else max(1, self.opt_size)

    @property
    def grid(self) -> Cell:
        """Number of cells along each axis of the tensor."""
        parts = [math.prod(self._size(axis) for axis in cut) for cut in self.axes]
        if parts:
            parts[0] *= self.opt_parts
        return tuple(parts)

    def cell(self, rank: int) -> Cell:
        """Return the cell that ``rank`` (counted within its stage) holds."""
        return _cell(self, rank)

    def full_shape(self, piece: Shape) -> Shape:
        """Return the shape of the whole tensor, given the shape ``piece`` of a cell."""
        return tuple(size * parts for size, parts in zip(piece, self.grid, strict=True))

    def piece_shape(self, full: Shape) -> Shape | None:
        """Return the shape of a cell of a tensor of shape ``full``; None if the tensor cannot be cut like this."""
        if any(size % parts for size, parts in zip(full, self.grid, strict=True)):
            return None
        return tuple(size // parts for size, parts in zip(full, self.grid, strict=True))

    def holders(self) -> dict[Cell, list[int]]:
        """Return the ranks of the stage that hold each cell, in order."""
        found: dict[Cell, list[int]] = {}
        for rank in range(self.device_count):
            found.setdefault(self.cell(rank), []).append(rank)
        return found

    def _size(self, axis: int) -> int:
        return self.devices[len(self.devices) - 1 - axis]


def problems(layout: TensorLayout) -> Iterator[str]:
    """Yield the contradictions within a layout, in words."""
    if any(size < 1 for size in layout.devices) or not layout.devices:
        yield f"the device matrix {list(layout.devices)} is not valid"
        return
    used = [axis for cut in layout.axes for axis in cut]
    if any(not 0 <= axis < len(layout.devices) for axis in used):
        yield f"the tensor map {readable(layout)} does not fit the device matrix {list(layout.devices)}"
        return
    if len(set(used)) != len(used):
        yield f"the tensor map {readable(layout)} cuts two axes over the same devices"
        return
    yield from _opt_problems(layout)


def _opt_problems(layout: TensorLayout) -> Iterator[str]:
    parts = layout.opt_parts
    if layout.opt_size < -1 or layout.opt_step < -1:
        yield f"opt_weight_shard_size {layout.opt_size} or opt_weight_shard_step {layout.opt_step} is not valid"
    elif parts > 1 and not layout.axes:
        yield "a scalar cannot be cut by optimizer parallelism"
    elif layout.copies % parts:
        yield (
            f"opt_weight_shard_size is {parts}, but {layout.copies} ranks hold equal slices: "
            "they cannot be divided into groups of that size"
        )
    elif parts > 1 and layout.opt_step not in (steps := opt_steps(layout)):
        yield (
            f"opt_weight_shard_step is {layout.opt_step}, but with the device matrix {list(layout.devices)} and the "
            f"tensor map {readable(layout)} the ranks that share a slice are {steps[0]} apart"
        )


def opt_steps(layout: TensorLayout) -> list[int]:
    """Return the difference between ranks with neighbouring parts of a slice: of the first two, and the average."""
    parts = layout.opt_parts
    return [_copy(layout, 1), _copy(layout, parts - 1) // (parts - 1)]


def readable(layout: TensorLayout) -> str:
    """Return the tensor map of a layout in MindSpore's notation."""
    cuts = [-1 if not cut else cut[0] if len(cut) == 1 else list(cut) for cut in layout.axes]
    return str(cuts)


def uncut(dimensions: int, devices: int = 1) -> TensorLayout:
    """Return the layout of a tensor that every rank holds whole."""
    return TensorLayout((devices,), ((),) * dimensions)


@lru_cache(maxsize=1 << 16)
def _cell(layout: TensorLayout, rank: int) -> Cell:
    cell = [_mixed(layout, rank, cut) for cut in layout.axes]  # the slice without optimizer parallelism
    if cell and layout.opt_parts > 1:
        cell[0] = cell[0] * layout.opt_parts + _mixed(layout, rank, _unused(layout)) % layout.opt_parts
    return tuple(cell)


def _mixed(layout: TensorLayout, rank: int, axes: tuple[int, ...]) -> int:
    """Return a rank's coordinates along some axes of the device matrix as one number, the outermost first."""
    number = 0
    for axis in axes:
        size = layout.devices[len(layout.devices) - 1 - axis]
        inner = math.prod(layout.devices[len(layout.devices) - axis :])
        number = number * size + rank // inner % size
    return number


def _copy(layout: TensorLayout, number: int) -> int:
    """Return the ``number``-th rank (from 0) of those that hold the slice of rank 0 without optimizer parallelism."""
    rank = 0
    for axis in reversed(_unused(layout)):
        number, at = divmod(number, layout.devices[len(layout.devices) - 1 - axis])
        rank += at * math.prod(layout.devices[len(layout.devices) - axis :])
    return rank


def _unused(layout: TensorLayout) -> tuple[int, ...]:
    """Return the axes of the device matrix over which nothing is cut, outermost first."""
    used = {axis for cut in layout.axes for axis in cut}
    return tuple(axis for axis in reversed(range(len(layout.devices))) if axis not in used)
