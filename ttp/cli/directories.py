"""The paths that commands take: a ``save_dir``, or one checkpoint in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from ttp.errors import CheckpointError, UsageError
from ttp.store import names
from ttp.store.catalog import CatalogEntry, scan
from ttp.store.history import FILE
from ttp.store.manifest import MANIFEST
from ttp.store.names import INCIDENTS


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current directory
        raise typer.BadParameter("the path is empty (an unset variable?): give the save_dir of a job")
    return Path(text)


SaveDir = Annotated[Path, typer.Argument(metavar="DIR", help="The save_dir of a job.", parser=_path)]
CheckpointOrDir = Annotated[
    Path,
    typer.Argument(metavar="DIR|CKPT", help="The save_dir of a job, or one checkpoint in it.", parser=_path),
]


def existing(path: Path) -> Path:
    """Return ``path`` as an absolute path.

    Raises:
        UsageError: there is no such directory.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} does not exist: give the save_dir of a job, or a checkpoint in it") from None
    except (OSError, ValueError) as problem:  # ValueError: no file can have such a name
        raise UsageError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is not a directory: give the save_dir of a job, or a checkpoint in it")
    return path.absolute()


def save_dir_of(path: Path) -> Path:
    """Return the ``save_dir`` around ``path``, if that is a directory of incidents with a history; else ``path``."""
    inside = path.absolute().name == INCIDENTS and os.path.lexists(path / FILE)
    return path.absolute().parent if inside else path


def fallback_of(directory: Path) -> Path | None:
    """Return the directory in TTP_FALLBACK_DIR, which a restart also looks into; None: there is none besides this."""
    fallback = Path(os.environ.get("TTP_FALLBACK_DIR") or directory)
    return None if fallback == directory else fallback


def holds_ours(place: Path) -> bool:
    """Return whether ttp has written anything into ``place``, a ``save_dir`` or its directory of incidents.

    Raises:
        CheckpointError: ``place`` cannot be listed.
    """
    logs = (place / INCIDENTS).is_dir() or (place / FILE).is_file()
    return logs or any(entry.kind != "foreign" for entry in scan(place))


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is, or was meant to be, one checkpoint; otherwise it is taken for a ``save_dir``."""
    named = names.parse_checkpoint_name(path.name) is not None or names.parse_superseded_name(path.name) is not None
    try:
        return named or names.is_draft(path.name) or (path / MANIFEST).is_file()
    except OSError:
        return False


def bears_name(entry: CatalogEntry) -> bool:
    """Return whether the entry has the name of a checkpoint, whatever it contains."""
    return entry.version is not None and entry.kind in ("checkpoint", "foreign")


def checkpoint_meant(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest one if ``path`` is a ``save_dir``.

    Raises:
        UsageError: there is no such directory.
        CheckpointError: the ``save_dir`` holds no checkpoint.
    """
    given = existing(path)
    if is_checkpoint(given):
        return given
    newest = next((entry for entry in scan(given) if bears_name(entry)), None)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {given}")
    return newest.path
