"""The directory that a command makes: outside of its source, and as a draft until it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether ``path`` is ``directory`` or lies in it, by their real names."""
    place = Path(os.path.realpath(path))
    return Path(os.path.realpath(directory)) in (place, *place.parents)


@contextmanager
def draft_in(home: Path, name: str) -> Iterator[Path]:
    """Make an empty directory below ``home``, to be renamed to ``home/name``. At the end remove what is still there.

    Another host may make the same directory at the same time, with the same process id.
    """
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}.draft-", dir=home))
    draft = hidden / name  # with the usual permissions, unlike ``hidden``
    try:
        draft.mkdir()
        yield draft
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
