"""``deploy/slurm.sbatch`` on a real cluster of four nodes: the job after kills, requeues, preemption and lost nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.slurm.cluster import KILL_WAIT_S, BatchJob, Cluster
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Digests = dict[str, str]
TTP = shutil.which("ttp") or "ttp"


def running(cluster: Cluster, host: int, word: str, variable: str = "") -> list[psutil.Process]:
    """Return processes of a host with a word in their command, and a variable in their environment."""
    found = []
    for process in cluster.hosts.processes(host):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if word in " ".join(process.cmdline()) and (not variable or variable in process.environ()):
                found.append(process)
    return found


def ranks(cluster: Cluster, host: int) -> list[psutil.Process]:
    """Return the processes that train on a host."""
    return running(cluster, host, "train.py", "RANK")


def training(cluster: Cluster, *options: str, **changes: Any) -> BatchJob:
    """Submit a job. Returns once it trains."""
    job = BatchJob(cluster, *options, **changes)
    job.wait_for("step 10/")
    return job


def test_a_rank_that_is_killed_costs_no_requeue(cluster: Cluster, unbroken: Digests) -> None:
    job = training(cluster)
    for rank in ranks(cluster, 2):
        rank.kill()
    facts = job.wait_for_state("COMPLETED", "FAILED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:0", "0"), job.text()
    assert "resumed after step" in job.text() and "trained" in job.text()
    assert job.result() == unbroken


def test_what_an_operator_requeues_is_saved_first(cluster: Cluster, unbroken: Digests) -> None:
    """``scontrol requeue`` sends SIGTERM to the steps, and SIGKILL after KillWait."""
    job = training(cluster)
    cluster.command("scontrol", "requeue", job.id)
    assert_resumed(job, unbroken)


def test_what_an_operator_holds_goes_on_when_it_is_released(cluster: Cluster, unbroken: Digests) -> None:
    job = training(cluster)
    cluster.command("scontrol", "requeuehold", job.id)
    facts = job.wait_for_state("PENDING")
    assert facts["Reason"] == "job_requeued_in_held_state", facts
    cluster.command("scontrol", "release", job.id)
    assert_resumed(job, unbroken)


def test_what_is_cancelled_is_saved_and_not_started_again(cluster: Cluster) -> None:
    job = training(cluster)
    cluster.command("scancel", job.id)
    facts = job.wait_for_state("CANCELLED", "COMPLETED", "FAILED")
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    until(lambda: verdict(job) == ("saved", 75), every_s=0.2)


def test_what_is_preempted_is_saved_and_goes_on_when_the_nodes_are_free(cluster: Cluster, unbroken: Digests) -> None:
    job = training(cluster)
    cluster.command("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 5")
    job.wait_for("\nsaved\n")
    assert_resumed(job, unbroken)


@pytest.mark.parametrize("host", [2, 1])
def test_a_node_that_dies_takes_no_other_with_it(cluster: Cluster, unbroken: Digests, host: int) -> None:
    """Node 1 has the batch script, the rendezvous and the controller."""
    job = training(cluster)
    cluster.hosts.power_off(host)
    facts = assert_resumed(job, unbroken)
    assert cluster.nodes[host - 1] not in facts["NodeList"]
    assert "down" in cluster.states()[host - 1]


def test_with_no_kill_the_script_itself_requeues_after_the_loss_of_another_node(
    cluster: Cluster, unbroken: Digests
) -> None:
    job = training(cluster, "--no-kill")
    cluster.hosts.power_off(2)
    assert_resumed(job, unbroken)
    assert "\nsaved\n" in job.text()


def test_with_no_kill_the_loss_of_the_first_node_leaves_a_job_without_a_script(
    cluster: Cluster, unbroken: Digests
) -> None:
    """The job is saved and has to be requeued by hand: so ``slurm.sbatch`` does not use ``--no-kill``."""
    job = training(cluster, "--no-kill")
    cluster.hosts.power_off(1)
    until(lambda: verdict(job) == ("saved", 75), every_s=0.2)
    until(lambda: "down" in cluster.states()[0], 90, every_s=0.2)
    time.sleep(2 * KILL_WAIT_S)
    assert (job.state(), job.facts()["Restarts"]) == ("RUNNING", "0")
    cluster.command("scontrol", "requeue", job.id)
    assert_resumed(job, unbroken)


def test_before_the_time_limit_it_is_saved_and_started_again(cluster: Cluster, unbroken: Digests) -> None:
    """The limit of two minutes ends before the training does."""
    job = BatchJob(cluster, "--time=2", "--signal=TERM@30", step_ms=3000)
    facts = assert_resumed(job, unbroken, lives_max=9)
    assert facts["TimeLimit"] == "00:02:00"


def test_what_is_preempted_before_its_ranks_have_joined_is_started_again(cluster: Cluster, unbroken: Digests) -> None:
    job = BatchJob(cluster, step_ms=0)
    until(lambda: running(cluster, 1, "ttp"), every_s=0.2)
    time.sleep(3)
    cluster.command("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 5")
    assert_resumed(job, unbroken)
    assert "before its ranks had joined" in job.text()


def test_a_wrong_configuration_is_not_started_again(cluster: Cluster) -> None:
    job = BatchJob(cluster, env={"TTP_KEEP": "many"})
    facts = job.wait_for_state("FAILED", "COMPLETED")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "64:0", "0"), job.text()


def test_a_wrong_configuration_on_one_node_is_not_started_again(cluster: Cluster) -> None:
    """Otherwise the other node would wait for it for ten minutes, longer than this test does."""
    program = cluster.folder / "bin" / "ttp"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\n[ "$(hostname)" = {cluster.nodes[1]} ] && export TTP_KEEP=many\nexec {TTP} "$@"\n'
    )
    program.chmod(0o755)
    job = BatchJob(cluster, env={"PATH": f"{program.parent}:{os.environ['PATH']}"})
    facts = job.wait_for_state("FAILED", "COMPLETED")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "64:0", "0"), job.text()
    assert f"host {cluster.nodes[1]} is refused: TTP_KEEP='many'" in job.text()


def test_where_the_cluster_decides_by_exit_codes(make_cluster: Callable[..., Cluster], unbroken: Digests) -> None:
    """``RequeueExit=75`` starts the job again, ``RequeueExitHold=64`` holds a job that an operator has to check."""
    cluster = make_cluster(by_exit=True)
    env = {"REQUEUE_BY_EXIT": "1", "MAX_RESTARTS": "0"}
    job = training(cluster, env=env)
    for rank in ranks(cluster, 2):
        rank.kill()
    assert_resumed(job, unbroken)
    wrong = BatchJob(cluster, env=env | {"TTP_KEEP": "many"})
    until(
        lambda: wrong.facts()["Reason"] == "JobHoldMaxRequeue" or wrong.state() == "SPECIAL_EXIT",
        story=wrong.facts,
        every_s=0.2,
    )


def assert_resumed(job: BatchJob, unbroken: Digests, lives_max: int = 2) -> dict[str, str]:
    """Check that the job was started again, resumed, and ended with the bits of the unbroken run."""
    until(lambda: job.facts()["Restarts"] != "0", 180, every_s=1)
    facts = job.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=300)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.text()
    assert 1 <= int(facts["Restarts"]) < lives_max, job.text()
    steps = [int(step) for step in re.findall(r"^step (\d+)/", job.text(), re.MULTILINE)]
    assert steps == sorted(set(steps)) and steps[-1] == 40, f"no step was made twice: {steps}"
    assert job.result() == unbroken
    return facts


def verdict(job: BatchJob) -> tuple[str, int]:
    done = subprocess.run([TTP, "verdict", str(job.save_dir)], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.strip(), done.returncode
