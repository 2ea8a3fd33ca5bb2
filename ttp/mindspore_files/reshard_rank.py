"""Write the file of one target rank, and check it.

Each tensor is cut, some megabytes at a time, from the files that hold its parts. Then the new file is read back, and
each of its elements is compared with the source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor, index
from ttp.mindspore_files.ckpt_writer import CkptWriter
from ttp.mindspore_files.reshard_fit import Plan, TargetTensor
from ttp.mindspore_files.tensor_bytes import Box, bits, read_box, read_bytes
from ttp.mindspore_files.tensor_layout import Cell, Shape
from ttp.store.digest import HashingFile, Progress


@dataclass(frozen=True, slots=True)
class Made:
    """The file that was written for one rank.

    Args:
        rank: the target rank.
        file: path of the file below the target directory.
        size: size in bytes.
        digest: digest of the file, as in a manifest.
        tensors: number of entries.
    """

    rank: int
    file: str
    size: int
    digest: str
    tensors: int


def make_rank(plan: Plan, rank: int, place: Path, file: str, told: Progress) -> Made:
    """Write the file ``place/file`` of a target rank, and check it.

    Args:
        plan: the conversion.
        rank: the target rank.
        place: the draft directory.
        file: path of the file below it.
        told: is called with the number of bytes newly written or checked.

    Raises:
        CheckpointError: the file differs from the source.
        OSError: writing failed.
    """
    target = place / file
    target.parent.mkdir(parents=True, exist_ok=True)
    size, digest = _write(plan, rank, target, told)
    wrong = _check(plan, rank, target, told)
    if wrong:
        name, why = next(iter(wrong.items()))
        raise CheckpointError(f"{name} of rank {rank} differs from what was written ({why}): check the target's disk")
    return Made(rank, file, size, digest, len(plan.of_rank(rank)) + len(plan.passed))


def _write(plan: Plan, rank: int, target: Path, told: Progress) -> tuple[int, str]:
    """Write the file durably. Return its size in bytes and its digest."""
    file = HashingFile(target, told)
    try:
        writer = CkptWriter(file)
        for name, entry in plan.of_rank(rank).items():
            dims = entry.piece if entry.full else entry.sample.kept_dims
            writer.add(name, entry.sample.dtype, dims, entry.piece_bytes, blocks(entry, rank % plan.devices))
        for name in plan.passed:
            tensor, data = _passed(plan, rank, name)
            writer.add(name, tensor.dtype, tensor.kept_dims, len(data), [data])
        writer.finish()
        return file.sync_and_close()
    finally:
        with suppress(OSError):
            file.close()


def _passed(plan: Plan, rank: int, name: str) -> tuple[FileTensor, bytes]:
    """Return an entry that no strategy cuts, from the source rank of the same number, or else from the lowest rank.

    The entry ``cur_rank`` gets the number of the target rank.
    """
    held = plan.passed[name]
    tensor = held.get(rank, held[min(held)])
    data = bytes(read_bytes(tensor))
    if name == "cur_rank" and "Int" in tensor.dtype:
        data = rank.to_bytes(tensor.nbytes, "little")
    return tensor, data


def _check(plan: Plan, rank: int, path: Path, told: Progress) -> dict[str, str]:
    """Compare the file with the source. Return name -> problem for the tensors that differ."""
    found = index(path)
    wrong: dict[str, str] = {}
    for name, entry in plan.of_rank(rank).items():
        why = difference(entry, rank % plan.devices, found[name], told)
        if why is not None:
            wrong[name] = why
    for name in plan.passed:
        if read_bytes(found[name]) != _passed(plan, rank, name)[1]:
            wrong[name] = "it differs from the source"
    return wrong


# ------------------------------------------------------------------------------------------------- cutting and checking
#
# Cutting and checking use different arithmetic on purpose: ``blocks`` intersects boxes (which rows and columns of a
# part of the source lie in the part of the target); ``difference`` computes, for each index of the target, the part of
# the source and the place in it, and compares elements.


BLOCK = 8 << 20
"""Number of bytes of a tensor that are handled at once."""

_INDEX_BYTES = 8
"""Bytes of an index of an element, along one axis, when elements are compared."""


def blocks(entry: TargetTensor, rank: int, size: int = BLOCK) -> Iterator[bytes]:
    """Yield the bytes of a target rank's cell of a tensor, in order.

    Args:
        entry: the tensor.
        rank: the target rank, counted within its stage.
        size: largest number of bytes to read at once.
    """
    piece, source = _sizes(entry)
    start = [index * length for index, length in zip(_cell(entry, rank), piece, strict=True)]
    item = entry.sample.item_size
    for within in boxes(piece, source, item, size):
        made = np.empty([b - a for a, b in within], bits(item))
        target = [(at + a, at + b) for at, (a, b) in zip(start, within, strict=True)]
        touched = [range(a // n, (b - 1) // n + 1) for (a, b), n in zip(target, source, strict=True)]
        for cell in itertools.product(*touched):
            box = [
                (max(a, index * n), min(b, (index + 1) * n))
                for (a, b), index, n in zip(target, cell, source, strict=True)
            ]
            inside = [(a - index * n, b - index * n) for (a, b), index, n in zip(box, cell, source, strict=True)]
            there = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(box, target, strict=True))
            made[there] = read_box(_part(entry, cell), inside)
        yield made.tobytes()


def difference(entry: TargetTensor, rank: int, made: FileTensor, told: Progress, size: int = BLOCK) -> str | None:
    """Compare ``made`` with the cell that a target rank should hold.

    Args:
        entry: the tensor.
        rank: the target rank, counted within its stage.
        made: the tensor in the new file.
        told: is called with the number of bytes newly checked.
        size: largest number of bytes to read at once.

    Returns:
        The difference in words; None if every element is right.
    """
    sample = entry.sample
    if (made.dtype, made.dims, made.nbytes) != (sample.dtype, entry.piece, entry.piece_bytes):
        return f"it is {made.dtype} {made.dims} but should be {sample.dtype} {entry.piece}"
    piece, source = _sizes(entry)
    start = [index * length for index, length in zip(_cell(entry, rank), piece, strict=True)]
    for box in boxes(piece, source, sample.item_size, min(size, size // _INDEX_BYTES * sample.item_size)):
        rows = read_box(made, box)
        wanted = [at + np.arange(low, high) for at, (low, high) in zip(start, box, strict=True)]
        owners = [index // length for index, length in zip(wanted, source, strict=True)]
        places = [index % length for index, length in zip(wanted, source, strict=True)]
        for cell in itertools.product(*(np.unique(owner).tolist() for owner in owners)):
            picks = [np.flatnonzero(owner == index) for owner, index in zip(owners, cell, strict=True)]
            take = [place[pick] for place, pick in zip(places, picks, strict=True)]
            part = read_box(_part(entry, cell), [(int(place.min()), int(place.max()) + 1) for place in take])
            expected = part[np.ix_(*(place - place.min() for place in take))]
            if not np.array_equal(expected, rows[np.ix_(*picks)]):
                return f"elements of its rows {box[0][0]} to {box[0][1] - 1} differ from the source"
        told(rows.nbytes)
    return None


def boxes(piece: Shape, source: Shape, item_size: int, size: int) -> Iterator[Box]:
    """Divide a target's cell into boxes of up to ``size`` bytes, in the order of its elements.

    Args:
        piece: shape of the cell.
        source: shape of the source's cells. Whole rows of them are read, which may be longer.
        item_size: size of an element in bytes.
        size: largest number of bytes to read at once.
    """
    if not math.prod(piece) * item_size:
        return
    rows = [max(math.prod(shape[n + 1 :]) for shape in (piece, source)) * item_size for n in range(len(piece))]
    axis = next((axis for axis, row in enumerate(rows) if row <= size), len(piece) - 1)
    step = max(1, size // rows[axis])
    for places in itertools.product(*map(range, piece[:axis])):
        for first in range(0, piece[axis], step):
            around = [(0, extent) for extent in piece[axis + 1 :]]
            yield [*((at, at + 1) for at in places), (first, min(first + step, piece[axis])), *around]


def _sizes(entry: TargetTensor) -> tuple[Shape, Shape]:
    """Return the shapes of the target's and of the source's cells. A scalar counts as one row."""
    return entry.piece or (1,), entry.sample.dims or (1,)


def _cell(entry: TargetTensor, rank: int) -> Cell:
    return entry.target.cell(rank) or (0,)


def _part(entry: TargetTensor, cell: Cell) -> FileTensor:
    return entry.parts[cell if entry.full else ()]
