"""Making the file of one target rank: by MindSpore's own conversion where it can, by ours where it cannot.

MindSpore loads whole files. To keep within a bound, and to let any replica stand in for a file that is missing, it is
given files and strategies that are made for the purpose and hold a batch of tensors only. What it makes is copied,
tensor by tensor, into the rank's file; that file is then read back and every element of it compared with the source.
What MindSpore got wrong is made again by our own conversion, and compared again.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ttp.errors import CheckpointError, ConfigError
from ttp.mindspore_files.ckpt_reader import Tensor, index
from ttp.mindspore_files.ckpt_writer import CkptWriter
from ttp.mindspore_files.reshard_copy import BLOCK, blocks, difference, touched
from ttp.mindspore_files.reshard_fit import Plan, TargetTensor
from ttp.mindspore_files.reshard_strategy import Strategy, mindspore, write_for_mindspore
from ttp.mindspore_files.tensor_bytes import read_bytes
from ttp.mindspore_files.tensor_layout import TensorLayout
from ttp.store.digest import HashingFile, Progress

COPIES = 4
"""What MindSpore takes for a tensor, as multiples of the parts it loads and of the part it makes: the file's bytes, the
message parsed of them, the tensor, and what it is gathered and serialized into."""


@dataclass(frozen=True, slots=True)
class Made:
    """The file of one rank.

    Args:
        rank: of the target.
        file: its path inside the target.
        size: bytes.
        digest: as in a manifest.
        tensors: how many entries it has.
        own: name -> why it was converted by us and not by MindSpore.
    """

    rank: int
    file: str
    size: int
    digest: str
    tensors: int
    own: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Batches:
    """Who converts what for one rank: MindSpore in batches, and the rest we, with the reason."""

    mindspore: tuple[tuple[str, ...], ...]
    own: Mapping[str, str]
    scratch: int
    """Bytes on disk of the files that MindSpore is given at once and makes."""


def batches(plan: Plan, rank: int, budget: int) -> Batches:
    """Divide the tensors of a rank so that MindSpore takes no more than ``budget`` bytes for any batch."""
    made: list[list[str]] = [[]]
    own: dict[str, str] = {}
    filled = scratch = 0
    local = rank % plan.devices
    for name, entry in plan.of_rank(rank).items():
        reason = mindspore_cannot(plan, entry)
        loaded = entry.sample.nbytes * touched(entry, local)
        cost = COPIES * (loaded + entry.piece_bytes)
        if reason is None and cost > budget:
            reason = "it is too large for MindSpore to convert within the memory allowed"
        if reason is not None:
            own[name] = reason
            continue
        scratch += loaded + entry.piece_bytes
        if made[-1] and filled + cost > budget:
            made.append([])
            filled = 0
        made[-1].append(name)
        filled += cost
    return Batches(tuple(tuple(batch) for batch in made if batch), own, scratch)


def mindspore_cannot(plan: Plan, entry: TargetTensor) -> str | None:
    """Why MindSpore 2.10 is not even asked."""
    if plan.source is None and plan.target is None:
        return "nothing is cut"
    have = 1 if plan.source is None else plan.source.devices
    want = 1 if plan.target is None else plan.target.devices
    if max(have, want) % min(have, want):
        return f"MindSpore does not convert between {have} and {want} devices"
    if "-" in entry.name:
        return "MindSpore takes the hyphen in its name for that of a pipeline stage"
    if plan.source is not None and entry.name not in plan.source.names:
        return "the source's strategy does not name it"
    if not entry.sample.nbytes:
        return "it is empty"
    return None


def make_rank(plan: Plan, rank: int, place: Path, file: str, budget: int, told: Progress) -> Made:
    """Write and check ``place/file``.

    Args:
        plan: what is to be done.
        rank: of the target.
        place: the draft of the target.
        file: path inside of it.
        budget: bytes that MindSpore may take for tensors.
        told: of bytes written, and of bytes checked.

    Raises:
        CheckpointError: even our own conversion is not what the source says.
        OSError: the disk refused.
    """
    scratch = place / f".scratch-{rank}"
    division = batches(plan, rank, budget)
    own = dict(division.own)
    made: dict[str, Tensor] = {}
    try:
        for number, names in enumerate(division.mindspore):
            converted, failed = _ask_mindspore(plan, rank, names, scratch / str(number))
            made |= converted
            own |= failed
        own |= {name: "MindSpore left it out" for name in plan.of_rank(rank) if name not in made and name not in own}
        target = place / file
        target.parent.mkdir(parents=True, exist_ok=True)
        written = _write(plan, rank, target, made, own, told)
        wrong = _check(plan, rank, target, told)
        if wrong:
            own |= {name: "MindSpore converts it wrongly" for name in wrong if name not in own}
            written = _write(plan, rank, target, made, own, told)
            wrong = _check(plan, rank, target, told)
        if wrong:
            name, why = next(iter(wrong.items()))
            raise CheckpointError(f"{name} of rank {rank} is not what was to be written ({why}): look at this disk")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Made(rank, file, *written, len(plan.of_rank(rank)) + len(plan.passed), own)


# ------------------------------------------------------------------------------------------------ MindSpore's own part


def _ask_mindspore(plan: Plan, rank: int, names: Sequence[str], work: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What MindSpore makes of some tensors, and why it fails for others. It fails for a layout, not for a tensor."""
    try:
        return _by_mindspore(plan, rank, names, work), {}
    except (CheckpointError, ConfigError, OSError):
        raise
    except Exception as problem:  # it raises whatever comes; ours does it instead, and the reason is told
        why = f"MindSpore: {type(problem).__name__}: {_first_line(problem)}"
    alike: dict[tuple[TensorLayout, TensorLayout], list[str]] = {}
    for name in names:
        entry = plan.of_rank(rank)[name]
        alike.setdefault((entry.source, entry.target), []).append(name)
    if len(alike) == 1:
        return {}, dict.fromkeys(names, why)
    made: dict[str, Tensor] = {}
    failed: dict[str, str] = {}
    for number, group in enumerate(alike.values()):
        converted, refused = _ask_mindspore(plan, rank, group, work / str(number))
        made |= converted
        failed |= refused
    return made, failed


def _by_mindspore(plan: Plan, rank: int, names: Sequence[str], work: Path) -> dict[str, Tensor]:
    """Let MindSpore convert some tensors; where they are then."""
    work.mkdir(parents=True)
    src = _strategy_file(work / "source.ckpt", plan.source, names)
    dst = _strategy_file(work / "target.ckpt", plan.target, names)
    ms = mindspore()
    needed = [int(one) for one in ms.rank_list_for_transform(rank, src, dst)]
    files = {one: _stand_in(plan, rank, one, names, work / f"rank_{one}.ckpt") for one in needed}
    made = work / "made.ckpt"
    ms.transform_checkpoint_by_rank(rank, {one: str(path) for one, path in files.items() if path}, str(made), src, dst)
    gc.collect()  # its parameters refer to each other
    for path in files.values():
        if path is not None:
            path.unlink()
    return index(made)


def _strategy_file(path: Path, strategy: Strategy | None, names: Iterable[str]) -> str | None:
    if strategy is None:
        return None
    write_for_mindspore(path, strategy, names)
    return str(path)


def _stand_in(plan: Plan, rank: int, needed: int, names: Iterable[str], path: Path) -> Path | None:
    """The file that source rank ``needed`` would have, of whoever holds the same parts; None: it has none of them."""
    entries = plan.of_rank(rank)
    stage, local = (0, needed) if plan.source is None else divmod(needed, plan.source.devices)
    held = [
        name for name in names if plan.source is None or plan.source.stages[stage].get(name) == entries[name].source
    ]
    if not held:
        return None
    file = HashingFile(path)
    try:
        writer = CkptWriter(file)
        for name in held:
            tensor = entries[name].parts[entries[name].source.cell(local)]
            writer.add(name, tensor.dtype, tensor.kept_dims, tensor.nbytes, _copied(tensor))
        writer.finish()
        file.flush()
    finally:
        file.close()
    return path


# ------------------------------------------------------------------------------------------------------ the rank's file


def _write(
    plan: Plan, rank: int, target: Path, made: Mapping[str, Tensor], own: Mapping[str, str], told: Progress
) -> tuple[int, str]:
    """Size and digest of the file, which is then on the disk."""
    local = rank % plan.devices
    file = HashingFile(target, told)
    try:
        writer = CkptWriter(file)
        for name, entry in plan.of_rank(rank).items():
            if name in own:
                dims = entry.piece if entry.full else entry.sample.kept_dims
                writer.add(name, entry.sample.dtype, dims, entry.piece_bytes, blocks(entry, local))
            else:
                tensor = made[name]
                writer.add(name, tensor.dtype, tensor.kept_dims, tensor.nbytes, _copied(tensor))
        for name in plan.passed:
            tensor, data = _passed(plan, rank, name)
            writer.add(name, tensor.dtype, tensor.kept_dims, len(data), [data])
        writer.finish()
        return file.sync_and_close()
    finally:
        with suppress(OSError):
            file.close()


def _passed(plan: Plan, rank: int, name: str) -> tuple[Tensor, bytes]:
    """What no strategy cuts: of the source rank of the same number, or of the lowest. A rank's number is its own."""
    held = plan.passed[name]
    tensor = held.get(rank, held[min(held)])
    data = bytes(read_bytes(tensor))
    if name == "cur_rank" and "Int" in tensor.dtype:
        data = rank.to_bytes(tensor.nbytes, "little")
    return tensor, data


def _copied(tensor: Tensor) -> Iterator[bytes]:
    for start in range(0, tensor.nbytes, BLOCK):
        yield bytes(read_bytes(tensor, start, min(BLOCK, tensor.nbytes - start)))


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


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), "")[:200]
