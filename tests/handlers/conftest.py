from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.jobs import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def make(**facts: Any) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), **facts))
        return jobs[-1]

    yield make
    for one in jobs:
        if one.processes:
            one.stop()
