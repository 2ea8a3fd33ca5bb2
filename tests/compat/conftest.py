from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.jobs import Job
from tests.e2e.harness import Job as Launched
from tests.e2e.harness import jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that makes jobs; the fixture ends the processes that they leave."""
    made: list[Job] = []

    def make(**what: Any) -> Job:
        made.append(Job(tmp_path / f"job{len(made)}", **what))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Return a function that makes jobs with launchers; the fixture ends the processes that they leave."""
    with jobs(tmp_path) as make:
        yield make
