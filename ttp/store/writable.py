"""Checks at the start of a job that checkpoints can be written, so that a mistake is found before a failure."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from ttp.core.restore_choice import LOOK_AGAIN_S
from ttp.errors import ConfigError, StorageAwayError
from ttp.store import durable, names
from ttp.store.disk import Disk

_log = logging.getLogger("ttp.store")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")  # one slash: pathlib makes "s3:/bucket" of "s3://bucket"

_VARIABLE = re.compile(r"\$(\{|[A-Za-z_])")

_HINTS = {
    errno.EACCES: "give this user write permission, or choose another {what}",
    errno.EPERM: "give this user write permission, or choose another {what}",
    errno.EROFS: "the file system is mounted read-only; choose another {what}",
    errno.ENOSPC: "the disk is full (see df), or has no more inodes (df -i); free some, or choose another {what}",
    errno.EDQUOT: "your quota is used up; free some space, or choose another {what}",
    errno.ENOTDIR: "a file is in the way; choose another {what}",
    errno.EEXIST: "a file, or a link to nothing, is in the way; choose another {what}",
    errno.ENAMETOOLONG: "the path is too long; choose another {what}",
    errno.ENOTCONN: "the mount has lost its server; mount it again, or choose another {what}",
    errno.ESTALE: "the mount has lost its server; mount it again, or choose another {what}",
}

_LASTING = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors that no server mends by coming back."""

_AWAY = {errno.EIO, errno.EHOSTDOWN, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of storage that has gone: a restart, perhaps on another host, may find it again."""

_PATH_BYTES_MAX = 4096 - 256
"""The longest path of a directory for checkpoints: Linux takes 4,096 bytes, and the names in it need up to 256."""

PROBE_MAX_S = 3600.0
"""A probe that is so much older than a new one belongs to no living rank."""

FALLBACK = "TTP_FALLBACK_DIR"


def check_places(save_dir: str, fallback_dir: str | None, *, restart: bool = False) -> Path:
    """Check the ``save_dir`` and the fallback, if there is one, by ``check_writable``. Return the ``save_dir``'s path.

    One of the two is enough: a job that was saved to its fallback has to start again while the ``save_dir`` is broken.
    The log then says what is broken. At the first start the fallback must work, though: it is rarely written to, so a
    mistake would be found only when it is needed.

    Args:
        save_dir: as for ``check_writable``.
        fallback_dir: absolute path, or None.
        restart: whether a job was launched before with this ``save_dir``.

    A restart waits for storage that refuses, up to ``sum(LOOK_AGAIN_S)``: a mount may be away for a moment.

    Raises:
        ConfigError: neither directory can be used; the fallback cannot be used and this is not a restart; or both are
            the same directory.
        StorageAwayError: the storage is still away at a restart. The settings are right, so another start may help.
    """
    for pause_s in LOOK_AGAIN_S if restart else ():
        try:
            return _check_places(save_dir, fallback_dir, restart=restart)
        except ConfigError as problem:
            if (code := _errno(problem)) is None or code in _LASTING:
                raise
            _log.warning("%s. Looking again in %g s", problem, pause_s)
            time.sleep(pause_s)
    try:
        return _check_places(save_dir, fallback_dir, restart=restart)
    except ConfigError as problem:
        if restart and _errno(problem) in _AWAY:
            raise StorageAwayError(str(problem)) from problem.__cause__
        raise


def _errno(problem: ConfigError) -> int | None:
    """Return the error number of the call that was refused; None: it is another problem."""
    return getattr(problem.__cause__, "errno", None)


def _check_places(save_dir: str, fallback_dir: str | None, *, restart: bool) -> Path:
    if fallback_dir is None:
        return check_writable(save_dir)
    path = as_path(save_dir)
    if path == Path(fallback_dir):
        raise ConfigError(f"{FALLBACK} is the save_dir itself, {path}; give a directory on other storage, or none")
    broken = [(what, problem) for what, place in (("save_dir", save_dir), (FALLBACK, fallback_dir))
              if (problem := _problem(place, what))]  # fmt: skip
    if len(broken) == 2:
        raise ConfigError("; ".join(str(problem) for _, problem in broken)) from broken[0][1].__cause__
    if broken and broken[0][0] == FALLBACK and not restart:
        raise broken[0][1]
    for what, text in broken:
        _log.error("%s. Checkpoints can only go to the %s", text, "save_dir" if what == FALLBACK else f"{FALLBACK} now")
    if not broken and path.stat().st_dev == Path(fallback_dir).stat().st_dev:
        _log.warning("%s %s is on the file system of the save_dir: when it is full, both are", FALLBACK, fallback_dir)
    return path


def _problem(place: str, what: str) -> ConfigError | None:
    try:
        check_writable(place, what)
    except ConfigError as problem:
        return problem
    return None


def check_writable(save_dir: str, what: str = "save_dir") -> Path:
    """Make ``save_dir`` and rehearse a commit in it: write, sync, rename. Return its absolute path.

    All ranks may call this at the same time.

    Args:
        save_dir: a path, relative to the working directory or absolute.
        what: its name in messages.

    Raises:
        ConfigError: it is not a path of a mounted file system, or a call was refused; the text says what to do.
    """
    path = as_path(save_dir, what)
    probe = path / f"{names.PROBE_PREFIX}{uuid.uuid4().hex}"
    disk = Disk()
    try:
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        durable.make_directory(path)
        try:
            _rehearse(disk, probe)
            with suppress(OSError):
                _remove_old_probes(disk, path, _renamed(probe).stat().st_mtime)
        finally:
            for left in (probe, _renamed(probe)):
                with suppress(OSError):  # the first error says more
                    disk.remove_tree(left)
        records = path / names.INCIDENTS
        if os.path.lexists(records) and not (records.is_dir() and os.access(records, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"{what} {path} cannot hold records of incidents, so `ttp verdict` would call each end of the job "
                f"lost: {records} is no directory that this user may write to; correct that, or choose another {what}"
            )
    except OSError as problem:
        name = errno.errorcode.get(problem.errno or 0, "unknown error")
        hint = _HINTS.get(problem.errno or 0, "check the file system, or choose another {what}").format(what=what)
        raise ConfigError(
            f"{what} {path} cannot hold checkpoints: {problem.strerror or problem} ({name}); {hint}"
        ) from problem
    return path


def as_path(save_dir: str, what: str = "save_dir") -> Path:
    """Return the absolute path of a directory that a user has named.

    Raises:
        ConfigError: it is empty, a URL, contains a variable or the home of nobody, or is not UTF-8, so that other
            processes could not use it.
    """
    text = os.fspath(save_dir)
    if not text.strip():
        raise ConfigError(f"{what} is empty; give the directory where checkpoints shall be kept")
    if "\0" in text:
        raise ConfigError(f"{what} {text!r} contains a null character; choose another {what}")
    if text.encode(errors="replace").decode() != text:
        raise ConfigError(
            f"{what} {text!a} is not UTF-8 as this process reads it; set LC_ALL=C.UTF-8 where the job is launched, or "
            f"choose another {what}"
        )
    if _URL.match(text):
        raise ConfigError(
            f"{what} {text!r} is a URL; ttp writes to mounted file systems only: mount the storage and give its path"
        )
    path = absolute(text)
    if _VARIABLE.search(text) and not os.path.isdir(path):  # noqa: PTH112 - Path's raises if it may not look
        raise ConfigError(f"{what} {text!r} contains a variable, which only a shell replaces: give the path itself")
    if text.startswith("~") and Path.cwd() / text == path:
        raise ConfigError(f"{what} {text!r} is in the home of a user who is not known here; give the path itself")
    return path


def absolute(text: str) -> Path:
    """Return the absolute path of what a user has named, unchecked: for programs that train without ttp, too."""
    path = Path.cwd() / os.path.expanduser(text)  # noqa: PTH111 - Path's raises for a user who is not known
    plain = os.path.normpath(path)
    through_link = ".." in path.parts and os.path.realpath(path) != os.path.realpath(plain)
    return path if through_link else Path(plain)


def _rehearse(disk: Disk, probe: Path) -> None:
    disk.make_directory(probe)
    disk.write(probe / "piece", b"probe")
    disk.sync_directory(probe)
    disk.rename(probe, _renamed(probe))
    disk.sync_directory(probe.parent)


def _remove_old_probes(disk: Disk, directory: Path, now: float) -> None:
    """Remove what ranks have left that were killed while they tried or measured the directory.

    ``now`` is by the clock of the storage: that of this host may be wrong, and probes of other hosts then seem old.
    """
    for left in directory.glob(f"{names.PROBE_PREFIX}*"):
        if now - left.lstat().st_mtime > PROBE_MAX_S:
            disk.remove_tree(left) if left.is_dir() else disk.remove(left)


def _renamed(probe: Path) -> Path:
    return probe.with_name(f"{probe.name}.renamed")
