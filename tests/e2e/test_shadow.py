"""Ranks go on from a held checkpoint while slow or full storage takes it (``TTP_SHADOW_S``)."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.e2e import shards
from tests.e2e.harness import Job, MakeJob, Unbroken, processes
from tests.e2e.test_keep import KEEP, KILL, again
from tests.waiting import until
from ttp.store.catalog import find_whole
from ttp.store.held import Held

TIMEOUT_S = 240
FULL = Rule(("MKDIR",), "-held", error=errno.ENOSPC)
"""There is no room for what comes from memory. Ranks can save."""

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


@pytest.fixture
def job(make_job: MakeJob, bad_disk: BadDisk) -> Job:
    """Return a job of two ranks. Its checkpoints cannot be copied to the disk until the test changes the rules."""
    found = make_job(ranks=2, steps=40, max_restarts=4, faults=[KILL], flags=[*KEEP], env={"TTP_SHADOW_S": "0.000001"})
    found.directory = bad_disk.mountpoint.parent
    bad_disk.rules(FULL)
    return found


def wait_until(holds: Callable[[], Any], job: Job) -> None:
    until(holds, 60, job.story)


def held(job: Job) -> Held:
    return Held.of(job.directory / "checkpoints")


def versions(job: Job) -> list[int]:
    """Return the versions of the whole checkpoints on the storage."""
    return [c.version for c in find_whole(job.directory / "checkpoints")[0]]


def kinds(job: Job) -> list[list[str]]:
    wanted = ("held", "not_held", "awaited", "committed", "released", "durable")
    return [[e["kind"] for e in events if e["kind"] in wanted] for events in job.incidents()]


def goes_on(job: Job) -> Job:
    """Start the job and wait until ranks went on, with the checkpoint still in memory only."""
    job.start()
    job.wait_for_version(7)
    assert again(job) == [True], job.story()
    assert versions(job) == [] and held(job).unfinished() == 5, job.story()
    return job


def ends(job: Job, bad_disk: BadDisk, unbroken: Unbroken) -> None:
    """Give the storage room, and check that the job ends with the checkpoint on it."""
    bad_disk.rules()
    assert job.wait(TIMEOUT_S - 30) == 0 and versions(job) == [5], job.story()
    assert job.results() == unbroken(job), job.story()


def test_ranks_go_on_before_it_is_durable(job: Job, bad_disk: BadDisk, unbroken: Unbroken) -> None:
    goes_on(job)
    ends(job, bad_disk, unbroken)
    assert kinds(job) == [["held", "released", "durable"]] and job.starts() == [0, 5], job.story()
    assert not held(job).root.exists()


def test_the_job_ends_before_it_is_durable(job: Job, bad_disk: BadDisk, unbroken: Unbroken) -> None:
    """The launcher waits until the checkpoint is durable."""
    job.steps = 10
    job.start()
    said = "waiting until the checkpoint in memory is copied to the storage"
    wait_until(lambda: job.log.exists() and said in job.log.read_text(), job)
    assert versions(job) == []
    ends(job, bad_disk, unbroken)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_dies_before_it_is_durable(job: Job, bad_disk: BadDisk, unbroken: Unbroken, rank: int) -> None:
    """The second incident saves to the storage, because one checkpoint at a time is held. It replaces the held one."""
    job.faults.append({"id": "second", "rank": rank, "step": 9, "phase": "backward", "action": "kill"})
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert kinds(job) == [["held", "released", "durable"], ["committed", "released"]], job.story()
    assert again(job) == [True, True] and job.starts() == [0, 5, 9] and versions(job) == [9], job.story()
    assert not held(job).unfinished() and job.results() == unbroken(job), job.story()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["survivor", "newcomer"])
def test_a_rank_dies_before_its_first_update(job: Job, bad_disk: BadDisk, unbroken: Unbroken, rank: int) -> None:
    """All ranks are restarted, and restore the checkpoint in memory."""
    job.faults.append({"id": "second", "rank": rank, "step": 5, "phase": "data", "action": "kill", "launch": "1"})
    job.start()
    job.wait_for_version(7)
    # A newcomer may die before rank 0 has started again.
    assert set(job.starts()[1:]) == {5} and versions(job) == [], job.story()
    ends(job, bad_disk, unbroken)


@pytest.mark.parametrize("who", [pytest.param("launcher", marks=pytest.mark.slow), "launcher and writer"])
def test_the_launcher_dies_before_it_is_durable(job: Job, bad_disk: BadDisk, unbroken: Unbroken, who: str) -> None:
    """The writer process copies the checkpoint; if it is killed too, the next launch restores the one in memory."""
    goes_on(job)
    if who != "launcher":
        writers(job)[0].kill()
    os.kill(job.processes[0].pid, signal.SIGKILL)
    job.stop()
    if who == "launcher":
        bad_disk.rules()
        wait_until(lambda: versions(job) == [5] and not held(job).unfinished(), job)
    job.start()
    if who != "launcher":
        job.wait_for_version(9)
        assert versions(job) == []
    ends(job, bad_disk, unbroken)
    assert job.starts() == [0, 5, 5], job.story()


def test_the_controller_and_the_writer_die_before_it_is_durable(
    job: Job, bad_disk: BadDisk, unbroken: Unbroken
) -> None:
    job.steps, job.env["JOB_STEP_S"] = 100, "0.1"  # it trains on for as long as a busy machine needs
    goes_on(job)
    wait_until(lambda: len(writers(job)) == 1, job)  # the process that forked it has ended
    (first,) = writers(job)
    first.kill()
    first.wait()
    (controller,) = processes("ttp.controller", job.directory / "run")
    controller.kill()
    wait_until(lambda: len(writers(job)) == 1 and held(job).is_served(), job)
    ends(job, bad_disk, unbroken)


def test_nobody_leaves_with_75_before_it_is_durable(job: Job, bad_disk: BadDisk) -> None:
    """No restart is left, so the survivor does not go on."""
    job.max_restarts = 0
    job.start()
    wait_until(lambda: kinds(job) == [["held", "awaited"]], job)
    time.sleep(1.0)
    assert job.processes[0].poll() is None and versions(job) == []
    bad_disk.rules()
    assert job.wait(TIMEOUT_S - 30) == 75, job.story()
    assert kinds(job)[0][:2] == ["held", "awaited"] and kinds(job)[0][-1] == "released", job.story()
    assert versions(job) == [5] and job.committed() == [5], job.story()


def writers(job: Job) -> list[psutil.Process]:
    """Return the processes that copy the checkpoint to the storage."""
    return processes("ttp.launch.shadow", held(job).root)


@pytest.mark.slow
def test_shards_are_held_too(job: Job, bad_disk: BadDisk, tmp_path: Path) -> None:
    """HSDP: each replica group writes its shard to memory."""
    job.script, job.ranks, job.steps = shards.SCRIPT, 4, 12
    job.env["JOB_KIND"] = "hsdp"
    job.faults = [shards.fault("backward", "backward", shards.victims("hsdp", "redo")["one rank"]) | {"step": 5}]
    job.start()
    wait_until(lambda: again(job) == [True], job)
    bad_disk.rules()
    assert job.wait(TIMEOUT_S - 30) == 0, job.story()
    assert kinds(job) == [["held", "released", "durable"]] and len(versions(job)) == 1, job.story()
    shards.assert_same_bits(job, tmp_path / "unbroken")


@pytest.mark.slow
def test_a_rank_is_killed_again_and_again(job: Job, bad_disk: BadDisk, unbroken: Unbroken) -> None:
    """The storage is slow, and each held checkpoint is copied to it."""
    bad_disk.rules(Rule(("WRITE",), "distcp", delay_s=0.3))
    faults = [{"id": f"{n}", "rank": n % 2, "step": 4 * n + 5, "phase": "backward", "action": "kill"} for n in range(6)]
    job.faults, job.max_restarts = faults, 8
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert {kind for events in kinds(job) for kind in events} >= {"held", "durable", "released"}, job.story()
    assert job.starts() == [0, *range(5, 29, 4)] and job.results() == unbroken(job), job.story()
    assert versions(job)[0] == 25 and not held(job).unfinished()
