"""Recovery from redundancy: examine the ranks' folders, and write a directory with a good file for each rank."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ttp.core.messages import Piece
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files.ckpt_reader import read_contents
from ttp.mindspore_files.rank_folders import Known, checkpoint_names, rank_folders, stamp
from ttp.mindspore_files.redundancy_plan import Outcome, Seen, by_template, for_rank, newest_first, recover
from ttp.mindspore_files.target import draft_in, is_inside
from ttp.store.catalog import restorable, scan
from ttp.store.digest import HashingFile, Progress, digest_file
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.walk import NotTriedError, walk_back

MAPPING = "recovered.json"


@dataclass(frozen=True, slots=True)
class Recovery:
    """A checkpoint that was examined, and the decision for each rank.

    Args:
        directory: the directory with the folders of the ranks.
        template: name of the file in each folder, with ``*`` for the rank.
        seen: the state of each rank's own file.
        outcome: which file each rank loads.
        known: which ranks hold the same state, and the source of this knowledge.
    """

    directory: Path
    template: str
    seen: dict[int, Seen]
    outcome: Outcome
    known: Known

    def file_for(self, rank: int) -> str | None:
        """Return the file that ``rank`` has to load, as a path below ``directory``; None if there is none."""
        source = next((fate.source for fate in self.outcome.fates if fate.rank == rank), None)
        return None if source is None else self.seen[source].file

    def mapping(self) -> dict[str, str | None]:
        """Return the file that each rank loads, None if there is none. The keys are strings, as JSON needs them."""
        return {str(fate.rank): self.file_for(fate.rank) for fate in self.outcome.fates}


def examine(
    directory: Path,
    known_replicas: Callable[[Path], Known],
    step: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> tuple[Recovery, list[str]]:
    """Find the newest checkpoint that can be rebuilt for every rank, from its own file or that of a replica.

    If there is none, return the newest one; its outcome says which ranks cannot be rebuilt. Nothing is written.

    Args:
        directory: a directory with the folders of the ranks, or with checkpoints that have them.
        known_replicas: function that returns which ranks of a directory hold the same state.
        step: epoch and step of the checkpoint; None for any.
        progress: is called with the number of bytes newly read.

    Returns:
        The checkpoint, and the reasons why newer ones were skipped.

    Raises:
        CheckpointError: there is no checkpoint, or the directory cannot be listed.
        UsageError: it is not known which ranks hold the same state.
    """
    seen: list[Recovery] = []
    unknown: list[UsageError] = []

    def open_one(one: _Place | CheckpointError | UsageError) -> Recovery:
        if isinstance(one, UsageError):
            unknown.append(one)
        if not isinstance(one, _Place):
            raise NotTriedError(str(one))
        found = _examine(one, progress)
        seen.append(found)
        for fate in found.outcome.lost:
            text = f"{found.template} in {one.directory}: rank {fate.rank} cannot be rebuilt: {fate.why}"
            raise CheckpointError(text)
        return found

    complete, skipped = walk_back(_places(directory, known_replicas, step), open_one)
    if complete:
        return complete[0], skipped
    if seen:
        return seen[0], []
    if unknown and (step is None or len(unknown) == len(skipped)):
        raise unknown[0]
    asked = f" of epoch {step[0]}, step {step[1]}" if step else ""
    if not skipped:
        raise CheckpointError(f"{directory}: no rank_N has a checkpoint{asked}")
    raise CheckpointError(f"{directory}: no checkpoint{asked} can be used: {'; '.join(dict.fromkeys(skipped))}")


@dataclass(frozen=True, slots=True)
class _Place:
    """The files of one checkpoint, at most one per rank.

    Args:
        directory: the directory with the folders of the ranks.
        known: which ranks hold the same state.
        template: the name of the files, see ``by_template``.
        names: rank -> name of its file.
    """

    directory: Path
    known: Known
    template: str
    names: Mapping[int, str]


def _places(
    directory: Path, known_replicas: Callable[[Path], Known], step: tuple[int, int] | None
) -> Iterator[_Place | CheckpointError | UsageError]:
    inside = [directory]
    if not rank_folders(directory):  # a checkpoint need not be whole: replicas may replace damaged files
        inside = [entry.path for entry in restorable(scan(directory))]
    for place in inside:
        try:
            known = known_replicas(place)
            folders = rank_folders(place)
            _check_known(place, known, folders)
            together = by_template({rank: checkpoint_names(folder) for rank, folder in folders.items()})
        except (CheckpointError, UsageError) as problem:
            yield problem
            continue
        for template in newest_first(together, known.groups, step):
            yield _Place(place, known, template, together[template])


def _check_known(directory: Path, known: Known, folders: Mapping[int, Path]) -> None:
    strangers = sorted(set(folders) - {rank for group in known.groups for rank in group})
    if strangers:
        raise CheckpointError(
            f"{known.told_by} does not mention rank {strangers[0]}, which has a folder in {directory}"
        )


def _examine(place: _Place, progress: Progress | None) -> Recovery:
    directory, known = place.directory, place.known
    folders = rank_folders(directory)
    pieces = {piece.file: piece for piece in known.manifest.pieces} if known.manifest else {}
    seen = {}
    for rank in sorted(rank for group in known.groups for rank in group):
        name = place.names.get(rank)
        if name is None:
            missing = f"it has no {for_rank(place.template, rank)}" if rank in folders else "it has no folder"
            seen[rank] = Seen(problem=missing)
        else:
            seen[rank] = _see(directory, f"rank_{rank}/{name}", pieces, progress)
    return Recovery(directory, place.template, seen, recover(seen, known.groups, "no other rank holds the same"), known)


def _see(directory: Path, file: str, pieces: dict[str, Piece], progress: Progress | None) -> Seen:
    try:
        before = stamp(directory / file)
        contents = read_contents(directory / file, progress)
        piece = pieces.get(file)
        if piece is not None and digest_file(directory / file) != (piece.size, piece.digest):
            return Seen(file, None, f"{file} does not have the digest that the manifest states")
    except CheckpointError as problem:
        return Seen(file, None, str(problem).replace(f"{directory}{os.sep}", ""))
    except OSError as problem:
        return Seen(file, None, f"{file} cannot be read: {problem.strerror or problem}")
    return Seen(file, contents, stamp=before)


def write(recovery: Recovery, out: Path, way: str, progress: Callable[[int], None] | None = None) -> None:
    """Create the directory ``out`` with a folder for each rank that can be rebuilt, or only a JSON file (``map``).

    If this fails, ``out`` does not exist. The source is never changed.

    Args:
        recovery: the checkpoint and the decisions.
        out: the directory to create, or the file for ``map``. It must not exist.
        way: ``map``: a JSON file that names the file of each rank; ``link``: hard links, which copy nothing and remain
            if the source is removed; ``copy``: copies.
        progress: is called with the number of bytes newly copied.

    Raises:
        UsageError: ``out`` exists, or lies inside the source.
        CheckpointError: writing failed, or a copy differs from what was read.
    """
    out = out.absolute()
    if os.path.lexists(out):
        raise UsageError(f"{out} exists: give a path that does not exist")
    if is_inside(out, recovery.directory):
        raise UsageError(f"{out} is inside {recovery.directory}, which is never changed: give a path outside of it")
    try:
        make_directory(out.parent)
        if way == "map":
            write_durably(out, _document(recovery))
            return
        with draft_in(out.parent, out.name) as draft:
            _fill(recovery, draft, way, progress)
            sync_directory(draft)
            draft.rename(out)
            sync_directory(out.parent)
    except OSError as problem:
        raise CheckpointError(f"cannot create {out}: {_words(problem)}") from None


def _fill(recovery: Recovery, draft: Path, way: str, progress: Callable[[int], None] | None) -> None:
    for fate in recovery.outcome.fates:
        if fate.source is None:
            continue
        seen = recovery.seen[fate.source]
        folder = draft / f"rank_{fate.rank}"
        folder.mkdir()
        source, target = recovery.directory / seen.file, folder / for_rank(recovery.template, fate.rank)
        if way == "link":
            os.link(source, target)
        else:
            _copy(source, target, progress)
        if stamp(source) != seen.stamp:
            raise CheckpointError(f"{source} was changed after it had been examined: start again")
        sync_directory(folder)
    write_durably(draft / MAPPING, _document(recovery))


def _copy(source: Path, target: Path, progress: Callable[[int], None] | None) -> None:
    with source.open("rb") as file, HashingFile(target, progress) as copy:
        while block := file.read(1 << 20):
            copy.write(block)
        written = copy.sync_and_close()
    if digest_file(target) != written or digest_file(source) != written:
        raise CheckpointError(f"the copy of {source} differs from the source: check the disk")


def _document(recovery: Recovery) -> bytes:
    document = {
        "source": str(recovery.directory.absolute()),
        "files": recovery.mapping(),
        "lost": {str(fate.rank): fate.why for fate in recovery.outcome.lost},
        "disagreements": list(recovery.outcome.disagreements),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _words(problem: OSError) -> str:
    if problem.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
        return f"{problem.strerror}: hard links need the same file system and files that you own. Use --by copy"
    return f"{problem.strerror or problem}"
