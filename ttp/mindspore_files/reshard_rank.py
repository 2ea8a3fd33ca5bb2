"""Write the file of one target rank, and check it.

Each tensor is cut, a few rows at a time, from the files that hold its parts. Then the new file is read back, and each
of its elements is compared with the source.
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
from ttp.mindspore_files.tensor_bytes import bits, read_bytes, read_rows
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
"""Number of bytes of a target's rows that are handled at once."""


def blocks(entry: TargetTensor, rank: int, size: int = BLOCK) -> Iterator[bytes]:
    """Yield the bytes of a target rank's cell of a tensor, in order.

    Args:
        entry: the tensor.
        rank: the target rank, counted within its stage.
        size: approximate number of bytes per block.
    """
    piece, source = _sizes(entry)
    start = [index * length for index, length in zip(_cell(entry, rank), piece, strict=True)]
    item = entry.sample.item_size
    for first, last in row_blocks(piece, item, size):
        made = np.empty((last - first, *piece[1:]), bits(item))
        low = [start[0] + first, *start[1:]]
        high = [start[0] + last, *(a + b for a, b in zip(start[1:], piece[1:], strict=True))]
        touched = [range(a // n, (b - 1) // n + 1) for a, b, n in zip(low, high, source, strict=True)]
        for cell in itertools.product(*touched):
            box = [
                (max(a, index * n), min(b, (index + 1) * n))
                for a, b, index, n in zip(low, high, cell, source, strict=True)
            ]
            inside = [slice(a - index * n, b - index * n) for (a, b), index, n in zip(box, cell, source, strict=True)]
            rows = read_rows(_part(entry, cell), inside[0].start, inside[0].stop)
            there = tuple(slice(a - at, b - at) for (a, b), at in zip(box, low, strict=True))
            columns = (slice(None), *inside[1:])
            made[there] = rows[columns]
        yield made.tobytes()


def difference(entry: TargetTensor, rank: int, made: FileTensor, told: Progress, size: int = BLOCK) -> str | None:
    """Compare ``made`` with the cell that a target rank should hold.

    Args:
        entry: the tensor.
        rank: the target rank, counted within its stage.
        made: the tensor in the new file.
        told: is called with the number of bytes newly checked.
        size: approximate number of bytes to compare at once.

    Returns:
        The difference in words; None if every element is right.
    """
    sample = entry.sample
    if (made.dtype, made.dims, made.nbytes) != (sample.dtype, entry.piece, entry.piece_bytes):
        return f"it is {made.dtype} {made.dims} but should be {sample.dtype} {entry.piece}"
    piece, source = _sizes(entry)
    indices = [index * length + np.arange(length) for index, length in zip(_cell(entry, rank), piece, strict=True)]
    for first, last in row_blocks(piece, sample.item_size, size):
        rows = read_rows(made, first, last)
        wanted = [indices[0][first:last], *indices[1:]]
        owners = [index // length for index, length in zip(wanted, source, strict=True)]
        places = [index % length for index, length in zip(wanted, source, strict=True)]
        for cell in itertools.product(*(np.unique(owner).tolist() for owner in owners)):
            picks = [np.flatnonzero(owner == index) for owner, index in zip(owners, cell, strict=True)]
            take = [place[pick] for place, pick in zip(places, picks, strict=True)]
            part = read_rows(_part(entry, cell), int(take[0].min()), int(take[0].max()) + 1)
            expected = part[np.ix_(take[0] - take[0].min(), *take[1:])]
            if not np.array_equal(expected, rows[np.ix_(*picks)]):
                return f"elements of its rows {first} to {last - 1} differ from the source"
        told(rows.nbytes)
    return None


def row_blocks(shape: Shape, item_size: int, size: int) -> Iterator[tuple[int, int]]:
    """Divide the rows into blocks of about ``size`` bytes; yield (first row, row after the last) of each."""
    row = math.prod(shape[1:]) * item_size
    if not row:
        return
    step = max(1, size // row)
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def _sizes(entry: TargetTensor) -> tuple[Shape, Shape]:
    """Return the shapes of the target's and of the source's cells. A scalar counts as one row."""
    return entry.piece or (1,), entry.sample.dims or (1,)


def _cell(entry: TargetTensor, rank: int) -> Cell:
    return entry.target.cell(rank) or (0,)


def _part(entry: TargetTensor, cell: Cell) -> FileTensor:
    return entry.parts[cell if entry.full else ()]
