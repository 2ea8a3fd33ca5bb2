"""Temporary directories in memory for thousands of small files."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@cache
def _root(pid: int) -> Path:
    made = tempfile.mkdtemp(prefix="ttp-fuzz-", dir=MEMORY)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def place(name: str) -> Path:
    """Return a directory of this name, the same for all inputs of a test."""
    path = _root(os.getpid()) / name
    path.mkdir(parents=True, exist_ok=True)
    return path
