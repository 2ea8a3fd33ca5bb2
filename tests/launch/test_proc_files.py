"""Processes whose name is no text: the kernel has cut that of a script in the middle of a letter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ttp.launch.leases import worker_of
from ttp.launch.proc_files import start_of
from ttp.launch.worker_stops import _ignores
from ttp.processor.liveness.stacks import take

ROOT = Path(__file__).parents[2]


def script(folder: Path, does: str) -> Path:
    """Return a script with 15 bytes of its name in ``/proc``, the last of which is the first half of a letter."""
    path = folder / "fourteen-bytesé.sh"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return path


def test_a_program_below_it_can_import_ttp(tmp_path: Path) -> None:
    path = script(tmp_path, f'"{sys.executable}" -c "import ttp"; exit $?')
    env = {**os.environ, "TTP_PORT": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([path], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_seen_like_any_other(tmp_path: Path) -> None:
    with subprocess.Popen([script(tmp_path, "read line")], stdin=subprocess.PIPE) as process:
        assert worker_of(process.pid, {os.getpid()}) == os.getpid()
        assert not _ignores(process.pid, signal.SIGTERM)
        assert start_of(process.pid) > 0
        assert "no handler that dumps stacks" in take(process.pid, tmp_path, 1.0)
