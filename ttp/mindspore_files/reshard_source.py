"""Read a directory of per-rank checkpoints: which files belong to one step, and which of them are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ttp.core.layout import ranks_text
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files.ckpt_reader import FileTensor, crc_problem, index
from ttp.mindspore_files.rank_folders import Stamp, checkpoint_names, rank_folders, stamp
from ttp.mindspore_files.redundancy_plan import BREAKPOINT, step_of
from ttp.mindspore_files.tensor_bytes import read_bytes
from ttp.store.catalog import newest_whole, scan
from ttp.store.digest import Watch
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.verify import name_problems, piece_problems
from ttp.store.walk import walk_back

T = TypeVar("T")

Label = tuple[int, int]
"""Epoch and step from a file's name, such as ``...-2_12.ckpt``."""

STEP_KEYS = ("global_step", "step_num", "epoch_num", "batch_num")
"""Entries that are equal on all ranks in the files of one step."""

_Key = tuple[bool, Label]
"""What orders the steps: whether it is no breakpoint, then epoch and step; (-1, -1) if the name has none."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one step, one per rank.

    Args:
        directory: the directory of the checkpoint.
        files: rank -> its file.
        held: rank -> name -> tensor, for the files that are not damaged.
        damaged: rank -> the problem of its file, in words.
        manifest: the manifest, if ttp wrote the checkpoint; otherwise None.
        label: epoch and step in the files' names; None if the names have none.
        notes: what was skipped, in words.
        stamps: rank -> the stamp of its file before it was read, see ``rank_folders``.
        version: number of finished updates; None if neither a manifest nor an entry tells it.
    """

    directory: Path
    files: Mapping[int, Path]
    held: Mapping[int, Mapping[str, FileTensor]]
    damaged: Mapping[int, str]
    manifest: Manifest | None
    label: Label | None
    notes: tuple[str, ...]
    stamps: Mapping[int, Stamp]
    version: int | None

    def check_unchanged(self) -> None:
        """Check that the files are still those that were verified.

        Raises:
            CheckpointError: one was replaced, written to or removed.
        """
        for rank in self.held:
            if stamp(self.files[rank]) != self.stamps[rank]:
                text = f"{self.files[rank]} was changed while it was read"
                raise CheckpointError(f"{text}; nothing was written: start again")


class DamagedError(CheckpointError):
    """Raised when the files of a step cannot be used because some are damaged; an older step may be usable."""


def open_newest(directory: Path, watch: Watch, use: Callable[[Source], T]) -> T:
    """Open the newest step that can be used, and return the result of ``use`` for it.

    If there is a manifest, every digest is recomputed; otherwise the CRC of each file that has one.

    Args:
        directory: a directory with ``rank_0``, ``rank_1``, ..., with or without a manifest; or a ``save_dir``.
        watch: is called at the beginning of each activity with its name and number of bytes.
        use: function that takes the files of a step; raises ``DamagedError`` if an older step should be tried.

    Raises:
        UsageError: the directory does not exist, or holds no such files.
        CheckpointError: the files are of different steps, or none is whole; or ``use`` raised it.
    """
    directory, notes = _checkpoint_in(directory, watch)
    folders = rank_folders(directory)
    if not folders:
        raise UsageError(
            f"{directory} holds no rank_0, rank_1, ...: give the directory of a checkpoint as MindSpore's "
            "ModelCheckpoint or ttp writes it"
        )
    steps, passed = _steps(folders)
    reasons: list[str] = [*notes, *passed]

    def open_one(step: tuple[_Key, Mapping[int, Path]]) -> T:
        key, files = step
        try:
            return use(_read(directory, step_of(next(iter(files.values())).name), files, reasons, watch))
        except DamagedError as problem:
            reasons.append(f"passed over {_key_text(key)}: {problem}")
            raise

    opened, skipped = walk_back(steps, open_one, not_whole=DamagedError)
    if not opened:
        untried = len(steps) - len(skipped)
        more = [f"{untried} older steps were not tried: to try them, remove the newer files"] if untried else []
        raise CheckpointError("; ".join([*dict.fromkeys(skipped), *more]))
    return opened[0]


def _read(
    directory: Path, label: Label | None, files: Mapping[int, Path], notes: Sequence[str], watch: Watch
) -> Source:
    manifest = _manifest(directory)
    stamps = {rank: stamp(file) for rank, file in files.items()}
    damaged = _damage(directory, manifest, files, sum(found[1] for found in stamps.values() if found), watch)
    held: dict[int, Mapping[str, FileTensor]] = {}
    for rank, file in sorted(files.items()):
        if rank in damaged:
            continue
        try:
            held[rank] = index(file)
        except CheckpointError as problem:
            damaged[rank] = str(problem)
    if not held:
        raise DamagedError(f"no file in {directory} is whole: {'; '.join(damaged.values())}")
    check_steps(held)
    told = (*notes, *damaged.values())
    return Source(directory, files, held, damaged, manifest, label, told, stamps, _version(manifest, held))


def _manifest(directory: Path) -> Manifest | None:
    if not (directory / MANIFEST).is_file():
        return None
    try:
        return Manifest.load(directory)
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}. Restore it; or remove it, and give --src-strategy") from None


def _version(manifest: Manifest | None, held: Mapping[int, Mapping[str, FileTensor]]) -> int | None:
    if manifest is not None:
        return int(manifest.version)
    for key in STEP_KEYS[:2]:
        for entries in held.values():
            if key in entries and entries[key].item_size in (4, 8) and "Int" in entries[key].dtype:
                return int.from_bytes(read_bytes(entries[key])[: entries[key].item_size], "little")
    return None


def _checkpoint_in(directory: Path, watch: Watch) -> tuple[Path, list[str]]:
    """Return the directory of the checkpoint, which for a ``save_dir`` is its newest whole one, and notes on others."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: give one that holds rank_0, rank_1, ...")
    directory = directory.absolute()
    if rank_folders(directory) or not (steps := [entry for entry in scan(directory) if entry.version is not None]):
        return directory, []
    try:
        newest, skipped = newest_whole(directory, watch("looking for the newest", None))
    except CheckpointError as problem:
        lone = next((entry.path for entry in steps if entry.kind == "foreign"), None)
        advice = "" if lone is None else f". To convert one that has no manifest, give its directory, such as {lone}"
        raise CheckpointError(f"{problem}{advice}") from None
    return newest, [f"skipped {reason}" for reason in skipped]


def _steps(folders: Mapping[int, Path]) -> tuple[list[tuple[_Key, dict[int, Path]]], list[str]]:
    """Return the steps of which every rank has a file, and notes on newer steps that were skipped.

    The newest step comes first, and breakpoints, which may be of unfinished steps, last.
    """
    choice: dict[int, dict[_Key, Path]] = {}
    for rank, folder in folders.items():
        files = [folder / name for name in checkpoint_names(folder)]
        if not files and any(folder.glob("*.safetensors")):
            raise UsageError(f"{folder} holds safetensors: convert them with mindspore.safetensors_to_ckpt first")
        keyed = {_key(path.name): path for path in files}
        if len(keyed) != len(files):
            raise CheckpointError(
                f"{folder} holds several files of one step ({', '.join(path.name for path in files[:4])}): keep one"
            )
        if keyed:
            choice[rank] = keyed
    if not choice:
        raise UsageError(f"no rank_* folder in {next(iter(folders.values())).parent} holds a .ckpt file")
    common = set.intersection(*(set(keyed) for keyed in choice.values()))
    if not common:
        seen = {rank: [_key_text(key) for key in sorted(keyed)] for rank, keyed in sorted(choice.items())}
        raise CheckpointError(f"there is no step of which every rank has a file (epoch_step of each rank: {seen})")
    keys = sorted(common, reverse=True)
    newer = sorted({one for keyed in choice.values() for one in keyed if one > keys[0]})
    notes = [f"passed over {_key_text(one)}: not every rank has it" for one in newer]
    return [(one, {rank: keyed[one] for rank, keyed in choice.items()}) for one in keys], notes


def _key(name: str) -> _Key:
    return not name.endswith(BREAKPOINT), step_of(name) or (-1, -1)


def _key_text(key: _Key) -> str:
    whole, (epoch, step) = key
    return ("a file without a step" if epoch < 0 else f"{epoch}_{step}") + ("" if whole else " (a breakpoint)")


def _damage(
    directory: Path, manifest: Manifest | None, files: Mapping[int, Path], size: int, watch: Watch
) -> dict[int, str]:
    """Verify the files by the manifest, or by their CRC. Return rank -> problem, for the files with a problem."""
    if manifest is None:
        told = watch("verifying", size)
        checked = {rank: crc_problem(file, told) for rank, file in files.items()}
        return {rank: problem for rank, problem in checked.items() if problem is not None}
    for problem in name_problems(directory, manifest):
        raise CheckpointError(f"{directory}: {problem}")
    by_file = {file.relative_to(directory).as_posix(): rank for rank, file in files.items()}
    listed = {piece.file for piece in manifest.pieces}
    damaged = {
        rank: f"{file} is not in the manifest, so it cannot be verified"
        for file, rank in by_file.items()
        if file not in listed
    }
    for problem in piece_problems(directory, manifest, watch("verifying", manifest.size)):
        file = next((name for name in by_file if f"piece {name} " in problem), None)
        if file is not None:
            damaged[by_file[file]] = problem
    return damaged


def check_steps(held: Mapping[int, Mapping[str, FileTensor]]) -> None:
    """Check that all files are of the same step.

    Raises:
        DamagedError: they are not. The text says which ranks have which step.
    """
    for key in STEP_KEYS:
        seen: dict[bytes, list[int]] = {}
        for rank, entries in held.items():
            if key in entries:
                seen.setdefault(bytes(read_bytes(entries[key])), []).append(rank)
        if len(seen) > 1:
            told = "; ".join(f"{key} {_number(value)}: {ranks_text(ranks)}" for value, ranks in sorted(seen.items()))
            raise DamagedError(f"the files are of different steps ({told})")


def _number(value: bytes) -> int:
    return int.from_bytes(value, "little", signed=True)
