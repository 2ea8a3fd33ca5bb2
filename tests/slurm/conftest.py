"""A cluster for each test: it starts in two seconds, and some tests break nodes of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.making import making
from tests.slurm import cluster as slurm
from tests.slurm.cluster import BatchJob, Cluster
from ttp.chaos import world


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    if reason := slurm.obstacle():
        pytest.skip(reason)
    world.settle()


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    def make(**options: bool) -> Cluster:
        return Cluster(Path(tempfile.mkdtemp(prefix="ttp-slurm-")), **options)

    with making(make, Cluster.close) as make_cluster:
        yield make_cluster


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()


@pytest.fixture(scope="session")
def unbroken(possible: None) -> dict[str, str]:
    """Return the result of two ranks on the digits without a fault."""
    one = Cluster(Path(tempfile.mkdtemp(prefix="ttp-slurm-")))
    try:
        job = BatchJob(one, step_ms=0)
        facts = job.wait_for_state("COMPLETED", "FAILED")
        assert facts["ExitCode"] == "0:0", job.text()
        assert facts["Restarts"] == "0"
        return job.result()
    finally:
        one.close()
