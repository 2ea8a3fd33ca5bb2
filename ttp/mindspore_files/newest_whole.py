"""``load_newest``: load the newest whole checkpoint into MindSpore, and report why newer ones were skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

from ttp.config import RankEnv
from ttp.core.layout import ranks_text
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.mindspore_files.ckpt_reader import read_contents
from ttp.mindspore_files.rank_folders import groups_of_manifest, rank_folders
from ttp.mindspore_files.redundancy_plan import BREAKPOINT, step_of
from ttp.store import names
from ttp.store.catalog import CatalogEntry, look, restorable, scan, sound
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.walk import ATTEMPTS, NotTriedError, walk_back

log = logging.getLogger("ttp")

SUFFIXES = (".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded.

    Args:
        path: the file that was loaded.
        parameters: the result of ``mindspore.load_checkpoint``.
        epoch_num: the entry ``epoch_num``, as ``append_info`` or ``append_dict`` saved it; None if there is none.
        step_num: the same for the entry ``step_num``.
        skipped: newer files that were not loaded, each with the reason, in words.
    """

    path: Path
    parameters: Mapping[str, Any]
    epoch_num: int | None = None
    step_num: int | None = None
    skipped: tuple[str, ...] = field(default=())


def load_newest(
    pattern: str | Path | Iterable[str | Path], *, attempts: int = ATTEMPTS, rank: int | None = None, **load: Any
) -> Loaded | None:
    """Load the newest checkpoint that is whole.

    Checkpoints of ttp are tried first, the one of the highest step first. Each is verified by the digests in its
    manifest, including the files of other ranks, so that all ranks load the same step. Other files follow, the last
    written first; ``*_breakpoint.ckpt`` come last. In these the CRC, if there is one, and the size of each tensor are
    verified. Newer checkpoints that were skipped are logged with the reason.

    Args:
        pattern: a pattern with ``*`` as in a shell (``"out/ckpt_0/*.ckpt"``), or a directory, or several of these. A
            directory may be the ``save_dir`` of a ttp job, or hold the files, itself or in its ``rank_N``.
        attempts: largest number of checkpoints to try.
        rank: the rank whose files to load; None for this process's rank as its launcher states it, 0 without a
            launcher.
        load: further arguments for ``mindspore.load_checkpoint``, such as ``choice_func``.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, but the newest ``attempts`` of them are damaged, so training must not
            silently begin from scratch. Or only other ranks have checkpoints, or a directory cannot be listed.
        UsageError: ``attempts`` is less than 1, or the newest checkpoint is cut for another number of ranks.
    """
    if attempts < 1:
        raise UsageError(f"attempts={attempts}: it has to be at least 1")
    patterns = [pattern] if isinstance(pattern, (str, Path)) else list(pattern)
    rank, world_size = _place(rank)
    try:
        candidates = newest_first(patterns, rank)
    except OSError as problem:
        raise CheckpointError(f"cannot read {problem.filename}: {problem.strerror or problem}") from None
    opened, skipped = walk_back(candidates, lambda one: _open(one, rank, world_size, load), attempts=attempts)
    for reason in skipped:
        log.warning("load_newest skipped %s", reason)
    if opened:
        log.info("load_newest took %s", opened[0].path)
        return replace(opened[0], skipped=tuple(skipped))
    if not candidates:
        return None
    untried = len(candidates) - len(skipped)
    more = f" ({untried} older ones were not tried: raise attempts)" if untried else ""
    tried = "; ".join(skipped)
    raise CheckpointError(f"no checkpoint of {', '.join(map(str, patterns))} is whole{more}: {tried}")


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate for the newest whole checkpoint.

    Args:
        checkpoint: a directory with the name of a checkpoint of ttp; None for a single file.
        files: the files that matched; if there are none, the rank's file in ``checkpoint`` is meant.
    """

    checkpoint: CatalogEntry | None
    files: tuple[Path, ...]


def newest_first(patterns: Iterable[str | Path], rank: int) -> list[Found]:
    """Return the candidates that match ``patterns`` and are for ``rank``, newest first."""
    saved: dict[Path, Found] = {}
    others: dict[Path, tuple[bool, int, tuple[int, int], str]] = {}
    for pattern in patterns:
        for found in _matching(Path(pattern), rank):
            if isinstance(found, CatalogEntry):
                saved[found.path] = Found(found, ())
            elif not _is_file(found):
                continue
            elif names.parse_checkpoint_name(found.parent.parent.name) is not None:
                checkpoint = found.parent.parent
                known = saved.get(checkpoint)
                if known is None:
                    saved[checkpoint] = Found(look(checkpoint), (found,))
                elif known.files:  # one attempt for all files: the checkpoint is whole or not
                    saved[checkpoint] = replace(known, files=(*known.files, found))
            else:
                others[found] = _age(found)
    in_order = sorted(saved.values(), key=_version, reverse=True)
    return in_order + [Found(None, (path,)) for path in sorted(others, key=lambda path: others[path], reverse=True)]


def _version(found: Found) -> int:
    assert found.checkpoint is not None
    return -1 if found.checkpoint.version is None else found.checkpoint.version


def _age(path: Path) -> tuple[bool, int, tuple[int, int], str]:
    try:
        written = path.stat().st_mtime_ns
    except OSError:  # it was removed just now
        written = -1
    return not path.name.endswith(BREAKPOINT), written, step_of(path.name) or (-1, -1), path.name


def _matching(given: Path, rank: int) -> Iterator[Path | CatalogEntry]:
    """Yield the files that match, and the matching directories that are checkpoints of ttp.

    Raises:
        CheckpointError: a directory has checkpoints of other ranks, and none of ``rank``.
    """
    if given.is_file():
        yield given
        return
    if not given.is_dir():
        root = next(parent for parent in (*given.parents, Path()) if parent.is_dir())  # brackets in it are no pattern
        wanted = os.fspath(given.relative_to(root))
        for name in glob(wanted, root_dir=root):  # noqa: PTH207 - Path.glob matches hidden files, which are drafts
            if (root / name).is_dir():
                yield from _matching(root / name, rank)
            else:
                yield root / name
        return
    if names.parse_checkpoint_name(given.name) is not None:
        yield look(given)
        return
    if (given / MANIFEST).exists():
        yield _made_by_reshard(given)
        return
    entries = scan(given)
    saved = list(restorable(entries))
    folders = rank_folders(given)
    own = sorted(folders[rank].iterdir()) if rank in folders else []
    files = [path for path in (*(entry.path for entry in entries), *own) if _is_file(path)]
    others = [] if saved or files else [r for r, folder in folders.items() if any(map(_is_file, folder.iterdir()))]
    if others:
        raise CheckpointError(
            f"{given} has checkpoints of {ranks_text(sorted(others))}, but none of rank {rank}, which would begin anew "
            "beside ranks that go on: make one with `ttp recover`, or with `ttp reshard` if the number of ranks changed"
        )
    yield from saved
    yield from files


def _made_by_reshard(directory: Path) -> CatalogEntry:
    """Return a checkpoint whose directory does not have the name of one."""
    try:
        manifest = Manifest.load(directory)
    except CheckpointError as problem:
        return CatalogEntry(directory, None, "checkpoint", problem=str(problem))
    return CatalogEntry(directory, manifest.version, "checkpoint", manifest)


def _is_file(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _open(found: Found, rank: int, world_size: int | None, load: Mapping[str, Any]) -> Loaded:
    """Verify and load one checkpoint.

    Raises:
        CheckpointError: the checkpoint is not whole, or holds no file for the rank.
        UsageError: see ``file_of``.
    """
    if found.checkpoint:
        path, vouched = _file_in(found.checkpoint, found.files, rank, world_size)
    else:
        path, vouched = found.files[0], False
    if not vouched and path.suffix == ".ckpt" and load.get("dec_key") is None:
        read_contents(path)
    loaded = _load(path, load)
    epoch, step = (_counter(loaded, name) for name in ("epoch_num", "step_num"))
    return Loaded(path, loaded, epoch, step)


def _file_in(checkpoint: CatalogEntry, files: Sequence[Path], rank: int, world_size: int | None) -> tuple[Path, bool]:
    """Return the file to load, one of ``files`` if these are given, and whether a manifest has verified it."""
    if checkpoint.kind == "foreign":  # written by the original MindIO, which writes no manifest
        folder = checkpoint.path / f"rank_{rank}"
        there = files or tuple(filter(_is_file, folder.glob("*")))
        if not there:
            raise NotTriedError(f"{checkpoint.path} has no file of rank {rank}, and no manifest that lists replicas")
        return max([path for path in there if path.parent == folder] or there, key=_age), False
    manifest = sound(checkpoint)  # verify all files, so that a damaged one makes every rank skip this step
    listed = {checkpoint.path / piece.file for piece in manifest.pieces}
    if files and not listed.intersection(files):
        raise CheckpointError(f"{files[0]} is not in the manifest of its checkpoint")
    if len(files) == 1:
        return files[0], True
    meant = checkpoint.path / file_of(manifest, rank, world_size)
    return meant if meant in files or not files else next(path for path in files if path in listed), True


def file_of(manifest: Manifest, rank: int, world_size: int | None = None) -> str:
    """Return the file of a checkpoint that ``rank`` has to load, as a path below the checkpoint.

    If all ranks hold the same, any rank can load it, also one that the job did not have when it saved.

    Args:
        manifest: the checkpoint.
        rank: the rank that loads.
        world_size: number of ranks of its job; None: not known.

    Raises:
        UsageError: the checkpoint is cut into slices for another number of ranks.
        CheckpointError: the checkpoint holds no file for the rank.
    """
    groups = groups_of_manifest(manifest)
    other_size = world_size is not None and world_size != manifest.world_size
    if len(groups) > 1 and (other_size or rank >= manifest.world_size):  # a CheckpointError would load an older step
        of_job = f" of a job of {world_size} ranks" if other_size else ""
        raise UsageError(
            f"the checkpoint of step {manifest.version} was saved by {manifest.world_size} ranks in {len(groups)} "
            f"slices, and holds none for rank {rank}{of_job}: convert it with `ttp reshard`"
        )
    group = groups[0] if len(groups) == 1 else next((ranks for ranks in groups if rank in ranks), ())
    for replica in (rank, *group):
        for piece in manifest.pieces:
            if piece.file.startswith(f"rank_{replica}/") and piece.file.endswith(SUFFIXES):
                return piece.file
    raise CheckpointError(f"the checkpoint of step {manifest.version} holds nothing for rank {rank}")


def _load(path: Path, load: Mapping[str, Any]) -> dict[str, Any]:
    import mindspore

    settings = {"format": path.suffix[1:], **load} if path.suffix != ".ckpt" else dict(load)
    try:
        return dict(mindspore.load_checkpoint(str(path), **settings))
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path} cannot be loaded: {' '.join(str(problem).split()):.300}") from None


def _counter(parameters: Mapping[str, Any], name: str) -> int | None:
    value = parameters.get(name)
    if value is None or isinstance(value, str):
        return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None
    try:
        return int(value.asnumpy().item())
    except (AttributeError, ValueError, OverflowError):
        return None


def _place(rank: int | None) -> tuple[int, int | None]:
    """Return the rank whose files to load, and the number of ranks of its job; None: not known."""
    try:
        env = RankEnv.from_env()
    except ConfigError:
        return rank or 0, None  # started without a launcher: one process
    return (env.rank, env.world_size) if rank in (None, env.rank) else (rank or 0, None)
