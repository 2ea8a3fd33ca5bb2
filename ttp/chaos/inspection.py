"""Check what a job has left behind: its checkpoints, and processes and files that should be gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ttp.chaos.hosts import Hosts
from ttp.chaos.launching import clean_environment
from ttp.chaos.record import Found
from ttp.polling import poll
from ttp.processor.local_state.local_piece import is_provisional, ranks_kept
from ttp.store import names
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint

LEAVE_S = 20.0
"""Seconds in which processes may end after the job: controllers stay a while to answer requests, standbys longer."""


def checkpoints(save_dirs: Sequence[Path]) -> list[Found]:
    """Read and verify every checkpoint in these directories, and return them sorted by version."""
    found = []
    for path in (path for save_dir in save_dirs if save_dir.is_dir() for path in sorted(save_dir.iterdir())):
        version = names.parse_checkpoint_name(path.name)
        if version is not None:
            found.append(Found(int(version), tuple(verify_checkpoint(path)), *_pages(path)))
    return sorted(found, key=lambda f: f.version)


def _pages(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    manifest = Manifest.load_or_none(path)
    if manifest is None:
        return (), ()
    earlier = (rank for rank in ranks_kept(manifest.pieces) if is_provisional(manifest.pieces, rank))
    return tuple(int(rank) for rank in manifest.missing_pages), tuple(earlier)


def closing_words(save_dirs: Sequence[Path], hosts: Hosts, numbers: Iterable[int]) -> list[str]:
    """Return the findings about a finished job: those of ``ttp verify``, running processes, left files."""
    words = []
    for save_dir in (save_dir for save_dir in save_dirs if checkpoints([save_dir])):
        command = [sys.executable, "-m", "ttp", "verify", str(save_dir)]
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
        if done.returncode:
            words.append(f"ttp verify: {done.stderr.strip() or done.stdout.strip()}")
    for host in numbers:
        words += [f"left behind on host {host}: {what}" for what in _leftovers(hosts, host)]
    return words


def _leftovers(hosts: Hosts, host: int) -> list[str]:
    poll(lambda: not hosts.leftovers(host), LEAVE_S, 0.1)
    return hosts.leftovers(host)
