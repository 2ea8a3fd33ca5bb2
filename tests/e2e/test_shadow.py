"""Ranks go on from a checkpoint that is held in memory, while slow or full storage takes it (``TTP_SHADOW_S``)."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.e2e.harness import Job
from tests.e2e.test_keep import KEEP, KILL, again
from ttp.store.catalog import find_whole
from ttp.store.held import Held

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
TIMEOUT_S = 240
FULL = Rule(("MKDIR",), "-held", error=errno.ENOSPC)
"""There is no room for what comes from memory. Ranks can save."""


@pytest.fixture
def job(make_job: MakeJob, bad_disk: BadDisk) -> Job:
    """Two ranks; the storage takes nothing from memory until the test says so."""
    found = make_job(ranks=2, steps=40, max_restarts=4, faults=[KILL], flags=[*KEEP], env={"TTP_SHADOW_S": "0.000001"})
    found.directory = bad_disk.mountpoint.parent
    bad_disk.rules(FULL)
    return found


def wait_until(holds: Callable[[], Any], job: Job, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, job.story()
        time.sleep(0.02)


def held(job: Job) -> Held:
    return Held.of(job.directory / "checkpoints")


def versions(job: Job) -> list[int]:
    """Of checkpoints on the storage, whose digests are right."""
    return [c.version for c in find_whole(job.directory / "checkpoints")[0]]


def kinds(job: Job) -> list[list[str]]:
    wanted = ("held", "not_held", "awaited", "committed", "released", "durable")
    return [[e["kind"] for e in events if e["kind"] in wanted] for events in job.incidents()]


def goes_on(job: Job) -> Job:
    """Training has gone on, and nothing is on the storage."""
    job.start()
    job.wait_for_version(7)
    assert again(job) == [True], job.story()
    assert versions(job) == [] and held(job).unfinished() == 5, job.story()
    return job


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_ranks_go_on_before_it_is_durable(job: Job, bad_disk: BadDisk, unbroken: Unbroken) -> None:
    goes_on(job)
    bad_disk.rules()
    assert job.wait(TIMEOUT_S - 30) == 0, job.story()
    assert kinds(job) == [["held", "released", "durable"]] and versions(job) == [5], job.story()
    assert not list(held(job).memory.iterdir())
    assert job.starts() == [0, 5] and job.results() == unbroken(job), job.story()
