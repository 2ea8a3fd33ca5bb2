"""Writes small files whole, and makes files and directories survive a power cut."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_durably(path: Path, data: bytes) -> None:
    """Write ``data`` to the file ``path``, completely or not at all, and return when it is on the disk.

    An old file of that name is replaced, not overwritten, because its bytes may also have another name.

    Raises:
        OSError: the disk refused. The old file is still there, unless only the directory could not be synced.
    """
    replace_file(path, data, durable=True)
    sync_directory(path.parent)


def replace_file(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write ``data`` to the file ``path``, so that readers see all of it or the old file.

    Several processes may write the same file at once.

    Args:
        path: the file.
        data: its bytes.
        durable: have the bytes on the disk before they have the name.
        mode: permissions of the file, of which the umask takes some away.

    Raises:
        OSError: the disk refused; an old file of that name is still there.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")  # containers that share it may share pids
    try:
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with naming(path), os.fdopen(opened, "wb", buffering=0) as file:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error says more
            draft.unlink(missing_ok=True)
        raise


def make_directory(path: Path) -> None:
    """Make ``path`` and its missing parents; on return their names are on the disk. The directory may exist already.

    Raises:
        OSError: the disk refused. What was made is removed, because the next call syncs only what it makes itself.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)
    except OSError:
        for made in missing:
            with suppress(OSError):  # another process may have written there
                made.rmdir()
        raise


def sync_directory(path: Path) -> None:
    """Make the names inside the directory ``path`` durable: creations, renames, removals.

    Raises:
        OSError: the disk refused.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of calls that take a descriptor, which do not contain it."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None or problem.filename is not None:
            raise
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def libc_function(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a function of the C library that takes arguments of these ``ctypes`` types; None if there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = types
    return found
