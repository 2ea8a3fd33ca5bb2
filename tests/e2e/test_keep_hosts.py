"""Survivors on several hosts keep their processes: each launcher starts its own dead ranks, without a new
rendezvous.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.e2e.harness import Job, MakeJob, Unbroken
from tests.e2e.test_keep import ANEW, again, repeated
from tests.e2e.test_stand_by import TCPStore, without_power
from tests.waiting import until
from ttp.launch.warm.starter import read_status

WAIT_S = 150

pytestmark = [pytest.mark.timeout(2 * WAIT_S), pytest.mark.xdist_group("ttp")]


@pytest.fixture
def make_hosts(make_job: MakeJob) -> MakeJob:
    """Return a function that makes jobs of two hosts. The rendezvous runs outside, or (``static``) on the first one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(local: int, *, static: bool = False, continuity: str = "keep", **settings: Any) -> Job:
        common = ["--nnodes", "2", "--continuity", continuity]
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
        nodes = [[*common, *endpoint] for _ in range(2)]
        if static:
            spare = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
            at = ["--master-addr", "127.0.0.1", "--master-port", str(spare)]
            nodes = [[*common, *at, "--node-rank", str(n)] for n in range(2)]
        env = {"TTP_TOKEN": "secret", "TTP_CONTINUE_S": "30"} | settings.pop("env", {})
        return make_job(ranks=2 * local, local=local, nodes=nodes, hosts=["one", "two"], env=env, **settings)

    return make


def kill(rank: int, step: int, phase: str = "backward", **more: Any) -> dict[str, Any]:
    return {"id": f"{rank} in {step}", "rank": rank, "step": step, "phase": phase, "action": "kill", **more}


@pytest.mark.parametrize(
    ("local", "static", "faults"),
    [
        pytest.param(2, False, [kill(3, 5), kill(1, 8), kill(0, 11)], id="one-rank-of-each-host-and-rank-0"),
        pytest.param(2, False, [kill(3, 5), kill(1, 5)], id="one-of-each-host-at-once", marks=pytest.mark.slow),
        pytest.param(1, False, [kill(1, 5), kill(0, 8)], id="every-rank-of-a-host", marks=pytest.mark.slow),
        pytest.param(2, True, [kill(3, 5), kill(0, 8, "in_step")], id="static-rendezvous", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_all_hosts_keep_their_processes(
    make_hosts: MakeJob, unbroken: Unbroken, local: int, static: bool, faults: list[dict[str, Any]]
) -> None:
    job = make_hosts(local, static=static, steps=14, max_restarts=4, faults=faults)
    assert job.run(WAIT_S) == 0, job.story()
    steps = sorted({fault["step"] for fault in faults})
    assert again(job) == [True] * len(steps), job.story()
    assert ANEW not in job.log.read_text(), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "faults"),
    [
        pytest.param(2, [kill(3, 5), kill(1, 8, "allreduced"), kill(0, 11, "loss")], id="one-rank-of-each-host"),
        pytest.param(1, [kill(1, 5), kill(0, 8)], id="every-rank-of-a-host"),
    ],
)
def test_loops_of_all_hosts_are_not_left(
    make_hosts: MakeJob, unbroken: Unbroken, local: int, faults: list[dict[str, Any]]
) -> None:
    job = make_hosts(local, steps=14, max_restarts=4, faults=faults, env={"JOB_ONE_STEP": "1"})
    assert job.run(WAIT_S) == 0, job.story()
    assert again(job) == [True] * len(faults) and ANEW not in job.log.read_text(), job.story()
    dead = list(zip(job.committed(), (fault["rank"] for fault in faults), strict=True))
    for rank in range(2 * local):
        assert repeated(job, rank) == [version + 1 for version, lost in dead if lost != rank], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_ranks_of_all_hosts_are_forked(make_hosts: MakeJob, unbroken: Unbroken, static: bool) -> None:
    """Each host has a process of its own from which its ranks are forked (warm restarts)."""
    held = {"id": "held", "rank": 0, "step": 8, "phase": "data", "action": "hold", "when": "go"}
    env = {"TTP_CONTINUITY": "warm"}  # their first start is cold then
    faults = [held, kill(3, 8, "allreduced")]
    job = make_hosts(2, static=static, continuity="warm", steps=14, max_restarts=2, faults=faults, env=env).start()

    def are_ready() -> bool:
        known = [read_status(job.directory / "run" / host) for host in ("one", "two")]
        return [told and told["state"] for told in known] == ["ready", "ready"]

    until(are_ready, WAIT_S, job.story)
    (job.directory / "go").touch()
    assert job.wait(WAIT_S) == 0, job.story()
    assert are_ready(), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["one", "two"])
def test_a_host_that_is_lost_while_it_fills_a_seat_costs_no_step(make_hosts: MakeJob, lost: str) -> None:
    """The other host restarts its ranks, waits for a host to replace the lost one, and ends with 75."""
    faults = [kill(3 if lost == "two" else 1, 5)]
    job = make_hosts(2, steps=100_000, max_restarts=3, faults=faults, env={"TTP_RESCHEDULE_S": "3"}).start()
    until(lambda: "started while the others save" in job.log.read_text(), WAIT_S, job.story, 0.002)
    without_power(job, lost)
    assert job.processes[lost == "one"].wait(WAIT_S) == 75, job.story()
    assert job.committed()[0] == 5, job.story()


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_do_not_keep_those_of_other_hosts_waiting(make_hosts: MakeJob) -> None:
    """They cannot go on, which nobody else would know before TTP_CONTINUE_S is over."""
    env = {"TTP_CONTINUE_S": "100000", "TTP_RESCHEDULE_S": "3"}
    job = make_hosts(1, steps=100_000, faults=[kill(0, 8, when="go")], max_restarts=2, env=env).start()
    job.wait_for_version(7, rank=1)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    job.processes[1].wait(WAIT_S)
    (job.directory / "go").touch()
    assert job.processes[0].wait(WAIT_S) == 75, job.story()
    (why,) = (event["why_not_again"] for event in job.incidents()[0] if event["kind"] == "released")
    assert why == "rank 1 cannot go on: its launcher has ended", job.story()


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 2])
def test_a_second_fault_on_either_host_costs_no_step(make_hosts: MakeJob, unbroken: Unbroken, who: int) -> None:
    """The fault comes while ranks are going on, so both hosts restart all of their ranks."""
    faults = [kill(3, 5), kill(who, 5, "data", launch="1")]
    faults[1]["id"] = "second"
    job = make_hosts(2, steps=9, max_restarts=2, faults=faults)
    assert job.run(WAIT_S) == 0, job.story()
    assert again(job)[0] and ANEW in job.log.read_text(), job.story()
    assert job.committed() == [5] and job.starts()[-1] == 5, job.story()
    assert job.results() == unbroken(job)
