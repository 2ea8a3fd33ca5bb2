"""The programs of MindSpore's documentation, unchanged, in real jobs: killed, and resumed by hand as the documentation
says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.mindspore.job import HERE, STEP, Job, Kill
from tests.adapters.mindspore.test_kills import RUN_S

pytestmark = [pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(1500)]

EPOCH = 3
"""Steps of an epoch; five of them are trained, by every worker on the same data."""
EPOCHS = 5


def launch(directory: Path, workers: int, kills: list[Kill], *arguments: str, **env: str) -> Job:
    """Start the program as a user does who knows only the launcher of ttp."""
    job = Job(directory, workers, kills, list(arguments), 0, HERE / "seed_job.py", ["--mindio"], env)
    return job.run(RUN_S, ends=75 if kills else 0)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job without kills, of two workers in PyNative mode: graph mode differs in the last bits.

    It waits for each operator: MindSpore's threads spin while they wait for each other, which takes most of the time.
    """
    job = launch(tmp_path_factory.mktemp("unbroken"), 2, [], "--mode=pynative", JOB_WAITS="1")
    assert sorted(job.steps[0]) == list(range(1, EPOCH * EPOCHS + 1))
    return job


def saved_by(job: Job, newest: int, dead: int) -> tuple[int, list[str]]:
    """Return the step that a launch has saved, ``newest`` or the one before, and the next launch's arguments for it."""
    step = max(int(path.name.rpartition("_")[2]) for path in job.checkpoints)
    assert step in (newest - 1, newest), job.output[-6000:]
    epoch, in_epoch = (step - 1) // EPOCH + 1, (step - 1) % EPOCH + 1
    (file,) = (job.directory / "ttp_checkpoints").glob(f"*-step_{step}/rank_*/*.ckpt")
    rank = int(file.parent.name.removeprefix("rank_"))
    assert rank != dead and file.name == f"ttp_rank_{rank}-{epoch}_{in_epoch}.ckpt"
    said = ["--is_recover=1", f"--cur_rank={rank}", f"--cur_epoch={epoch}", f"--cur_step={in_epoch}"]
    return step, said


def tour(directory: Path, reference: Job, workers: int, mode: str, kills: list[Kill]) -> None:
    """Run launches that each resume from the checkpoint of the one before; the last trains to the end."""
    told: list[str] = []
    begun = 0
    for kill in kills:
        job = launch(directory, workers, [kill], f"--mode={mode}", *told)
        check_steps(job, reference, begun)
        begun, told = saved_by(job, kill[1], kill[0])
    last = launch(directory, workers, [], f"--mode={mode}", *told, JOB_WAITS="1")
    check_steps(last, reference, begun)
    assert max(last.steps[0]) == EPOCH * EPOCHS


def check_steps(job: Job, reference: Job, begun: int) -> None:
    """Check that the bits of each step's loss and weights equal the unbroken job's."""
    assert job.begun == [begun], job.output[-6000:]
    seen = STEP.findall(job.output)
    assert seen, job.output[-6000:]
    for rank, number, *bits in seen:
        assert tuple(bits) == reference.steps[int(rank)][int(number)], (rank, number)


def test_the_power_off_program_is_resumed_by_hand(tmp_path: Path, unbroken: Job) -> None:
    """Bit for bit as without a kill."""
    tour(tmp_path, unbroken, 2, "pynative", [(1, EPOCH + 2, "gate")])


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_four_cards_killed_twice(mode: str, tmp_path: Path) -> None:
    reference = launch(tmp_path / "unbroken", 4, [], f"--mode={mode}")
    # in mid-epoch, also if the step before is saved: the program's own init_epoch cannot go on from an epoch's end
    tour(tmp_path / "job", reference, 4, mode, [(0, EPOCH + 2, "gate"), (2, 3 * EPOCH + 2, "update")])
