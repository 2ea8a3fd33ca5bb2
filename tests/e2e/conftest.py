from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What an unbroken run of the same job, without ttp, ends with. Each kind is run once."""
    known: dict[tuple[int, int, str], list[dict[str, Any]]] = {}

    def results(job: Job) -> list[dict[str, Any]]:
        key = (job.ranks, job.steps, job.env.get("JOB_WIDE", ""))
        if key not in known:
            env = {"JOB_WIDE": key[2]} if key[2] else {}
            directory = tmp_path_factory.mktemp("unbroken")
            reference = Job(directory, ranks=job.ranks, steps=job.steps, env=env, protected=False)
            assert reference.run() == 0, reference.story()
            known[key] = reference.results()
        return known[key]

    return results


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Jobs that leave nothing running behind."""
    jobs: list[Job] = []

    def make(**settings: Any) -> Job:
        jobs.append(Job(tmp_path / f"job{len(jobs)}", **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.stop()
