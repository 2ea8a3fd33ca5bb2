"""Faults in real jobs: real launchers, real ranks, real SIGKILL; every run ends with the bits of the unbroken one.

A job survives several faults one after the other, each in an incarnation of its own, as a long job does; that also
saves starts of processes.

By default stock torchrun runs only the cases that differ most from ``ttp run``; everything runs with ``python -m pytest
tests/e2e/test_faults.py -m "slow or not slow"``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job, MakeJob, Unbroken, newest_of_survivors, two_nodes
from tests.ports import free_port
from tests.waiting import until
from ttp.cli.main import main
from ttp.store.manifest import Manifest

MakeForked = Callable[..., ForkedJob]

TTP, TORCHRUN = (pytest.mark.xdist_group(name) for name in ("ttp", "torchrun"))
"""One after the other: each job fills a machine."""

PHASES = ["data", "forward", "loss", "backward", "allreduced", "in_step", "stepped", "scheduler", "scheduled"]
TIMEOUT_S = 400

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def assert_saved_and_identical(job: Job, unbroken: Unbroken, dead: list[set[int]]) -> None:
    """Check that each fault led to one commit of the survivors' newest version, and that no bit differs at the end."""
    committed = job.committed()
    newest = [newest_of_survivors(job, life, killed) for life, killed in enumerate(dead)]
    assert committed == newest, job.story()
    assert job.starts() == [0, *committed], job.story()
    assert main(["verify", str(job.directory / "checkpoints")]) == 0
    assert job.results() == unbroken(job)


@pytest.mark.parametrize(
    ("launcher", "ranks", "phases"),
    [
        pytest.param("ttp", 4, PHASES, marks=[TTP, pytest.mark.slow], id="ttp-all"),
        pytest.param("torchrun", 2, [], marks=TORCHRUN, id="torchrun"),
        pytest.param("torchrun", 4, PHASES, marks=[TORCHRUN, pytest.mark.slow], id="torchrun-all"),
    ],
)
def test_sigkill_of_any_rank_in_every_phase(
    make_job: MakeJob, unbroken: Unbroken, launcher: str, ranks: int, phases: list[str]
) -> None:
    """The last fault kills all ranks but one at once, in the optimizer's step."""
    faults, lost = kills(ranks, phases)
    steps = 3 * len(faults) + 3
    job = make_job(launcher=launcher, ranks=ranks, steps=steps, max_restarts=len(faults), faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert_saved_and_identical(job, unbroken, lost)


def kills(ranks: int, phases: list[str]) -> tuple[list[dict[str, Any]], list[set[int]]]:
    """Return the faults, and the ranks that each of them kills."""
    lost = [{i % ranks} for i in range(len(phases))] + [set(range(ranks - 1))]
    kill = {"action": "kill", "together": True}
    faults = [
        kill | {"id": f"kill{i}", "ranks": sorted(these), "step": 2 + 3 * i, "phase": phase}
        for i, (these, phase) in enumerate(zip(lost, [*phases, "in_step"], strict=True))
    ]
    return faults, lost


@pytest.mark.parametrize(
    "launcher", [pytest.param("ttp", marks=TTP), pytest.param("torchrun", marks=[TORCHRUN, pytest.mark.slow])]
)
def test_whatever_happens_to_one_job(make_job: MakeJob, unbroken: Unbroken, launcher: str) -> None:
    """Four faults: the controller dies, a rank is killed, a rank raises in the update, the launcher gets a SIGTERM.

    The last three lead to one checkpoint each, between two steps. The last ends with 75, and the next launch continues.
    """
    faults = [
        {"id": "hold", "rank": 1, "step": 3, "phase": "data", "action": "hold", "when": "another reigns"},
        {"id": "kill", "rank": 0, "step": 6, "phase": "backward", "action": "kill"},
        {"id": "raise", "rank": 0, "step": 9, "phase": "in_step", "action": "raise"},
        {"id": "preempt", "rank": 1, "step": 12, "phase": "forward", "action": "term-all"},
    ]
    env = {"JOB_STEP_S": "0.1"}
    job = make_job(launcher=launcher, ranks=2, steps=60, max_restarts=2, faults=faults, env=env).start()
    job.wait_for_version(3)
    kill_controller(job)
    (job.directory / "another reigns").touch()
    code = job.wait(TIMEOUT_S - 120)
    assert code == 75 or (launcher == "torchrun" and code != 0), job.story()
    assert len(job.committed()) == 3, job.story()
    job.env = {}
    assert job.run(TIMEOUT_S // 4) == 0, job.story()
    assert_saved_and_identical(job, unbroken, [{0}, set(), set()])
    raised = job.incidents()[1]
    cause = next(e["text"] for e in raised if e.get("evidence") == "exception")
    assert "ValueError: a wrong turn in the training loop" in cause
    assert any(e["kind"] == "answer" and e["ranks"] == [0] and e["phase"] == "torn" for e in raised)
    assert all(0 not in e["savers"].values() for e in raised if e["kind"] == "plan")


def kill_controller(job: Job) -> None:
    """Kill the controller and wait until another one leads the job."""
    first = json.loads(job.ttp("status", "--json").stdout)["controller"]["pid"]
    os.kill(first, signal.SIGKILL)

    def another_leads() -> bool:
        status = job.ttp("status", "--json")
        seen = json.loads(status.stdout) if status.returncode == 0 else None
        return seen is not None and seen["controller"]["pid"] != first and seen["stage"] == "training"

    until(another_leads, story=job.story)


@pytest.mark.parametrize("whom", ["saver", pytest.param("bystander", marks=pytest.mark.slow)])
def test_another_rank_dies_while_one_saves(forked_job: MakeForked, unbroken: Unbroken, whom: str) -> None:
    fault = {"id": "first", "rank": 2, "step": 2, "phase": "backward", "action": "kill"}
    job = forked_job(ranks=3, steps=4, env={"JOB_WAITS_SAVING": "the other is dead"}, faults=[fault]).begin()
    (saver,) = until(lambda: [rank for rank in (0, 1) if (job.directory / f"saving.{rank}").exists()], story=job.story)
    dead = saver if whom == "saver" else 1 - saver
    job.kill(dead)
    (job.directory / "the other is dead").touch()
    codes = job.end(TIMEOUT_S / 3)
    assert [codes[rank] for rank in (dead, 2, 1 - dead)] == [-9, -9, 75], job.story()
    (incident,) = job.incidents()
    replans = [e["lost_savers"] for e in incident if e["kind"] == "replan"]
    assert replans == [[saver]] if whom == "saver" else [saver] not in replans, job.story()
    assert job.live(TIMEOUT_S / 3) == [0] * 3, job.story()
    assert_saved_and_identical(job, unbroken, [{2, dead}])


@pytest.mark.parametrize("how", ["leave", pytest.param("interrupt", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_alone_keeps_its_rank_local_state(
    forked_job: MakeForked, unbroken: Unbroken, how: str
) -> None:
    """It removed its page as it left, and the others' next collective fails only after that."""
    fault = {"id": "left", "rank": 1, "step": 3, "phase": "loss", "action": how}
    job = forked_job(ranks=2, steps=6, faults=[fault]).begin()
    assert job.end(TIMEOUT_S / 3)[0] == 75, job.story()
    assert job.live(TIMEOUT_S / 3) == [0, 0], job.story()
    assert_saved_and_identical(job, unbroken, [{1}])


def test_a_checkpoint_on_request(forked_job: MakeForked, unbroken: Unbroken) -> None:
    hold = {"id": "hold", "rank": 1, "step": 3, "phase": "data", "action": "hold", "when": "saved"}
    job = forked_job(ranks=2, steps=6, faults=[hold]).begin()
    job.wait_for_version(3, rank=1)
    saved = job.ttp("save", "--json", "--reason", "before the maintenance")
    assert saved.returncode == 0, saved.stderr + job.story()
    answer = json.loads(saved.stdout)
    assert answer["saved"] and answer["version"] == 3
    (job.directory / "saved").touch()
    assert job.end(TIMEOUT_S / 3) == [0, 0], job.story()
    assert job.committed() == [3] and job.starts() == [0]  # nobody was restarted
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
@pytest.mark.parametrize("launcher", [pytest.param("ttp", marks=TTP), pytest.param("torchrun", marks=TORCHRUN)])
def test_two_nodes_save_and_resume_together(
    make_job: MakeJob, unbroken: Unbroken, launcher: str, rendezvous: str
) -> None:
    """Two agents have two ranks each. After a kill on either node the job is saved and both nodes restart."""
    at = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    nodes = two_nodes() if rendezvous == "static" else [["--nnodes", "2", *at]] * 2
    faults = [
        {"id": "far", "rank": 3, "step": 3, "phase": "backward", "action": "kill"},
        {"id": "near", "rank": 0, "step": 7, "phase": "data", "action": "kill"},
    ]
    job = make_job(launcher=launcher, steps=10, max_restarts=3, faults=faults, nodes=nodes)
    assert job.run(TIMEOUT_S - 60) == 0, job.story()
    assert_saved_and_identical(job, unbroken, [{3}, {0}])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ttp", "torchrun"])
@pytest.mark.parametrize("per_host", [1, 2])
def test_what_a_host_leaves_that_has_lost_all_its_ranks(
    make_job: MakeJob, unbroken: Unbroken, launcher: str, per_host: int
) -> None:
    """Only the launcher of that host can read their pages; without them their random streams would be lost."""
    ranks = 2 * per_host
    victims = list(range(per_host, ranks))
    fault = {"id": "host", "ranks": victims, "step": 5, "phase": "backward", "action": "kill", "together": True}
    job = make_job(
        ranks=ranks, launcher=launcher, steps=9, max_restarts=3, faults=[fault], nodes=two_nodes(), hosts=["one", "two"]
    )
    assert job.run(TIMEOUT_S - 60) == 0, job.story()
    committed = job.directory / "checkpoints" / f"tft_saved_checkpoints-step_{job.committed()[0]}"
    assert json.loads((committed / "manifest.json").read_text())["missing_pages"] == []
    assert_saved_and_identical(job, unbroken, [set(victims)])


def test_without_any_launcher_of_ours(forked_job: MakeForked, unbroken: Unbroken) -> None:
    """Rank 0 starts the controller, which survives rank 0."""
    fault = {"id": "kill0", "rank": 0, "step": 3, "phase": "in_step", "action": "kill"}
    job = forked_job(ranks=2, steps=6, faults=[fault])
    assert job.live(TIMEOUT_S / 3) == [-9, 75], job.story()
    assert job.live(TIMEOUT_S / 3) == [0, 0], job.story()
    assert_saved_and_identical(job, unbroken, [{0}])


@pytest.mark.slow
@TORCHRUN
def test_the_replica_with_a_flipped_bit_does_not_save(make_job: MakeJob, unbroken: Unbroken) -> None:
    """The other replicas outvote it, and the restart replaces it."""
    faults = [
        {"id": "flip", "rank": 0, "step": 3, "phase": "stepped", "action": "flip"},
        {"id": "kill", "rank": 3, "step": 4, "phase": "data", "action": "kill"},
    ]
    job = make_job(steps=6, max_restarts=1, faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    (events,) = job.incidents()
    plan = next(e for e in events if e["kind"] == "plan")
    assert plan["odd"] == [0] and plan["savers"] == {"model": 1}, job.story()
    assert job.committed() == [4] and job.starts() == [0, 4], job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
def test_a_saver_is_killed_in_the_middle_of_its_part(forked_job: MakeForked, unbroken: Unbroken) -> None:
    """Rank 1 is killed in training, and rank 3 while it writes a third of the state: only that is written again."""
    fault = {"id": "kill", "rank": 1, "step": 4, "phase": "forward", "action": "kill"}
    job = forked_job(steps=9, faults=[fault], hosts=["one", "one", "two", "two"])
    job.env |= {"TTP_STRIPES": "3", "JOB_DIES_SAVING": "3"}
    assert job.live(TIMEOUT_S / 3) == [75, -9, 75, -9], job.story()
    assert job.live(TIMEOUT_S / 3) == [0] * 4, job.story()
    assert_saved_and_identical(job, unbroken, [{1, 3}])
    begun = (job.directory / "saving.3").read_text()
    checkpoint = job.directory / "checkpoints" / f"tft_saved_checkpoints-step_{job.committed()[0]}"
    pieces = {p.shard: p for p in Manifest.load(checkpoint).pieces if p.kind == "shard"}
    assert sorted(pieces) == ["model#1/3", "model#2/3", "model#3/3"]
    assert {p.writer for p in pieces.values()} == {0, 2}
    (again,) = (p for p in pieces.values() if f"_{p.shard[6]}of3" in begun)  # model#2/3 is in ..._2of3.distcp
    assert again.file != begun
    assert not (checkpoint / begun).exists()
    first = next(e for e in job.incidents()[0] if e["kind"] == "plan")
    assert {shard: rank for shard, rank in first["savers"].items() if rank == 3} == {again.shard: 3}
    assert "model#2/3" in job.ttp("inspect", str(checkpoint)).stdout
    told = " ".join(job.ttp("incidents", str(job.directory / "checkpoints"), "--last").stdout.split())
    assert "rank 3 writes model#" in told and "savers 3 were lost or failed" in told, told
