"""Said at the start, not at the failure: can checkpoints be written here?"""

from __future__ import annotations

import errno
import os
import re
import uuid
from pathlib import Path

from ttp.errors import ConfigError
from ttp.store import names
from ttp.store.disk import Disk

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_HINTS = {
    errno.EACCES: "give this user write permission, or choose another save_dir",
    errno.EPERM: "give this user write permission, or choose another save_dir",
    errno.EROFS: "the file system is mounted read-only; choose another save_dir",
    errno.ENOSPC: "the disk is full; free some space, or choose another save_dir",
    errno.EDQUOT: "your quota is used up; free some space, or choose another save_dir",
    errno.ENOTDIR: "a file is in the way; choose another save_dir",
    errno.EEXIST: "a file is in the way; choose another save_dir",
    errno.ENAMETOOLONG: "the path is too long; choose another save_dir",
}


def check_writable(save_dir: str) -> Path:
    """Make ``save_dir`` and do there once, in small, what a commit does. Returns its absolute path.

    Every rank may call it at the same time.

    Raises:
        ConfigError: it is no path of a mounted file system, or something of this is refused; says what to do.
    """
    path = _as_path(save_dir)
    probe = path / f"{names.PROBE_PREFIX}{uuid.uuid4().hex}"
    disk = Disk()
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            _rehearse(disk, probe)
        finally:
            for left in (probe, _renamed(probe)):
                disk.remove_tree(left)
    except OSError as problem:
        name = errno.errorcode.get(problem.errno or 0, "unknown error")
        hint = _HINTS.get(problem.errno or 0, "check the file system, or choose another save_dir")
        raise ConfigError(
            f"save_dir {path} cannot hold checkpoints: {problem.strerror or problem} ({name}); {hint}"
        ) from problem
    return path


def _as_path(save_dir: str) -> Path:
    text = os.fspath(save_dir)
    if not text.strip():
        raise ConfigError("save_dir is empty; give the directory where checkpoints shall be kept")
    if _URL.match(text):
        raise ConfigError(
            f"save_dir {text!r} is a URL; ttp writes to mounted file systems only: mount the storage and give its path"
        )
    return Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - resolve() would follow links of the user's


def _rehearse(disk: Disk, probe: Path) -> None:
    disk.make_directory(probe)
    disk.write(probe / "piece", b"probe")
    disk.sync_directory(probe)
    disk.rename(probe, _renamed(probe))
    disk.sync_directory(probe.parent)


def _renamed(probe: Path) -> Path:
    return probe.with_name(f"{probe.name}.renamed")
