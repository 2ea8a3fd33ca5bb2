"""What the ranks of several worlds have to say, from one run of a worker that plays them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class Told:
    """What each rank returned, by case and world.

    Args:
        directory: holds a file for each of them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, case: str, world: int = 4) -> list[dict[str, Any]]:
        files = sorted(self._directory.glob(f"{world} {case}.?.json"))
        assert files, f"no rank has finished {case}"
        return [json.loads(file.read_text()) for file in files]


def run_worker(worker: Path, directory: Path) -> Told:
    """Run it to its end.

    Raises:
        AssertionError: it failed; what it said is in the text.
    """
    done = subprocess.run(
        [sys.executable, str(worker), str(directory)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return Told(directory)
