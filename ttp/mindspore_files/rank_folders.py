"""Directories with a folder ``rank_N`` per rank: find the checkpoints, and which ranks hold the same state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttp.errors import CheckpointError, ToldAs, UsageError, strerror_of
from ttp.mindspore_files.group_info import NAME, read_group_info
from ttp.mindspore_files.redundancy import ReplicaGroups, groups_of_stages, same
from ttp.mindspore_files.strategy_file import read_stages
from ttp.store.manifest import MANIFEST, Manifest

_FOLDER = re.compile(r"rank_(0|[1-9]\d{0,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Known:
    """Which ranks hold the same state, and the source of this knowledge.

    Args:
        groups: groups of ranks with the same state. Every rank of the job is in exactly one group.
        told_by: the source, in words.
        manifest: the manifest, if ttp wrote the checkpoint; otherwise None.
    """

    groups: ReplicaGroups
    told_by: str
    manifest: Manifest | None = None


def rank_folders(directory: Path) -> dict[int, Path]:
    """Find the folders ``rank_N`` in a directory, and return rank -> folder.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    with ToldAs(CheckpointError, f"cannot list {directory}", OSError, reason=strerror_of):
        entries = [(entry, _FOLDER.fullmatch(entry.name)) for entry in Path(directory).iterdir() if entry.is_dir()]
    return {int(found[1]): entry for entry, found in entries if found}


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the ``.ckpt`` files in the folder of a rank; hidden files are drafts and left out.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    with ToldAs(CheckpointError, f"cannot list {folder}", OSError, reason=strerror_of):
        return sorted(f.name for f in folder.iterdir() if f.suffix == ".ckpt" and not f.name.startswith("."))


Stamp = tuple[int, int, int] | None


def stamp(file: Path) -> Stamp:
    """Return inode, size and time of a file, which tell if it is replaced or written to; None: it cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def known_replicas(
    directory: Path,
    *,
    strategy: Path | None = None,
    group_info: Sequence[Path] = (),
    data_parallel: bool = False,
    ranks: int | None = None,
) -> Known:
    """Find out which ranks hold the same state: from the arguments, the manifest, or the ranks' ``group_info.pb``.

    Args:
        directory: the directory with the folders of the ranks.
        strategy: a strategy file, or a directory with the strategy files of all stages.
        group_info: ``group_info.pb`` files.
        data_parallel: whether all ranks hold the same state.
        ranks: number of ranks of the job if there is no manifest; None for the highest rank with a folder plus one.

    Raises:
        UsageError: neither the arguments nor files tell it.
        CheckpointError: a file that tells it cannot be read, or two of them contradict each other.
    """
    folders = rank_folders(directory)
    told = strategy is not None or bool(group_info) or data_parallel
    manifest, unread = _manifest(directory, needed=not told)
    size = manifest.world_size if manifest else ranks or max(folders, default=-1) + 1
    if strategy is not None:
        groups, told_by = groups_of_stages(read_stages(strategy))[0], f"the strategy {strategy}"
    elif data_parallel:
        groups, told_by = (tuple(range(size)),) if size else (), "data parallelism"
        if not (manifest or ranks):
            told_by += f" (of {size} ranks, as the highest folder says; --ranks gives another number)"
    elif manifest and not group_info:
        groups, told_by = groups_of_manifest(manifest), "the manifest"
    else:
        files = list(group_info) or sorted(path for f in folders.values() if (path := f / NAME).is_file())
        if not files:
            raise UsageError(
                f"it is not known which ranks of {directory} hold the same state: give --strategy, --group-info, or "
                "--data-parallel if all of them do"
            )
        groups = _complete(_joined(files), size)
        told_by = ", ".join(map(str, files[:3])) + (", ..." if files[3:] else "")
    count = sum(map(len, groups))
    if manifest and count != size:
        raise CheckpointError(f"{told_by} is for {count} ranks, but by its manifest {directory} was saved by {size}")
    return Known(groups, told_by + unread, manifest)


def _manifest(directory: Path, *, needed: bool) -> tuple[Manifest | None, str]:
    """Return the manifest, if there is one, and words for a damaged one that is not needed."""
    if not (directory / MANIFEST).exists():
        return None, ""
    try:
        return Manifest.load(directory), ""
    except CheckpointError as problem:
        if needed:
            raise
        return None, f"; digests were not checked, as {problem}"


def groups_of_manifest(manifest: Manifest) -> ReplicaGroups:
    """Group the ranks that hold the same shards."""
    held: dict[int, list[str]] = {rank: [] for rank in range(manifest.world_size)}
    for shard in sorted(manifest.groups):
        for rank in manifest.groups[shard]:
            held.setdefault(int(rank), []).append(shard)
    return same(held)


def _joined(files: Iterable[Path]) -> ReplicaGroups:
    groups: dict[int, tuple[int, ...]] = {}
    for file in files:
        replicas = read_group_info(file).replicas
        for rank in replicas:
            if groups.setdefault(rank, replicas) != replicas:
                raise CheckpointError(
                    f"{file} says that ranks {list(replicas)} hold the same state, another file says "
                    f"{list(groups[rank])}: they are not of one job"
                )
    return tuple(sorted(set(groups.values())))


def _complete(groups: ReplicaGroups, size: int) -> ReplicaGroups:
    """Add each rank that is in no group as a group of its own."""
    told = {rank for group in groups for rank in group}
    return tuple(sorted([*groups, *((rank,) for rank in range(size) if rank not in told)]))
