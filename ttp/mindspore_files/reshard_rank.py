"""Making the file of one target rank, and checking it.

Every tensor is cut anew a few rows at a time, from whichever file holds a part. The file is then read back, and every
element of it compared with the source.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor, index
from ttp.mindspore_files.ckpt_writer import CkptWriter
from ttp.mindspore_files.reshard_copy import blocks, difference
from ttp.mindspore_files.reshard_fit import Plan
from ttp.mindspore_files.tensor_bytes import read_bytes
from ttp.store.digest import HashingFile, Progress


@dataclass(frozen=True, slots=True)
class Made:
    """The file of one rank.

    Args:
        rank: of the target.
        file: its path inside the target.
        size: bytes.
        digest: as in a manifest.
        tensors: how many entries it has.
    """

    rank: int
    file: str
    size: int
    digest: str
    tensors: int


def make_rank(plan: Plan, rank: int, place: Path, file: str, told: Progress) -> Made:
    """Write and check ``place/file``.

    Args:
        plan: what is to be done.
        rank: of the target.
        place: the draft of the target.
        file: path inside of it.
        told: of bytes written, and of bytes checked.

    Raises:
        CheckpointError: what is in the file is not what the source says.
        OSError: the disk refused.
    """
    target = place / file
    target.parent.mkdir(parents=True, exist_ok=True)
    size, digest = _write(plan, rank, target, told)
    wrong = _check(plan, rank, target, told)
    if wrong:
        name, why = next(iter(wrong.items()))
        raise CheckpointError(f"{name} of rank {rank} is not what was to be written ({why}): look at this disk")
    return Made(rank, file, size, digest, len(plan.of_rank(rank)) + len(plan.passed))


def _write(plan: Plan, rank: int, target: Path, told: Progress) -> tuple[int, str]:
    """Size and digest of the file, which is then on the disk."""
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
    """What no strategy cuts: of the source rank of the same number, or of the lowest. A rank's number is its own."""
    held = plan.passed[name]
    tensor = held.get(rank, held[min(held)])
    data = bytes(read_bytes(tensor))
    if name == "cur_rank" and "Int" in tensor.dtype:
        data = rank.to_bytes(tensor.nbytes, "little")
    return tensor, data


def _check(plan: Plan, rank: int, path: Path, told: Progress) -> dict[str, str]:
    """Name -> what is wrong with it in the file."""
    found = index(path)
    wrong: dict[str, str] = {}
    for name, entry in plan.of_rank(rank).items():
        why = difference(entry, rank % plan.devices, found[name], told)
        if why is not None:
            wrong[name] = why
    for name in plan.passed:
        if read_bytes(found[name]) != _passed(plan, rank, name)[1]:
            wrong[name] = "it is not what the source holds"
    return wrong
