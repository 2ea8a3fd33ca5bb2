"""Runs workers in processes forked from one that has imported torch, and collects what their ranks return."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.forked import Forked

TIMEOUT_S = 280


class Told:
    """What each rank returned, by case and world.

    Args:
        directory: holds a file for each rank.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, case: str, world: int = 4) -> list[dict[str, Any]]:
        files = sorted(self._directory.glob(f"{world} {case}.?.json"))
        assert files, f"no rank has finished {case}"
        return [json.loads(file.read_text()) for file in files]


def run_worker(module: str, directory: Path) -> Told:
    """Run a worker that plays all ranks to its end.

    Raises:
        AssertionError: it failed; the text has its output.
    """
    _run(module, directory, [(directory,)])
    return Told(directory)


def run_ranks(module: str, directory: Path, *arguments: object, world: int = 2) -> list[list[Any]]:
    """Run the ranks of a job to their end, with directory, rank and ``arguments``. Returns the JSON that each printed.

    Raises:
        AssertionError: a rank failed; the text has all output.
    """
    return [
        [json.loads(line) for line in said.splitlines()]
        for said in _run(module, directory, [(directory, rank, *arguments) for rank in range(world)])
    ]


def _run(module: str, directory: Path, arguments: Sequence[Sequence[object]]) -> list[str]:
    processes = [
        Forked(module, {"OMP_NUM_THREADS": "1"}, directory / f"said{number}.out", given)
        for number, given in enumerate(arguments)
    ]
    try:
        ends = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(ends), (ends, [process.err[-6000:] for process in processes])
    return [process.out for process in processes]
