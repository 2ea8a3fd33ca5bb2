"""The controller's host is lost and another controller leads the job: launchers and commands find it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from tests.e2e.harness import TTP, Job, MakeJob, two_nodes
from tests.waiting import until
from ttp.launch.ring import Ring, read_ring

WAIT_S = 120


def on_host(job: Job, host: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Return a function that runs a command on a host that knows only its run directory."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_") and k != "MASTER_ADDR"}
    env |= {"TTP_RUN_DIR": str(job.directory / "run" / host), "TTP_TOKEN": "secret"}
    return subprocess.run([*TTP, *args], env=env, capture_output=True, text=True, timeout=60, check=False)


def kept_by(job: Job, host: str, term: int) -> Ring | None:
    """Return what a host knows of the controllers, once that is of this term and the standby has told its address."""
    ring = read_ring(job.directory / "run" / host)
    return ring if ring is not None and ring.term >= term and ring.home not in ring.standbys else None


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ttp")
def test_the_controller_is_found_where_it_reigns_now(make_job: MakeJob) -> None:
    """The controller is killed and is not restarted on its host, so a standby leads.

    Then the last rank of the other host dies; its launcher reports that to the standby and hands over the pages.
    """
    job = make_job(
        ranks=2,
        steps=100_000,
        max_restarts=0,
        nodes=two_nodes(),
        hosts=["one", "two"],
        env={"TTP_TOKEN": "secret", "JOB_STEP_S": "0.1"},
    ).start()
    job.wait_for_version(2, timeout_s=WAIT_S)
    standby = until(lambda: kept_by(job, "one", 1) and kept_by(job, "two", 1), WAIT_S, job.story)
    before = json.loads(on_host(job, "two", "status", "--json").stdout)
    assert before["controller"]["port"] == job.port

    job.processes[0].send_signal(signal.SIGSTOP)  # it would start another controller
    os.kill(before["controller"]["pid"], signal.SIGKILL)
    two = job.directory / "run" / "two"
    ring = until(lambda: (ring := read_ring(two)) and ring.term > standby.term and ring, WAIT_S, job.story)
    assert ring.address != ring.home and ring.address in standby.standbys  # the next standby may be at the home address
    status = json.loads(on_host(job, "two", "status", "--json").stdout)
    assert status["term"] == ring.term and status["controller"]["port"] == int(ring.address.rpartition(":")[2])
    assert f"the leading controller is at {ring.address}" in on_host(job, "two", "status").stdout
    saved = on_host(job, "one", "save", "--json")
    assert json.loads(saved.stdout)["saved"], saved.stderr
    refused = on_host(job, "two", "report-fault", "--rank", "7")
    assert refused.returncode == 1 and "no such rank: 7" in refused.stderr

    os.kill(next(r["pid"] for r in status["ranks"] if r["rank"] == 1), signal.SIGKILL)
    committed = until(lambda: [e for e in last(job) if e["kind"] == "committed"], WAIT_S, job.story)
    job.processes[0].send_signal(signal.SIGCONT)
    job.wait()
    exited = [e for e in last(job) if e.get("evidence") == "exited"]
    assert any(e["rank"] == 1 and e["witness"] == -1 for e in exited), job.story()
    manifest = json.loads((job.directory / "checkpoints" / committed[0]["path"] / "manifest.json").read_text())
    assert manifest["missing_pages"] == [], "the launcher did not hand over the page of its dead rank"


def last(job: Job) -> list[dict[str, Any]]:
    """Return the last incident that was not a requested checkpoint."""
    faults = [events for events in job.incidents() if events and not events[0].get("snapshot")]
    return faults[-1] if faults else []
