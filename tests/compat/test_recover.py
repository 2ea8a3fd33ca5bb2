"""ARF of programs for MindIO: under ``ttp run`` a rank is killed, and a new process takes its seat.

Real processes over gloo, with handlers of the program's own; the bits of the unbroken run. A failure during the
replacement ends in the start of all ranks from the checkpoint that was made first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_clusterd import FakeClusterD
from tests.cli.test_clusterd import agent
from tests.compat import sharded_program
from tests.e2e.harness import Job
from ttp.compat.mindio.placing import tell_children

MakeJob = Callable[..., Job]
PROGRAM = Path(sharded_program.__file__)
STEPS, TIMEOUT_S = 9, 240


def made(make_job: MakeJob, faults: list[dict[str, Any]], ranks: int = 4, **env: str) -> Job:
    flags = ["--standalone", "--mindio"]
    settings: dict[str, Any] = {"script": PROGRAM, "ranks": ranks, "steps": STEPS, "max_restarts": 3, "flags": flags}
    job = make_job(faults=faults, **settings)
    saves = {"TTP_SAVE_DIR": str(job.directory / "checkpoints")}
    job.env = {"PYTHONPATH": str(job.directory), **saves, **env}  # the first entry counts as the script's own directory
    tell_children(job.env)  # before there is a launcher: all ranks are forked
    return job


def notes(job: Job, rank: int) -> list[dict[str, Any]]:
    path = job.directory / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def order(job: Job, rank: int) -> list[str]:
    return [note["what"] for note in notes(job, rank)]


def pids(job: Job, rank: int) -> list[int]:
    return list(dict.fromkeys(note["pid"] for note in notes(job, rank)))


def story(job: Job) -> str:
    return "\n".join([job.story(), *(f"{rank}: {notes(job, rank)}" for rank in range(job.ranks))])


def check_bits(job: Job) -> None:
    assert [notes(job, rank)[-1].get("digest") for rank in range(job.ranks)] == sharded_program.unbroken(
        (STEPS, job.ranks)
    ), story(job)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
@pytest.mark.parametrize(
    ("dead", "at"),
    [
        ([1], "backward"),
        *(
            pytest.param(dead, at, marks=pytest.mark.slow)
            for dead in ([1], [0], [2, 3])
            for at in ("data", "inside", "updated")
        ),
    ],
)
def test_a_new_process_takes_the_seat_of_the_dead(make_job: MakeJob, dead: list[int], at: str) -> None:
    job = made(make_job, [{"rank": rank, "step": 5, "at": at, "with": dead} for rank in dead])
    assert job.run(TIMEOUT_S - 30) == 0, story(job)
    check_bits(job)
    for rank in range(job.ranks):
        assert len(pids(job, rank)) == (2 if rank in dead else 1), story(job)
    for rank in dead:
        first, *rest = [note for note in notes(job, rank) if note["pid"] == pids(job, rank)[1]]
        assert (first["what"], first["reboot"], first["type"]) == ("begin", True, "arf")
        assert [note["what"] for note in rest] == ["rebuild", "repair", "rollback", "train", "done"], story(job)
        assert {note["dst"][0] for note in rest if note["what"] == "repair"} == {rank}
    assert {note["type"] for rank in range(4) for note in notes(job, rank) if note["what"] == "rebuild"} == {"recover"}
    assert "ranks do not go on in their processes" not in job.log.read_text()


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_groups_are_made_anew_inside_of_a_default_group_that_is_kept(make_job: MakeJob) -> None:
    """As MindSpeed-LLM does it. The new process then has made fewer groups than the others."""
    job = made(make_job, [{"rank": 1, "step": 5, "at": "data"}], JOB_KEPT="1")
    assert job.run(TIMEOUT_S - 30) == 0, story(job)
    check_bits(job)
    assert [len(pids(job, rank)) for rank in range(4)] == [1, 2, 1, 1], story(job)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
@pytest.mark.parametrize(
    "second",
    [
        {"rank": 0, "at": "rebuild"},
        *(
            pytest.param({"rank": rank, "at": at, "what": what}, marks=pytest.mark.slow)
            for rank, at, what in [
                (0, "stop", "kill"),
                (2, "clean", "raise"),
                (3, "repair", "kill"),
                (1, "repair", "kill"),
                (1, "rebuild", "raise"),
                (1, "rollback", "kill"),
                (0, "rollback", "raise"),
            ]
        ),
    ],
    ids=lambda fault: "-".join(str(value) for value in fault.values()),
)
def test_whatever_goes_wrong_meanwhile_all_start_from_the_checkpoint(make_job: MakeJob, second: dict[str, Any]) -> None:
    job = made(make_job, [{"rank": 1, "step": 5, "at": "backward"}, second])
    assert job.run(TIMEOUT_S - 30) == 0, story(job)
    check_bits(job)
    assert (job.directory / "fired1").exists(), story(job)
    saved = int((job.directory / "checkpoint").read_text())
    for rank in range(job.ranks):
        assert [note["step"] for note in notes(job, rank) if note["what"] == "train"][-1] == saved, story(job)
        assert len(pids(job, rank)) >= 2, story(job)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_without_arf_it_is_a_start_of_all(make_job: MakeJob) -> None:
    job = made(make_job, [{"rank": 1, "step": 5, "at": "backward"}], ranks=2, JOB_ARF="0")
    assert job.run(TIMEOUT_S - 30) == 0, story(job)
    check_bits(job)
    assert [len(pids(job, rank)) for rank in range(2)] == [2, 2], story(job)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_clusterd_chooses_to_recover(make_job: MakeJob) -> None:
    """``ttp clusterd`` passes everything on: the offer, the choice and the result."""
    job = made(make_job, [{"rank": 1, "step": 5, "at": "backward", "after": "go"}], ranks=4)
    job.start()
    run_dir = str(job.directory / "run")
    with FakeClusterD() as clusterd, agent(job.port, clusterd.port, TTP_RUN_DIR=run_dir) as process:
        assert process.stderr is not None
        while "handlers of its own" not in process.stderr.readline():
            assert process.poll() is None, story(job)
        (job.directory / "go").touch()
        assert [(f.rank_id, f.fault_type) for f in clusterd.hear("ReportProcessFault").fault_ranks] == [("1", "1")]
        clusterd.send("stopTrain", "stop_train", faults=(1,))
        assert clusterd.hear("ReportStopComplete").status.code == 0, story(job)
        clusterd.send("globalFault", "on_global_rank", faults=(1,))
        assert list(clusterd.hear("ReportRecoverStrategy").strategies) == ["exit", "dump", "recover"], story(job)
        clusterd.send("changeStrategy", change_strategy="upgrade")
        refused = clusterd.hear("ReportRecoverStatus")
        assert (refused.strategy, refused.status.code) == ("upgrade", 405), refused
        clusterd.send("changeStrategy", change_strategy="recover")
        done = clusterd.hear("ReportRecoverStatus", 2)
        assert (done.strategy, done.status.code) == ("recover", 0), story(job)
        assert job.wait(TIMEOUT_S - 30) == 0, story(job)
    check_bits(job)
    assert [len(pids(job, rank)) for rank in range(4)] == [1, 2, 1, 1], story(job)
