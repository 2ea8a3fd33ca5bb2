from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compat.jobs import Job
from tests.e2e.harness import Job as Launched
from tests.e2e.harness import jobs
from tests.making import making


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that makes jobs; the fixture ends the processes that they leave."""
    number = itertools.count()
    with making(lambda **what: Job(tmp_path / f"job{next(number)}", **what), Job.stop) as make:
        yield make


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Return a function that makes jobs with launchers; the fixture ends the processes that they leave."""
    with jobs(tmp_path) as make:
        yield make
