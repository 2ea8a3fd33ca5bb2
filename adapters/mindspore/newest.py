"""Loading that survives bad files: the newest checkpoint that is whole, and why newer ones were not taken."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from ttp.adapters.mindspore.ckpt_reader import read_contents
from ttp.adapters.mindspore.rank_folders import groups_of_manifest
from ttp.adapters.mindspore.recover import step_of
from ttp.config import RankEnv
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store import names
from ttp.store.digest import digest_file
from ttp.store.manifest import MANIFEST, Manifest

log = logging.getLogger("ttp")

ATTEMPTS = 5
SUFFIXES = (".ckpt", ".safetensors")
BREAKPOINT = "_breakpoint.ckpt"
"""What MindSpore writes after an exception; it may be of a step that was not finished, so it comes last."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was whole.

    Args:
        path: its file.
        parameters: as ``mindspore.load_checkpoint`` returns them.
        epoch_num: what was saved under that name (``append_info``, ``append_dict``); None: nothing.
        step_num: the same.
        skipped: newer files, each with the reason why it was not taken.
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

    The newest is the one that was written last; ``*_breakpoint.ckpt`` come last. Checkpoints of ttp go by their step
    and are verified by the digests of their manifest; of other files the CRC is verified, if they have one, and that
    every tensor has the bytes that its shape needs. What is newer and not whole is said in the log.

    Args:
        pattern: with ``*`` as in a shell (``"out/ckpt_0/*.ckpt"``), or a directory: the save_dir of a ttp job, or files
            in it or in its ``rank_N``; or several of these.
        attempts: how many files to try at most.
        rank: whose files; None: this process', as its launcher says.
        load: passed on to ``mindspore.load_checkpoint``, e.g. ``choice_func``.

    Returns:
        The checkpoint, or None when there is none at all.

    Raises:
        CheckpointError: there are some, but the newest ``attempts`` of them are damaged: to begin anew would be wrong.
        UsageError: ``attempts`` is less than 1.
    """
    if attempts < 1:
        raise UsageError(f"attempts={attempts}: at least 1 is wanted")
    patterns = [pattern] if isinstance(pattern, (str, Path)) else list(pattern)
    place = _rank() if rank is None else rank
    skipped: list[str] = []
    found = newest_files(patterns, place, skipped)
    for path in found[:attempts]:
        try:
            loaded = _load(path, load)
        except CheckpointError as problem:
            skipped.append(str(problem))
            log.warning("load_newest skipped %s", problem)
            continue
        epoch, step = (_counter(loaded, name) for name in ("epoch_num", "step_num"))
        log.info("load_newest took %s", path)
        return Loaded(path, loaded, epoch, step, tuple(skipped))
    if not found and not skipped:
        return None
    tried = "; ".join(skipped)
    more = f" ({len(found) - attempts} older files were not tried: raise attempts)" if len(found) > attempts else ""
    raise CheckpointError(f"no checkpoint of {', '.join(map(str, patterns))} is whole{more}: {tried}")


def newest_files(patterns: Iterable[str | Path], rank: int, skipped: list[str]) -> list[Path]:
    """What ``patterns`` mean for ``rank``, in the order to try it in; ``skipped`` gets what has no file for it."""
    saved: dict[Path, int] = {}
    others: dict[Path, tuple[bool, int, tuple[int, int], str]] = {}
    for pattern in patterns:
        for path in _matching(pattern, rank):
            if path.is_dir():
                _saved_by_ttp(path, rank, saved, skipped)
            elif path.suffix in SUFFIXES:
                version = names.parse_checkpoint_name(path.parent.parent.name)
                if version is not None:
                    saved[path] = int(version)
                    continue
                try:
                    written = path.stat().st_mtime_ns
                except OSError:
                    continue  # removed just now
                others[path] = (not path.name.endswith(BREAKPOINT), written, step_of(path.name) or (-1, -1), path.name)
    in_order = sorted(saved, key=lambda path: saved[path], reverse=True)
    return in_order + sorted(others, key=lambda path: others[path], reverse=True)


def _matching(pattern: str | Path, rank: int) -> Iterator[Path]:
    """Files, and directories that bear the name of a checkpoint of ttp."""
    given = Path(pattern)
    if not given.is_dir():
        for found in glob(os.fspath(pattern)):  # noqa: PTH207 - that of Path takes hidden files, which are drafts
            if Path(found).is_dir():
                yield from _matching(found, rank)
            else:
                yield Path(found)
        return
    if names.parse_checkpoint_name(given.name) is not None:
        yield given
        return
    inside = sorted(given.iterdir())
    yield from (path for path in inside if path.is_dir() and names.parse_checkpoint_name(path.name) is not None)
    own = given / f"rank_{rank}"
    yield from (path for path in (*inside, *(sorted(own.iterdir()) if own.is_dir() else ())) if _is_file(path))


def _is_file(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _saved_by_ttp(checkpoint: Path, rank: int, saved: dict[Path, int], skipped: list[str]) -> None:
    """The file in a checkpoint of ttp that holds what ``rank`` holds: its own, or that of a replica."""
    try:
        manifest = Manifest.load(checkpoint)
        file = file_of(manifest, rank)
    except CheckpointError as problem:
        skipped.append(str(problem))
        log.warning("load_newest skipped %s", problem)
        return
    saved[checkpoint / file] = int(manifest.version)


def file_of(manifest: Manifest, rank: int) -> str:
    """The file of a checkpoint that ``rank`` is to load.

    Raises:
        CheckpointError: there is none.
    """
    group = next((ranks for ranks in groups_of_manifest(manifest) if rank in ranks), ())
    for replica in (rank, *group):
        for piece in manifest.pieces:
            if piece.file.startswith(f"rank_{replica}/") and piece.file.endswith(SUFFIXES):
                return piece.file
    raise CheckpointError(f"the checkpoint of step {manifest.version} holds nothing for rank {rank}")


def _load(path: Path, load: Mapping[str, Any]) -> dict[str, Any]:
    """One file, verified and loaded.

    Raises:
        CheckpointError: it is not whole.
    """
    import mindspore

    _verify(path, encrypted=load.get("dec_key") is not None)
    settings = {"format": path.suffix[1:], **load} if path.suffix != ".ckpt" else dict(load)
    try:
        return dict(mindspore.load_checkpoint(str(path), **settings))
    except (ValueError, RuntimeError, OSError, KeyError) as problem:
        raise CheckpointError(f"{path} cannot be loaded: {' '.join(str(problem).split()):.300}") from None


def _verify(path: Path, *, encrypted: bool) -> None:
    checkpoint = path.parent.parent
    if (checkpoint / MANIFEST).is_file():
        _verify_piece(path, f"{path.parent.name}/{path.name}", Manifest.load(checkpoint))
    elif path.suffix == ".ckpt" and not encrypted:
        read_contents(path)


def _verify_piece(path: Path, file: str, manifest: Manifest) -> None:
    piece = next((piece for piece in manifest.pieces if piece.file == file), None)
    if piece is None:
        raise CheckpointError(f"{path} is not in the manifest of its checkpoint")
    try:
        whole = digest_file(path) == (piece.size, piece.digest)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if not whole:
        raise CheckpointError(f"{path} is damaged: it does not have the digest that the manifest says")


def _counter(parameters: Mapping[str, Any], name: str) -> int | None:
    value = parameters.get(name)
    if value is None or isinstance(value, str):
        return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None
    try:
        return int(value.asnumpy().item())
    except (AttributeError, ValueError, OverflowError):
        return None


def _rank() -> int:
    try:
        return RankEnv.from_env().rank
    except ConfigError:
        return 0  # started by hand: one process
