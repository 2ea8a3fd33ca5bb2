"""Real jobs of several workers, killed: what was finished is saved, and the job ends as the unbroken one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import pytest

from tests.adapters.mindspore.job import SMALL, Job, Kill

pytestmark = [pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(900)]

RUN_S = 600
"""How long a job may take; it takes 20 s where nobody else works."""

Unbroken = Callable[[str, int, str], Job]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The same job without a kill, run once for each kind."""
    known: dict[tuple[str, int, str], Job] = {}

    def job(mode: str, workers: int, optimizer: str) -> Job:
        if (mode, workers, optimizer) not in known:
            arguments = [*SMALL, "--optimizer", optimizer, "--mode", mode]
            made = Job(tmp_path_factory.mktemp("unbroken"), workers, arguments=arguments, max_restarts=0)
            assert made.run(RUN_S).code == 0, made.output[-6000:]
            known[mode, workers, optimizer] = made
        return known[mode, workers, optimizer]

    return job


def check_goes_on(job: Job, reference: Job, newest: int) -> tuple[Path, int]:
    """Everything after the saved step is as in the unbroken job; returns the checkpoint and the step.

    Saved is ``newest``, or the step before it where the gates of the survivors were closed just before that update.
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
    """One file, of a rank that lives, with what the original puts into it."""
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
    assert manifest["framework"] == "mindspore" and manifest["version"] == step


CASES: list[tuple[str, int, str, list[Kill], int]] = [
    # mode, workers, optimizer, kills, newest step that can be saved
    ("graph", 2, "momentum", [(0, 11, "gate")], 11),
    ("pynative", 2, "momentum", [(1, 17, "begin")], 16),
    ("graph", 2, "momentum", [(1, 6, "update")], 6),
    ("graph", 2, "adam", [(1, 16, "told")], 16),
    ("pynative", 2, "adam", [(0, 5, "updated")], 5),
    ("graph", 4, "sgd", [(2, 5, "update")], 5),
    ("graph", 4, "sgd", [(0, 9, "begin")], 8),
    ("graph", 4, "sgd", [(0, 6, "gate"), (3, 6, "gate")], 6),
    ("graph", 4, "sgd", [(1, 9, "begin"), (2, 9, "begin")], 8),
    ("pynative", 4, "sgd", [(3, 5, "gate")], 5),
    ("pynative", 4, "sgd", [(0, 9, "begin"), (2, 9, "begin")], 8),
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
