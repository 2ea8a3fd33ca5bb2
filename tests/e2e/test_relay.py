"""Relays in real jobs: two hosts of two ranks each, and SIGKILL of ranks and relays; no step and no bit is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job, MakeJob, newest_of_survivors, two_nodes
from tests.e2e.shards import assert_same_bits
from tests.waiting import until

STEPS = 12
TIMEOUT_S = 400

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def fault(rank: int, step: int = 4) -> dict[str, Any]:
    return {"id": f"kill{rank}", "ranks": [rank], "step": step, "phase": "data", "action": "kill"}


def logs(job: Job) -> str:
    return "\n".join(path.read_text() for path in job.directory.rglob("controller.log"))


def relays_of(job: Job) -> int:
    """Return how often a relay has connected to a controller, which logs that at level DEBUG."""
    return len(re.findall("the relay at .* has opened a stream", logs(job)))


def assert_saved_and_resumed(job: Job, dead: set[int], tmp_path: Path) -> None:
    (committed,) = job.committed()
    assert committed >= newest_of_survivors(job, 0, dead)
    assert job.starts() == [0, committed], job.story()
    assert_same_bits(job, tmp_path / "unbroken", every=True)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(2, id="the-relay"), pytest.param(3, id="behind-it")])
def test_a_relay_that_is_a_rank(tmp_path: Path, victim: int) -> None:
    """Without a launcher the first rank of each host is its relay; rank 2 is the relay of the second host."""
    job = ForkedJob(tmp_path / "job", steps=STEPS, hosts=[*"aabb"], faults=[fault(victim)])
    job.env = {"JOB_KIND": "hsdp", "TTP_RELAY": "on", "TTP_LOG": "DEBUG"}
    assert job.live(TIMEOUT_S / 3) == [-9 if rank == victim else 75 for rank in range(4)], job.story()
    assert relays_of(job) == 2, logs(job)
    assert job.live(TIMEOUT_S / 3) == [0] * 4, job.story()
    assert_saved_and_resumed(job, {victim}, tmp_path)


@pytest.mark.slow
def test_a_relay_that_is_a_rank_dies_while_the_job_is_saved(tmp_path: Path) -> None:
    """Rank 1 is lost. When the plan is made, rank 2 is killed, which is a saver and relays for another saver."""
    job = ForkedJob(tmp_path / "job", steps=STEPS, hosts=[*"aabb"], faults=[fault(1)])
    job.env = {"JOB_KIND": "hsdp", "TTP_RELAY": "on"}
    over = threading.Event()
    killer = threading.Thread(target=kill_at_the_plan, args=(job, 2, over))
    killer.start()
    codes = job.live(TIMEOUT_S / 3)
    over.set()
    killer.join()
    assert (codes[0], codes[1], codes[3]) == (75, -9, 75), job.story()
    assert codes[2] in (75, -9), job.story()
    assert job.live(TIMEOUT_S / 3) == [0] * 4, job.story()
    assert_saved_and_resumed(job, {1, 2}, tmp_path)


def kill_at_the_plan(job: ForkedJob, rank: int, over: threading.Event) -> None:
    """Send SIGKILL to the rank as soon as the controller's journal has the plan."""
    while not over.wait(0.002):
        for path in job.directory.glob("checkpoints/incidents/*.jsonl"):
            if '"kind": "plan"' in path.read_text():
                with contextlib.suppress(ProcessLookupError):
                    job.kill(rank)
                return


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_relay_in_the_launcher_is_lost_while_training(make_job: MakeJob, how: signal.Signals) -> None:
    """Its ranks connect to the controller directly. When one of them is killed later, the other three save."""
    job = make_job(ranks=4, steps=400, max_restarts=0, nodes=two_nodes(), hosts=["one", "two"])
    job.env = {"TTP_RELAY": "on", "TTP_CONTINUITY": "warm", "TTP_LOG": "DEBUG"}
    job.start()
    job.wait_for_version(3)
    os.kill(job.processes[1].pid, how)
    launcher = job.processes.pop()
    if how is signal.SIGKILL:
        launcher.wait()
    else:
        until(lambda: job.log.read_text().count("has stopped answering") == 2, TIMEOUT_S / 4)
    reached = max(value for _, kind, value in job.notes(0) if kind == "version")
    job.wait_for_version(reached + 3, rank=3)  # three steps of all ranks without it
    victim = next(p for p in psutil.process_iter(["environ"]) if of_rank(p.info["environ"] or {}, job, 3))
    victim.kill()
    assert job.wait(TIMEOUT_S / 2) == 75, job.story()
    if how is signal.SIGSTOP:
        launcher.send_signal(signal.SIGCONT)
        launcher.wait()
    assert relays_of(job) == 2, logs(job)
    committed = job.committed()[-1]  # the end of the relay may have been saved in doubt, before its ranks came back
    assert committed >= newest_of_survivors(job, 0, {3})


def of_rank(environ: dict[str, str], job: Job, rank: int) -> bool:
    return environ.get("JOB_DIR") == str(job.directory) and environ.get("RANK") == str(rank)
