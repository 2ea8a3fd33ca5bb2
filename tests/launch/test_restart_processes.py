"""Restarts that work under gloo, and jobs of two nodes (two launchers on this host)."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.launch.conftest import Controller, Job, Start, plan
from tests.waiting import until
from ttp.launch.presence import listens


def rendezvous(kind: str, port: int) -> list[str]:
    """Return the flags of a kind of rendezvous."""
    return {
        "default": [],
        "standalone": ["--standalone"],
        "static": ["--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"],
    }[kind]


@pytest.mark.parametrize(("launcher", "reply"), [("ttp-run", ""), ("torchrun", '{"message": {"mess')])
def test_a_report_of_an_error_that_was_never_finished_ends_no_launcher(
    launcher: str, reply: str, start: Start, controller: Controller
) -> None:
    """A rank is killed while it writes torch's error file, or the disk is full."""
    crash = plan(crash="at once", reply=reply)
    job = start(launcher, ["--nproc-per-node", "1", "--max-restarts", "1"], "fake_worker.py", crash)
    assert job.finish() == 0, job.log
    assert job.has("trained-0-1")


def hosts(start: Start, launcher: str, kind: str, port: int, count: int, flags: str, *script: str) -> list[Job]:
    """Start the launchers of a job."""
    common = [*rendezvous(kind, port), *flags.split()]
    several = [["--nnodes", str(count), "--node-rank", str(node)] if count > 1 else [] for node in range(count)]
    return [start(launcher, [*common, *own], *script, name=f"n{node}") for node, own in enumerate(several)]


@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_every_node_waits_for_its_ranks_and_restarts(
    kind: str, launcher: str, start: Start, controller: Controller, unused_port: int
) -> None:
    flags = "--nproc-per-node 2 --max-restarts 1"
    jobs = hosts(start, launcher, kind, unused_port, 2, flags, "fake_worker.py", plan())
    victim = jobs[0].pids(4)[3]
    os.kill(victim, signal.SIGKILL)
    jobs[0].rescue()
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.log for job in jobs)
    assert all(jobs[0].has(f"saved-{rank}-0") for rank in range(3))
    assert not any(jobs[0].has(f"sigterm-{rank}-0") for rank in range(3))
    assert [fault["pids"] for fault in controller.faults] == [[victim]]


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("default", "standalone", "static")),
        ("c10d", 1),
        ("static", 2),
        pytest.param("c10d", 2, marks=pytest.mark.slow),
    ],
)
def test_gloo_works_again_after_each_restart(
    kind: str, nodes: int, launcher: str, start: Start, controller: Controller, unused_port: int
) -> None:
    """Rank 1 is killed in all attempts but the last, which must not find entries of the others in its store."""
    restarts, ranks = 3 - nodes, 2 + nodes
    flags = f"--nproc-per-node {ranks // nodes} --max-restarts {restarts}"
    jobs = hosts(start, launcher, kind, unused_port, nodes, flags, "gloo_worker.py", str(restarts))
    assert [job.finish() for job in jobs] == [0] * nodes, "".join(job.log for job in jobs)
    sums = {path.name: path.read_text() for path in jobs[0].out.glob("sum-*")}
    total = str(sum(range(ranks + 1)))
    assert sums == {f"sum-{rank}-{attempt}": total for rank in range(ranks) for attempt in range(restarts + 1)}


@pytest.mark.parametrize(("kind", "nodes"), [("static", 1), pytest.param("static", 2, marks=pytest.mark.slow)])
def test_no_launcher_starts_a_job_again_whose_drained_host_nobody_replaces(
    kind: str, nodes: int, start: Start, controller: Controller, unused_port: int
) -> None:
    """Where no host can join later, the other hosts would wait for the drained one in vain."""
    (controller.run_dir / "drained").write_text(socket.gethostname() if nodes == 1 else "another host of the job")
    flags = "--nproc-per-node 1 --max-restarts 3"
    jobs = hosts(start, "ttp-run", kind, unused_port, nodes, flags, "fake_worker.py", plan())
    jobs[0].pids(nodes)
    jobs[0].rescue()
    assert [job.finish() for job in jobs] == [75] * nodes, "".join(job.log for job in jobs)
    assert all(jobs[0].has(f"saved-{rank}-0") and not jobs[0].has(f"pid-{rank}-1") for rank in range(nodes))
    assert all("is drained" in job.log for job in jobs)


def test_node_that_lost_its_store_waits_too(start: Start, controller: Controller, unused_port: int) -> None:
    """The launcher with the rendezvous is killed: stock torch would stop the other node's ranks at once."""
    flags = [*rendezvous("c10d", unused_port), "--nnodes", "2", "--nproc-per-node", "1"]
    first = start("ttp-run", flags, "fake_worker.py", plan(save_s=3), name="n0")
    until(lambda: listens("localhost", unused_port, 1.0))
    second = start("ttp-run", flags, "fake_worker.py", plan(save_s=3), name="n1")
    first.pids(2)
    first.process.kill()
    second.rescue()
    assert second.finish() == 75, second.log
    assert "the rendezvous has gone" in second.log, second.log
    assert [second.has(f"sigterm-{rank}-0") for rank in range(2)] == [False, False]
