from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks.bad_disk import BadDisk, why_not
from tests.e2e.forked import Forked, ForkedJob
from tests.e2e.harness import Job, jobs
from tests.ports import free_port

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def solo_env(tmp_path: Path, *, on: bool = True) -> dict[str, str]:
    """Return the environment of rank 0 of 1 for ``solo.py``; with ttp it has a controller of its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")}
    base |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1"}
    if on:
        base |= {"TTP_PORT": str(free_port()), "TTP_RUN_DIR": str(tmp_path / "run"), "TTP_ABANDONED_S": "5"}
    return base


def runs(tmp_path: Path) -> Run:
    """Return a function that runs ``solo.py`` to its end in a forked process."""
    number = itertools.count()

    def run(*args: object, on: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        out = tmp_path / f"solo{next(number)}.out"
        process = Forked("tests.e2e.solo", solo_env(tmp_path, on=on) | env, out, args)
        return subprocess.CompletedProcess([str(a) for a in args], process.wait(), process.out, process.err)

    return run


@pytest.fixture
def solo(tmp_path: Path) -> Run:
    return runs(tmp_path)


@pytest.fixture
def bad_disk(tmp_path: Path) -> Iterator[BadDisk]:
    """See ``tests.disks.bad_disk``; ``checkpoints`` is the mount."""
    if reason := why_not():
        pytest.skip(reason)
    with BadDisk(tmp_path / "checkpoints", tmp_path / "below", journal=True) as disk:
        yield disk


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that gives the results of the same job without ttp and faults.

    Each kind of job runs once, for all workers of a test run.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def results(job: Job) -> list[dict[str, Any]]:
        names = "JOB_KIND", "JOB_OVERFLOW"
        env: dict[str, str] = {name: job.env[name] for name in names if name in job.env}
        directory = shared / "-".join(map(str, ("unbroken", job.ranks, job.steps, job.script.stem, *env.values())))
        module, ended = f"tests.e2e.{job.script.stem}", directory / "ended"
        reference = ForkedJob(directory, job.ranks, job.steps, env=env, module=module, protected=False)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ended.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of a run that failed
                assert reference.live(200) == [0] * job.ranks, reference.story()
                ended.touch()
        return reference.results()

    return results


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that makes jobs; at the end of the test all of their processes are stopped."""
    with jobs(tmp_path) as make:
        yield make


@pytest.fixture
def forked_job(tmp_path: Path) -> Callable[..., ForkedJob]:
    """Return a function that makes jobs of ``job.py`` with forked ranks."""
    return lambda **settings: ForkedJob(tmp_path / "forked", module="tests.e2e.job", **settings)
