"""Real jobs of several workers whose ranks are killed: finished steps are saved, and the job ends as the unbroken one
does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import pytest

from tests.adapters.mindspore.job import BEGUN, HERE, SMALL, STEP, Job, Kill
from ttp.launch.warm.starter import STATUS_FILE, read_status

pytestmark = [pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(900)]

RUN_S = 600
"""How long a job may take; it takes 20 s where nobody else works."""

PLAIN = [*SMALL, "--optimizer", "momentum", "--mode", "graph"]

Unbroken = Callable[[str, int, str], Job]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """Return a function that gives the same job without a kill. Each kind of job runs once."""
    known: dict[tuple[str, int, str], Job] = {}

    def job(mode: str, workers: int, optimizer: str) -> Job:
        if (mode, workers, optimizer) not in known:
            arguments = [*SMALL, "--optimizer", optimizer, "--mode", mode]
            made = Job(tmp_path_factory.mktemp("unbroken"), workers, arguments=arguments, max_restarts=0)
            known[mode, workers, optimizer] = made.run(RUN_S, ends=0)
        return known[mode, workers, optimizer]

    return job


def check_goes_on(job: Job, reference: Job, newest: int) -> tuple[Path, int]:
    """Check that all steps after the saved one equal the unbroken job's. Returns the checkpoint and the step.

    The saved step is ``newest``, or the one before if the survivors' gates were closed just before that update.
    """
    assert job.code == 0, job.output[-6000:]
    assert len(job.begun) == 2 and job.begun[1] in (newest - 1, newest), job.output[-6000:]
    step = job.begun[1]
    for rank, steps in reference.steps.items():
        later = {number: seen for number, seen in steps.items() if number > step}
        assert later and later.items() <= job.steps[rank].items(), (rank, step)
    (checkpoint,) = job.checkpoints
    assert checkpoint.name == f"tft_saved_checkpoints-step_{step}"
    return checkpoint, step


def check_contents(checkpoint: Path, job: Job, step: int, epoch_steps: int, dead: set[int]) -> None:
    """Check that a live rank wrote one file, with the contents of the original's files."""
    manifest = job.manifest(checkpoint)
    (file,) = (piece["file"] for piece in manifest["pieces"] if piece["kind"] == "shard")
    rank = int(file.split("/")[0].removeprefix("rank_"))
    epoch, in_epoch = (step - 1) // epoch_steps + 1, (step - 1) % epoch_steps + 1
    assert rank not in dead
    assert file == f"rank_{rank}/ttp_rank_{rank}-{epoch}_{in_epoch}.ckpt"
    found = ms.load_checkpoint(str(checkpoint / file), crc_check=True)
    said = {"epoch_num": epoch, "step_num": step, "cur_rank": rank, "batch_num": epoch_steps, "global_step": step}
    assert {name: int(found[name].asnumpy().item()) for name in said} == said
    assert float(found["loss_scale"].asnumpy()) == 1
    assert ms.restore_group_info_list(str(checkpoint / f"rank_{rank}" / "group_info.pb")) == list(range(job.workers))
    assert manifest["framework"] == "mindspore" and manifest["version"] == step


CASES: list[tuple[str, int, str, list[Kill], int]] = [
    # mode, workers, optimizer, kills, newest step that can be saved
    ("graph", 2, "momentum", [(0, 11, "gate")], 11),
    ("pynative", 2, "momentum", [(1, 17, "begin")], 16),
    ("graph", 2, "momentum", [(1, 6, "update")], 6),
    ("graph", 2, "adam", [(1, 16, "told")], 16),
    ("pynative", 2, "adam", [(0, 5, "updated")], 5),
]
QUICK = 1


@pytest.mark.parametrize(
    ("mode", "workers", "optimizer", "kills", "step"),
    [pytest.param(*case, marks=[] if at < QUICK else pytest.mark.slow) for at, case in enumerate(CASES)],
)
def test_the_job_ends_as_if_nobody_had_died(
    mode: str, workers: int, optimizer: str, kills: list[Kill], step: int, tmp_path: Path, unbroken: Unbroken
) -> None:
    arguments = [*SMALL, "--optimizer", optimizer, "--mode", mode]
    job = Job(tmp_path, workers, kills, arguments).run(RUN_S)
    checkpoint, step = check_goes_on(job, unbroken(mode, workers, optimizer), step)
    check_contents(checkpoint, job, step, 32 // workers, {kill[0] for kill in kills})
    (story,) = (tmp_path / "ttp_checkpoints" / "incidents").glob("*.jsonl")
    events = [json.loads(line) for line in story.read_text().splitlines()]
    assert [event["version"] for event in events if event["kind"] == "committed"] == [step]


TOUR: list[tuple[list[Kill], int]] = [
    # what hurts each launch of a job of four workers, eight steps an epoch, and the newest step that can be saved
    ([(0, 5, "gate")], 5),
    ([(1, 9, "begin")], 8),
    ([(2, 13, "update"), (3, 13, "update")], 13),
    ([(0, 17, "begin"), (3, 17, "begin")], 16),
]
"""Each of the workers, one and two of them, in mid-epoch and at the end of one."""


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_whoever_is_killed_and_started_again_by_hand(mode: str, tmp_path: Path) -> None:
    """In every launch the bits of each step's loss and state equal the unbroken job's."""
    arguments = [*SMALL, "--epochs", "3", "--mode", mode]
    unbroken = Job(tmp_path / "unbroken", 4, arguments=arguments, max_restarts=0).run(RUN_S, ends=0)
    kills = [kill for kill, _ in TOUR]
    job = Job(tmp_path / "job", 4, kills[0], arguments, max_restarts=len(TOUR) - 1, later=kills[1:])
    job.run(4 * RUN_S, ends=75)
    by_hand = Job(tmp_path / "job", 4, arguments=[*arguments, "--is_recover=1"], max_restarts=0).run(RUN_S, ends=0)
    begun = [*job.begun, *by_hand.begun]
    assert begun[0] == 0 and len(begun) == len(TOUR) + 1, begun
    for step, (kill, newest) in zip(begun[1:], TOUR, strict=True):
        assert step == newest or (step == newest - 1 and kill[0][2] != "begin"), begun
    for made in (job, by_hand):
        for rank, number, *seen in STEP.findall(made.output):
            assert tuple(seen) == unbroken.steps[int(rank)][int(number)], (rank, number)
    assert all(max(steps) == 24 for steps in by_hand.steps.values())
    assert {path.name for path in job.checkpoints} == {f"tft_saved_checkpoints-step_{step}" for step in begun[1:]}


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("continuity", ["warm", "off"])
def test_workers_of_a_restart_are_forked(tmp_path: Path, unbroken: Unbroken, continuity: str) -> None:
    """Workers are forked from a process with MindSpore imported. With ``off`` they are started, which takes longer."""
    run_dir = tmp_path / "run"
    env = {"TTP_CONTINUITY": continuity, "JOB_STAMPS": "1"}
    env |= {"JOB_KILL_WHEN": str(run_dir / STATUS_FILE)} if continuity == "warm" else {}
    job = Job(tmp_path, 2, [(1, 11, "begin")], PLAIN, env=env).run(RUN_S)
    check_goes_on(job, unbroken("graph", 2, "momentum"), 10)
    status = read_status(run_dir)
    assert (status is not None and status["state"] == "ready") == (continuity == "warm"), status
    killed_at = float(re.findall(r"killed at ([0-9.]+)", job.output)[0])
    again = job.output[[found.end() for found in BEGUN.finditer(job.output)][1] :]
    took_s = float(re.findall(r"stepped at ([0-9.]+)", again)[0]) - killed_at
    print(f"{continuity}: the next step is made {took_s:.2f} s after the kill")


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_program_saves_and_loads_by_functions_of_its_own(tmp_path: Path, unbroken: Unbroken) -> None:
    job = Job(tmp_path, 2, [(0, 11, "gate")], PLAIN, script=HERE / "own_files_job.py").run(RUN_S, ends=0)
    (file,) = (tmp_path / "own").iterdir()
    step = job.begun[1]
    assert file.name == f"{step}-1.ckpt" and step in (10, 11)
    assert "saved ['batch_num', 'cur_rank', 'epoch_num', 'loss_scale', 'step_num']" in job.output
    for rank, steps in unbroken("graph", 2, "momentum").steps.items():
        assert {number: seen for number, seen in steps.items() if number > step}.items() <= job.steps[rank].items()
    assert not job.checkpoints


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_under_msrun_that_does_not_join(tmp_path: Path, unbroken: Unbroken) -> None:
    """As in docs/mindspore-launch.md: msrun ends at once, the survivor saves and ends, and a start by hand goes on.

    The job uses MNIST's files of another directory.
    """
    reference = unbroken("graph", 2, "momentum")
    env = {"DATA_PATH": str(reference.directory / "MNIST_Data" / "train")}
    hurt = Job(tmp_path, 2, [(1, 11, "gate")], PLAIN, env=env).run_with_msrun(RUN_S)
    (checkpoint,) = hurt.checkpoints
    check_contents(checkpoint, hurt, step := hurt.manifest(checkpoint)["version"], 16, dead={1})
    assert f"[ttp rank 0] rank 0 exits with 75: saved version {step}" in hurt.output
    again = Job(tmp_path, 2, arguments=[*PLAIN, "--is_recover=1"], env=env).run_with_msrun(RUN_S)
    assert step in (10, 11) and again.begun == [step], again.output[-6000:]
    for rank, steps in reference.steps.items():
        later = {number: seen for number, seen in steps.items() if number > step}
        assert later and later == again.steps[rank]
        assert again.output.count(f"rank {rank} trained") == 1
    assert not (tmp_path / "MNIST_Data").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "epoch", "how"), [(1, 0, "kill"), (0, 1, "kill"), (0, 0, "raise")])
def test_between_two_trainings_of_a_decorated_function(rank: int, epoch: int, how: str, tmp_path: Path) -> None:
    script = HERE / "several_job.py"
    reference = Job(tmp_path / "unbroken", script=script, max_restarts=0).run(RUN_S, ends=0)
    assert reference.begun == [0] and not reference.checkpoints, reference.output[-6000:]
    job = Job(tmp_path / "job", script=script, kills=[(rank, epoch, how)]).run(RUN_S)
    check_goes_on(job, reference, 8 * (epoch + 1))
