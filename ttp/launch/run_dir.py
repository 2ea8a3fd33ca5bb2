"""The run directory: files that the processes of one job share on one host. Only its owner can read it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

from ttp.errors import ConfigError
from ttp.launch.proc_files import identity, lives
from ttp.store.durable import replace_file

JOURNALS_FILE = "journals"
LAUNCHER_FILE = "launcher"
PORT_FILE = "port"


def make_private(path: Path) -> None:
    """Create ``path`` and missing directories above it, readable by their owner alone.

    Raises:
        OSError: it cannot be created.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def prepare_run_dir(path: Path) -> Path:
    """Create the run directory (mode 0700), or check that an existing one belongs to this user alone.

    By default it lies below a directory that all users may write to, and it holds the job's token. So a directory that
    another user has prepared is refused. Returns its absolute path: programs may change their current directory.

    Raises:
        ConfigError: it cannot be created, belongs to another user, or others may write to it or replace it.
    """
    path = path.absolute()
    try:
        make_private(path)
        found, above = path.stat(), path.parent.stat()
    except OSError as problem:
        raise ConfigError(
            f"cannot create the run directory {path}: {problem}. Set TTP_RUN_DIR to a local directory"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"the run directory {path} is not a directory. Set TTP_RUN_DIR to another path")
    if found.st_uid != os.getuid():
        raise ConfigError(f"the run directory {path} belongs to uid {found.st_uid}. Set TTP_RUN_DIR to your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may write to the run directory {path}: chmod 700 it, or set TTP_RUN_DIR")
    if _is_shared(path.parent.parent) and above.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"uid {above.st_uid} owns {path.parent} and could replace the run directory in it. Set TTP_RUN_DIR"
        )
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise ConfigError(f"all users may write to {path.parent} and replace the run directory. Set TTP_RUN_DIR")
    return path


def _is_shared(path: Path) -> bool:
    """Return whether all users may make directories there."""
    return bool(path.stat().st_mode & stat.S_IWOTH)


def allow_journal(run_dir: Path, *directories: Path | None) -> None:
    """Allow the controller of this host to write incident files below these directories.

    Ranks of any host tell a controller their ``save_dir``. The controller writes only below directories that it was
    started with, or that are listed in the run directory of its own host, to which only the job's user can write.

    Raises:
        ConfigError: see ``prepare_run_dir``; or the list cannot be written.
    """
    path = prepare_run_dir(run_dir) / JOURNALS_FILE
    known = journals_allowed(run_dir)
    new = [str(directory) for directory in directories if directory is not None and str(directory) not in known]
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, "".join(f"{directory}\0" for directory in new).encode())
        finally:
            os.close(handle)
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem}. Set TTP_RUN_DIR to a writable local directory") from None


def journals_allowed(run_dir: Path) -> frozenset[str]:
    """Return the directories that ``allow_journal`` has allowed; none if the list cannot be read."""
    try:
        text = (run_dir / JOURNALS_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(filter(None, text.split("\0")))


def note_port(run_dir: Path, port: int) -> None:
    """Note the port of a job for commands: the name of a run directory that the user has chosen does not tell it."""
    with contextlib.suppress(OSError):  # they can be told it by --port
        replace_file(run_dir / PORT_FILE, str(port).encode())


def noted_port(run_dir: Path) -> int | None:
    """Return the port that ``note_port`` has noted last; None: there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / PORT_FILE).read_bytes()[:8])
    return None


def note_launcher(run_dir: Path) -> None:
    """Note for commands that this process looks after the ranks of this host."""
    with contextlib.suppress(OSError):  # they know less without it
        replace_file(run_dir / LAUNCHER_FILE, json.dumps(identity(os.getpid())).encode())


def forget_launcher(run_dir: Path) -> None:
    """Undo ``note_launcher``: this process starts no rank again, but may go on."""
    with contextlib.suppress(OSError):
        (run_dir / LAUNCHER_FILE).unlink(missing_ok=True)


def launcher_lives(run_dir: Path | None) -> bool:
    """Return whether a launcher on this host still looks after the job with this run directory, as far as is known."""
    try:
        return run_dir is not None and lives(json.loads((run_dir / LAUNCHER_FILE).read_bytes()[:1024]))
    except (OSError, ValueError, LookupError, TypeError):
        return False
