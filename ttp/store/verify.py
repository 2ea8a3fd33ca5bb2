"""Checks that a checkpoint agrees with its manifest, because frameworks load a flipped byte without an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ttp.core.restore_choice import DAMAGED, MISSING
from ttp.errors import CheckpointError
from ttp.store import names
from ttp.store.digest import Progress, digest_file
from ttp.store.disk import Disk
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.share import WHOLE, Share


def verify_checkpoint(
    path: Path, progress: Progress | None = None, share: Share = WHOLE, *, fresh: bool = False
) -> list[str]:
    """Read the pieces of the checkpoint at ``path`` and return its problems in words; empty: it is whole.

    A file that the manifest does not list is not a problem, see ``unlisted_files``.

    Args:
        path: directory of the checkpoint.
        progress: called with the number of bytes newly read; for all pieces they add up to ``Manifest.size``.
        share: the part of the pieces to read.
        fresh: see ``plain_file.chunks``.
    """
    try:
        manifest = Manifest.load(path)
    except CheckpointError as problem:
        return [str(problem)]
    return [*name_problems(path, manifest), *piece_problems(path, manifest, progress, share, fresh=fresh)]


def name_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return one problem if the directory is named for another version than its manifest has; else an empty list."""
    named = names.parse_checkpoint_name(path.name)
    if named is None or named == manifest.version:
        return []
    return [f"the directory is named for version {named}, but its manifest is of version {manifest.version}"]


def size_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return one problem for each piece that is missing or has another size. Costs a ``stat`` per piece."""
    found = ((piece, _size(path / piece.file)) for piece in manifest.pieces)
    return [describe(piece.file, size, piece.size) for piece, size in found if size != piece.size]


def piece_problems(
    path: Path, manifest: Manifest, progress: Progress | None = None, share: Share = WHOLE, *, fresh: bool = False
) -> Iterator[str]:
    """Read the pieces of ``share``, compare their digests with the manifest, and yield each problem in words."""
    for piece in share.of(manifest.pieces):
        file = path / piece.file
        size = _size(file)
        if size != piece.size:
            yield describe(piece.file, size, piece.size)
            continue
        try:
            read, digest = digest_file(file, progress, fresh=fresh)
        except OSError as problem:
            yield f"piece {piece.file} cannot be read: {problem.strerror or problem}"
            continue
        if (read, digest) != (piece.size, piece.digest):
            yield f"piece {piece.file}{DAMAGED}: its digest is {digest}, the manifest says {piece.digest}"


def unlisted_files(path: Path, manifest: Manifest) -> list[str]:
    """Return the paths of files in the checkpoint that its manifest does not list. They are harmless and not verified.

    Directories that cannot be listed are skipped, and links are not followed.
    """
    listed = {MANIFEST, *(piece.file for piece in manifest.pieces)}
    return sorted(file for file in _files(os.fspath(path)) if file not in listed)


def _files(root: str) -> Iterator[str]:
    """Yield the paths, relative to ``root``, of all entries but directories. Not recursive, as trees may be deep."""
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            found = list(os.scandir(os.path.join(root, folder)))  # noqa: PTH118 - a path of its own costs ten times that
        except OSError:
            continue
        for entry in found:
            inside = f"{folder}/{entry.name}" if folder else entry.name
            if _is_folder(entry):
                folders.append(inside)
            else:
                yield inside


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def describe(file: str, size: int | str | None, wanted: int) -> str:
    """Return what is wrong with a piece, as a text.

    Args:
        file: the piece, relative to the checkpoint.
        size: its bytes; None if it is missing; the reason, as a text, if it cannot be read.
        wanted: its bytes according to the manifest.
    """
    if size is None:
        return f"piece {file}{MISSING}"
    if isinstance(size, str):
        return f"piece {file} cannot be read: {size}"
    return f"piece {file} has {size} bytes instead of {wanted}"


def _size(file: Path) -> int | str | None:
    """Return the bytes of a regular file; None if there is none; the reason, as a text, if the size is unknown."""
    try:
        return Disk().size(file)
    except OSError as problem:
        return problem.strerror or str(problem)
