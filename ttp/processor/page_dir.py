"""Where the rank-local pages of a job lie on this host."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ttp.config import RankEnv

_SHARED_MEMORY = Path("/dev/shm")


def page_directory(run_dir: Path, env: RankEnv) -> Path:
    """A directory of this user and job in shared memory, else under ``run_dir``. Created with mode 0700."""
    key = hashlib.sha256(f"{run_dir}|{env.master_addr}|{env.run_id}".encode()).hexdigest()[:12]
    for parent, name in ((_SHARED_MEMORY, f"ttp-{os.getuid()}-{key}"), (run_dir, "pages")):
        directory = parent / name
        try:
            directory.mkdir(mode=0o700, parents=parent is not _SHARED_MEMORY, exist_ok=True)
        except OSError:
            continue
        status = directory.lstat()
        if status.st_uid == os.getuid() and not directory.is_symlink() and os.access(directory, os.W_OK):
            return directory
    raise OSError(f"neither {_SHARED_MEMORY} nor {run_dir} can hold rank-local pages")
