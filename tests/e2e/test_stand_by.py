"""A host is lost: another one that stood by takes its place, or the job ends if there is none."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Job, MakeJob, Unbroken, processes
from tests.waiting import until
from ttp.processor.local_state.pages import Page, page_name, read_page

pytest.importorskip("torch")

import torch.distributed

TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # not in its stubs
WAIT_S = 120
GONE = "keep_alive_interval=1"  # a host counts as gone after 3 s

pytestmark = [pytest.mark.timeout(3 * WAIT_S), pytest.mark.xdist_group("ttp")]


@pytest.fixture
def make_two(make_job: MakeJob) -> MakeJob:
    """Return a function that makes jobs of two hosts with a rank each, and standby hosts, which start first.

    The rendezvous runs on none of the hosts.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(standing_by: int, *more: str, **settings: Any) -> Job:
        common = ["--nnodes", "2", "--rdzv-conf", GONE, *more, "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        common += ["--rdzv-endpoint", f"127.0.0.1:{store.port}"]
        hosts = [f"spare{n}" for n in range(standing_by)] + ["one", "two"]
        nodes = [[*common, *(["--stand-by"] if host.startswith("spare") else [])] for host in hosts]
        env = {"TTP_TOKEN": "secret", "TTP_MIRROR": "1", "JOB_STEP_S": "0.1"} | settings.pop("env", {})
        return make_job(ranks=2, local=1, nodes=nodes, hosts=hosts, env=env, **settings)

    return make


def await_starts(job: Job, count: int) -> None:
    until(lambda: len(job.starts()) >= count, WAIT_S, job.story)


def await_version(job: Job, version: int) -> None:
    """Wait until rank 0 has finished the version. Works after a launcher has ended, too."""
    until(lambda: any(kind == "version" and value >= version for _, kind, value in job.notes(0)), WAIT_S, job.story)


def without_power(job: Job, host: str) -> None:
    """Kill all processes of this host at once."""
    launcher = psutil.Process(job.processes[job.hosts.index(host)].pid)
    run_dir = job.directory / "run" / host
    lost = [launcher, *launcher.children(recursive=True)]
    lost += [each for place in (run_dir, run_dir / "standby") for each in processes("ttp.controller", place)]
    for process in lost:  # nobody sees the end of another one
        process.suspend()
    for process in lost:
        process.kill()


def held(rank: int, version: int) -> dict[str, Any]:
    """Return a fault: the rank makes no step after ``version`` before that is saved."""
    saved = f"checkpoints/tft_saved_checkpoints-step_{version}"
    return {"id": "held", "rank": rank, "step": version, "phase": "data", "action": "hold", "when": saved}


def await_mirrored(job: Job, host: str, rank: int, version: int) -> None:
    """Wait until this host keeps the page of a rank of another host, which is sent while the training goes on."""
    launcher = psutil.Process(job.processes[job.hosts.index(host)].pid)

    def kept() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            files = {Path(m.path) for p in launcher.children(recursive=True) for m in p.memory_maps()}
            pages = [path.parent for path in files if path.parts[-2:] == ("kept", page_name(rank))]
            return any(isinstance(read_page(page, rank, version, n), Page) for page in pages for n in range(1, 4))
        return False

    await_version(job, version)
    until(kept, WAIT_S, job.story)


def test_a_host_that_stands_by_takes_the_place_of_a_lost_one(make_two: MakeJob, unbroken: Unbroken) -> None:
    """Of three standby hosts, which start first, one is told to leave, one replaces a lost host, and one is never
    needed.

    The job goes on when the first leaves. A rank that dies alone is restarted by its own host.
    """
    fault = {"id": "alone", "rank": 0, "step": 3, "phase": "backward", "action": "kill"}
    job = make_two(3, steps=24, faults=[fault, held(rank=0, version=6)]).start()
    await_version(job, 1)
    os.kill(job.processes[0].pid, signal.SIGTERM)
    job.processes[0].wait(WAIT_S)
    await_mirrored(job, "one", rank=1, version=6)
    without_power(job, "two")
    assert [process.wait(WAIT_S) for process in job.processes][1:4] == [0, 0, 0], job.story()
    story = job.story()
    assert story.count("takes its place") == story.count("the job has ended without this host") == 1, story
    assert len(job.starts()) == 3 and job.starts()[1:] == job.committed(), story
    assert job.results() == unbroken(job)
    assert all((job.directory / "run" / spare / "imports.json").exists() for spare in ("spare1", "spare2"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["one", "two"])
def test_a_pod_that_is_replaced_takes_the_place_of_the_lost_one(
    make_two: MakeJob, unbroken: Unbroken, lost: str
) -> None:
    """A scheduler starts the same command again, and the launcher of the other host waits for it."""
    lost_rank = ["one", "two"].index(lost)
    job = make_two(0, steps=16, faults=[held(rank=1 - lost_rank, version=3)]).start()
    await_mirrored(job, "two" if lost == "one" else "one", rank=lost_rank, version=3)
    without_power(job, lost)
    index = job.hosts.index(lost)
    job.processes[index] = job.launch(index)
    assert [process.wait(WAIT_S) for process in job.processes] == [0, 0], job.story()
    assert len(job.starts()) == 2 and job.starts()[1:] == job.committed(), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
def test_the_ranks_of_a_host_that_is_drained_move(make_two: MakeJob, unbroken: Unbroken) -> None:
    hold = {"id": "hold", "rank": 1, "step": 5, "phase": "data", "action": "hold", "when": "drained"}
    job = make_two(1, steps=16, faults=[hold]).start()
    await_version(job, 3)
    drained = job.ttp("report-fault", "--host", "two", "--drain", "--token", "secret")
    assert drained.returncode == 0, drained.stderr
    until(lambda: "this host is drained" in job.story(), WAIT_S, job.story)
    (job.directory / "drained").touch()
    assert [process.wait(WAIT_S) for process in job.processes] == [0, 0, 75], job.story()
    assert "this host is drained" in job.story() and "takes its place" in job.story()
    assert "leaving with 75: the job is saved; unless other hosts go on with it" in job.story()
    assert len(job.starts()) == 2 and job.starts()[1:] == job.committed(), job.story()
    assert job.results() == unbroken(job)


def test_without_one_the_job_ends_with_75_within_the_limit(make_two: MakeJob) -> None:
    job = make_two(0, steps=100_000, env={"TTP_RESCHEDULE_S": "2"}).start()
    await_version(job, 3)
    without_power(job, "two")
    assert job.processes[0].wait(WAIT_S) == 75, job.story()
    assert "none has come within TTP_RESCHEDULE_S=2 s" in job.story()
    assert job.committed()


@pytest.mark.slow
def test_an_elastic_job_goes_on_with_fewer_ranks_and_with_more_again(make_two: MakeJob) -> None:
    job = make_two(0, "--elastic", "--rdzv-conf", f"{GONE},last_call_timeout=1", steps=60).start()
    await_version(job, 3)
    without_power(job, "two")
    await_starts(job, 2)
    await_version(job, job.starts()[1] + 3)
    job.processes[1] = job.launch(1)
    assert [process.wait(WAIT_S) for process in job.processes] == [0, 0], job.story()
    assert "2 ranks saved it and 1 restore it" in job.story() and "1 ranks saved it and 2 restore it" in job.story()
    assert job.starts()[1:] == job.committed() and len(job.committed()) == 2
    assert [r["count"] for r in job.results()] == [60, 60]
    assert job.results()[0]["optimizer"] == job.results()[1]["optimizer"]
