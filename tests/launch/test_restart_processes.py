"""Restarts that work under gloo, and jobs of two nodes (two launchers on this host)."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.waiting import until
from ttp.launch.presence import listens

if TYPE_CHECKING:
    from tests.launch.conftest import Controller, Job

Start = Callable[..., "Job"]


def rendezvous(kind: str, port: int) -> list[str]:
    """Return the flags of a kind of rendezvous."""
    return {
        "default": [],
        "standalone": ["--standalone"],
        "static": ["--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("default", "standalone", "static")), "c10d"],
)
def test_gloo_works_again_after_each_restart(
    kind: str, launcher: str, start: Start, controller: Controller, unused_port: int
) -> None:
    """Rank 1 is killed in the first two attempts; the third must not find their entries in its store."""
    flags = [*rendezvous(kind, unused_port), "--nproc-per-node", "3", "--max-restarts", "2"]
    job = start(launcher, flags, "gloo_worker.py", "2")
    assert job.finish(timeout_s=150) == 0, job.log
    sums = {path.name: path.read_text() for path in job.out.glob("sum-*")}
    assert sums == {f"sum-{rank}-{attempt}": "6" for rank in range(3) for attempt in range(3)}


@pytest.mark.parametrize(("launcher", "reply"), [("ttp-run", ""), ("torchrun", '{"message": {"mess')])
def test_a_report_of_an_error_that_was_never_finished_ends_no_launcher(
    launcher: str, reply: str, start: Start, controller: Controller
) -> None:
    """A rank is killed while it writes torch's error file, or the disk is full."""
    plan = json.dumps({"crash": "at once", "reply": reply})
    job = start(launcher, ["--nproc-per-node", "1", "--max-restarts", "1"], "fake_worker.py", plan)
    assert job.finish() == 0, job.log
    assert job.has("trained-0-1")


def two_nodes(kind: str, port: int) -> list[list[str]]:
    common = ["--nnodes", "2", *rendezvous(kind, port)]
    return [[*common, "--node-rank", str(node)] for node in range(2)]


@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_every_node_waits_for_its_ranks_and_restarts(
    kind: str, launcher: str, start: Start, controller: Controller, unused_port: int
) -> None:
    jobs = [
        start(
            launcher, [*flags, "--nproc-per-node", "2", "--max-restarts", "1"], "fake_worker.py", "{}", name=f"n{node}"
        )
        for node, flags in enumerate(two_nodes(kind, unused_port))
    ]
    victim = jobs[0].pids(4)[3]
    os.kill(victim, signal.SIGKILL)
    jobs[0].rescue()
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.log for job in jobs)
    assert all(jobs[0].has(f"saved-{rank}-0") for rank in range(3))
    assert not any(jobs[0].has(f"sigterm-{rank}-0") for rank in range(3))
    assert [fault["pids"] for fault in controller.faults] == [[victim]]


@pytest.mark.parametrize("kind", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_gloo_across_two_nodes_after_a_restart(
    kind: str, launcher: str, start: Start, controller: Controller, unused_port: int
) -> None:
    jobs = [
        start(
            launcher, [*flags, "--nproc-per-node", "2", "--max-restarts", "1"], "gloo_worker.py", "1", name=f"n{node}"
        )
        for node, flags in enumerate(two_nodes(kind, unused_port))
    ]
    assert [job.finish(timeout_s=150) for job in jobs] == [0, 0], "".join(job.log for job in jobs)
    assert sorted(path.name for path in jobs[0].out.glob("sum-*-1")) == [f"sum-{rank}-1" for rank in range(4)]
    assert {path.read_text() for path in jobs[0].out.glob("sum-*-1")} == {"10"}


@pytest.mark.parametrize(("kind", "nodes"), [("static", 1), pytest.param("static", 2, marks=pytest.mark.slow)])
def test_no_launcher_starts_a_job_again_whose_drained_host_nobody_replaces(
    kind: str, nodes: int, start: Start, controller: Controller, unused_port: int
) -> None:
    """Where no host can join later, the other hosts would wait for the drained one in vain."""
    flags = two_nodes(kind, unused_port) if nodes > 1 else [rendezvous(kind, unused_port)]
    (controller.run_dir / "drained").write_text(socket.gethostname() if nodes == 1 else "another host of the job")
    more = ["--nproc-per-node", "1", "--max-restarts", "3"]
    jobs = [start("ttp-run", [*own, *more], "fake_worker.py", "{}", name=f"n{n}") for n, own in enumerate(flags)]
    jobs[0].pids(nodes)
    jobs[0].rescue()
    assert [job.finish() for job in jobs] == [75] * nodes, "".join(job.log for job in jobs)
    assert all(jobs[0].has(f"saved-{rank}-0") and not jobs[0].has(f"pid-{rank}-1") for rank in range(nodes))
    assert all("is drained" in job.log for job in jobs)


def test_node_that_lost_its_store_waits_too(start: Start, controller: Controller, unused_port: int) -> None:
    """The launcher with the rendezvous is killed: stock torch would stop the other node's ranks at once."""
    flags = [*rendezvous("c10d", unused_port), "--nnodes", "2", "--nproc-per-node", "1"]
    first = start("ttp-run", flags, "fake_worker.py", json.dumps({"save_s": 3}), name="n0")
    until(lambda: listens("localhost", unused_port, 1.0))
    second = start("ttp-run", flags, "fake_worker.py", json.dumps({"save_s": 3}), name="n1")
    first.pids(2)
    first.process.kill()
    second.rescue()
    assert second.finish() == 75, second.log
    assert "RendezvousConnectionError" in second.log
    assert [second.has(f"sigterm-{rank}-0") for rank in range(2)] == [False, False]
