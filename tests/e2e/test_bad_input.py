"""Bad input to the public interface: one clear message with a remedy, nothing lost, no other process hurt."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage import flip
from tests.e2e.conftest import Run, runs, solo_env
from tests.e2e.forked import Forked, ForkedJob
from tests.waiting import until
from ttp.cli.main import main
from ttp.store.manifest import Manifest
from ttp.store.share import Share


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    done = runs(directory)(directory / "ck", 4, SOLO_SAVE="4")
    assert done.returncode == 0 and "\nsaved 4" in done.stdout, done.stdout + done.stderr
    until(lambda: '"finished"' in (directory / "ck/incidents/launches.log").read_text())  # the controller ends last
    return directory / "ck"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A whole checkpoint of version 4."""
    shutil.copytree(saved, tmp_path / "ck")
    return tmp_path / "ck" / "tft_saved_checkpoints-step_4"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "3"}, "RANK=3 is not in 0..0"),
        ({"TTP_PORT": "0"}, "TTP_PORT='0' is not valid"),
        ({"TTP_FREEEZE_S": "9"}, "did you mean TTP_FREEZE_S?"),
    ],
)
def test_an_environment_that_makes_no_sense(solo: Run, tmp_path: Path, env: dict[str, str], text: str) -> None:
    """See test_config.py for all that may be wrong with one."""
    done = solo(tmp_path, 1, **env)
    assert done.returncode == 64 and text in done.stderr


def test_a_rank_that_leaves_with_64_before_any_has_joined_leaves_word(
    solo: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a batch script that asks for the verdict would restart the job for ever. A good launch overrides it."""
    assert solo(tmp_path / "ck", 1, RANK="3", TORCHELASTIC_RUN_ID="mine").returncode == 64
    assert main(["verdict", str(tmp_path / "ck"), "--run-id", "mine"]) == 64
    assert "RANK=3 is not in 0..0" in capsys.readouterr().err
    assert solo(tmp_path / "ck", 1, TORCHELASTIC_RUN_ID="mine").returncode == 0
    assert main(["verdict", str(tmp_path / "ck"), "--run-id", "mine"]) == 0


def test_a_start_script_cannot_switch_the_resume_off(solo: Run, checkpoint: Path) -> None:
    """``RESUME_MODE_ENABLE=0`` is ignored, because it would discard the checkpoint of a restart: docs/mindio.md."""
    done = solo(checkpoint.parent, 5, RESUME_MODE_ENABLE="0")
    assert done.returncode == 0 and "start 4" in done.stdout


def test_a_port_held_by_something_else_is_named_with_its_owner(solo: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = solo(tmp_path, 1, TTP_PORT=port)
    assert done.returncode == 64
    assert port in done.stderr and f"pid {os.getpid()}" in done.stderr


def test_a_save_dir_of_a_running_job_is_refused_and_that_of_a_killed_one_is_not(solo: Run, tmp_path: Path) -> None:
    first = Forked("tests.e2e.solo", solo_env(tmp_path) | {"SOLO_TELL": "1"}, tmp_path / "first.out", [tmp_path, 10**9])
    try:
        first.wait_for("trained")
        until((tmp_path / "incidents" / "launches.log").exists, 60)
        second = solo(tmp_path, 1, TTP_RUN_DIR=str(tmp_path / "second"))
        assert second.returncode == 64 and "start" not in second.stdout
        assert f"another job that runs now saves to {tmp_path}" in second.stderr, second.stderr
        assert "stop that job first" in second.stderr
        assert not (tmp_path / "incidents" / "wrong.json").exists(), "`ttp verdict` would take it for the first job's"
    finally:
        first.kill()
    third = solo(tmp_path, 1, TTP_RUN_DIR=str(tmp_path / "third"))
    assert third.returncode == 0 and "start 0" in third.stdout, third.stderr


def test_a_save_dir_that_cannot_be_written_is_said_at_the_start(solo: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = solo(tmp_path / "file" / "ck", 1)
    assert done.returncode == 64
    assert str(tmp_path / "file" / "ck") in done.stderr and "start" not in done.stdout


def test_a_program_that_calls_ttp_wrongly_ends_with_64_and_is_saved(solo: Run, tmp_path: Path) -> None:
    done = solo(tmp_path / "ck", 9, SOLO_MISUSE="3")
    assert done.returncode == 64, done.stderr
    assert "wrap_optimizer() was called twice" in done.stderr and 'solo.py", line' in done.stderr
    assert "called twice" in (tmp_path / "ck" / "incidents" / "wrong.json").read_text(), "for ttp verdict"
    assert "start 3" in solo(tmp_path / "ck", 3, on=False).stdout


def test_state_that_cannot_be_saved_ends_the_job_with_64_before_its_second_update(solo: Run, tmp_path: Path) -> None:
    done = solo(tmp_path / "ck", 9, SOLO_ODD="1")
    assert done.returncode == 64, done.stderr
    assert "optim.state.0.weight.odd is a builtins.object, which has no form on disk" in done.stderr


def test_a_configuration_that_shows_to_be_wrong_in_training_is_reported_too(solo: Run, tmp_path: Path) -> None:
    """Without the report other ranks would wait for a rank that just left."""
    done = solo(tmp_path / "ck", 9, SOLO_STRANGER="1")
    assert done.returncode == 64
    cause = f"a configuration or a program is wrong: rank 0 on {socket.gethostname()} raised ConfigError: the opt"
    assert f"exits with 64: {cause}" in done.stderr


def test_what_one_rank_alone_is_refused_ends_every_rank_with_64_and_says_why(
    forked_job: Callable[..., ForkedJob],
) -> None:
    """The other ranks wait in the next all-reduce; the finished version is saved."""
    odd = {"id": "odd", "rank": 1, "step": 0, "phase": "in_step", "action": "odd"}
    job = forked_job(ranks=2, steps=4, faults=[odd])
    assert job.live(100) == [64, 64], job.story()
    said = (job.directory / "rank0.out").read_text()
    assert "rank 0 exits with 64" in said
    assert re.search(r"rank 1 on \S+ raised UsageError: this training state could not", said), said
    assert "odd is a builtins.object, which has no form on disk" in said, said
    assert job.committed() in ([1], [2]), job.story()


def test_a_wrong_call_without_ttp_is_an_error_like_any_other(solo: Run, tmp_path: Path) -> None:
    done = solo(tmp_path / "ck", 9, on=False, SOLO_MISUSE="1")
    assert done.returncode == 1 and "UsageError: wrap_optimizer() needs model=" in done.stderr


def test_a_save_dir_that_is_a_url(solo: Run) -> None:
    done = solo("s3://bucket/ck", 1)
    assert done.returncode == 64 and "s3://bucket/ck" in done.stderr


def test_without_a_port_it_trains_as_usual_and_still_restores(solo: Run, checkpoint: Path) -> None:
    assert "start 4" in solo(checkpoint.parent, 6, on=False).stdout
    fresh = solo(checkpoint.parent.parent / "empty", 6, on=False)
    assert fresh.returncode == 0 and "start 0" in fresh.stdout


@pytest.mark.parametrize(
    "step_done", [pytest.param("", id="learned"), pytest.param("1", id="step_done", marks=pytest.mark.slow)]
)
def test_the_resumed_run_has_the_bits_of_the_unbroken_one(solo: Run, tmp_path: Path, step_done: str) -> None:
    """Weights are equal, and so is their average, which is updated after each step."""
    unbroken = solo(tmp_path / "other", 8, on=False).stdout.split("weights ")[1]
    saved = solo(tmp_path / "ck", 4, SOLO_SAVE="4", SOLO_STEP_DONE=step_done)
    assert saved.returncode == 0 and "\nsaved 4" in saved.stdout, saved.stdout + saved.stderr
    resumed = solo(tmp_path / "ck", 8, SOLO_STEP_DONE=step_done)
    assert "start 4" in resumed.stdout and resumed.stdout.split("weights ")[1] == unbroken


def second_checkpoint(solo: Run, first: Path) -> Path:
    done = solo(first.parent, 7, SOLO_SAVE="7")
    assert done.returncode == 0 and "start 4" in done.stdout, done.stderr
    return first.parent / "tft_saved_checkpoints-step_7"


def test_a_bad_checkpoint_is_said_left_alone_and_the_one_before_is_taken(solo: Run, checkpoint: Path) -> None:
    newest = second_checkpoint(solo, checkpoint)
    pieces = sorted(p for p in newest.iterdir() if p.name != ".metadata")
    for damaged in pieces:
        whole = damaged.read_bytes()
        flip(damaged)
        done = solo(checkpoint.parent, 8, on=False)
        assert "start 4" in done.stdout, (damaged.name, done.stderr)
        assert damaged.exists() and newest.name in done.stderr, done.stderr
        damaged.write_bytes(whole)
    assert "start 7" in solo(checkpoint.parent, 8, on=False).stdout


def test_a_checkpoint_of_another_model_lists_names_and_shapes(solo: Run, checkpoint: Path) -> None:
    done = solo(checkpoint.parent, 8, 32, on=False)
    assert done.returncode not in (0, 64) and "start" not in done.stdout
    assert "0.weight" in done.stderr and "[16, 4]" in done.stderr and "[32, 4]" in done.stderr
    assert solo(checkpoint.parent, 8, 32).returncode == 64, "a restart would meet it again"


def test_a_program_that_has_ended_says_so_and_one_that_fails_then_does_not(tmp_path: Path) -> None:
    """``ttp run --mindspore`` ignores a crash after a program's end, because libraries crash when they are unloaded."""
    ended, script, own = tmp_path / "run" / "ended", tmp_path / "train.py", Path(__file__).parents[2] / "examples"
    script.write_text(WITHOUT_TORCH)
    for code in (1, 0):
        command = [sys.executable, str(script), str(own / "own_adapter"), str(tmp_path / "ck"), str(code)]
        done = subprocess.run(command, env=solo_env(tmp_path), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code and "trained" in done.stdout, done.stderr
        assert len(list(ended.glob("*"))) == 1 - code


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(solo: Run, checkpoint: Path) -> None:
    done = solo(checkpoint.parent, 8, SOLO_SAVE="6", SOLO_FSIZE="2000")
    assert done.returncode == 0 and "weights" in done.stdout, done.stderr
    assert "not saved" in done.stdout and "errno 27" in done.stdout
    assert "start 4" in solo(checkpoint.parent, 8, on=False).stdout  # what was there is still whole
    assert not list(checkpoint.parent.glob("tft_saved_checkpoints-step_6*"))


def two_ranks(
    tmp_path: Path,
    *directories: Path,
    steps: int,
    places: tuple[int, int] = (0, 1),
    hosts: tuple[str, str] = ("a", "a"),
    launch: int = 0,
    meanwhile: Callable[[Forked, Forked], None] = lambda _one, _other: None,
) -> list[tuple[int, str, str]]:
    """Return exit codes and output of a job of two ranks, each with its ``save_dir`` and the name of its host."""
    env = solo_env(tmp_path) | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(launch)}
    ranks = [
        Forked(
            "tests.e2e.solo",
            env | {"RANK": str(rank), "LOCAL_RANK": str(places[rank]), "TTP_HOST": hosts[rank]},
            tmp_path / f"rank{rank}.out",
            (directory, steps),
        )
        for rank, directory in enumerate(directories)
    ]
    meanwhile(*ranks)
    return [(rank.wait(), rank.out, rank.err) for rank in ranks]


def test_ranks_that_do_not_see_the_same_storage_fail_and_say_who_saw_what(checkpoint: Path, tmp_path: Path) -> None:
    for code, out, err in two_ranks(tmp_path, checkpoint.parent, tmp_path / "empty", steps=9, hosts=("a", "b")):
        assert code != 0 and "start" not in out
        assert "rank 0 found step 4" in err and "rank 1 found nothing whole" in err
        assert "Is save_dir shared by all hosts?" in err


def test_a_restart_looks_again_for_a_directory_that_one_host_does_not_see(checkpoint: Path, tmp_path: Path) -> None:
    """A mount that is away for some seconds must not cost launches, of which three without progress end the job."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "below the mount")
    (tmp_path / "below the mount").mkdir()

    def mount(_: Forked, other: Forked) -> None:
        until(lambda: "Looking again in 1 s" in other.err, 100)
        link.unlink()
        link.symlink_to(checkpoint.parent)

    said = two_ranks(tmp_path, checkpoint.parent, link, steps=5, hosts=("a", "b"), launch=1, meanwhile=mount)
    for code, out, err in said:
        assert code == 0 and "start 4" in out, err
        assert "rank 1 found nothing whole. Is save_dir shared by all hosts? Looking again in 1 s" in err


def test_damage_that_one_rank_finds_in_its_share_is_damage_for_all(solo: Run, checkpoint: Path, tmp_path: Path) -> None:
    newest = second_checkpoint(solo, checkpoint)
    flip(newest / "__0_0.distcp")
    said = two_ranks(tmp_path, checkpoint.parent, checkpoint.parent, steps=8)
    assert all(code == 0 and "start 4" in out for code, out, _ in said), said
    found = [f"skipped {newest.name}: piece __0_0.distcp is damaged" in err for _, _, err in said]
    trusting = ["this rank could restore step 7, but another rank could not" in err for _, _, err in said]
    assert sorted(found) == sorted(trusting) == [False, True] and found != trusting, said


@pytest.mark.parametrize(("lost", "reason"), [("__0_0.distcp", " is missing"), ("manifest.json", ": ttp did not")])
def test_a_job_whose_only_checkpoint_is_damaged_is_refused_and_does_not_begin_again(
    solo: Run, checkpoint: Path, tmp_path: Path, lost: str, reason: str
) -> None:
    (checkpoint / lost).unlink()
    said = two_ranks(tmp_path, checkpoint.parent, checkpoint.parent, steps=8)
    for code, out, err in said:
        assert code == 64 and "start" not in out, said
        assert "no checkpoint is whole, and the newest is of step 4" in err and lost + reason in err
    checkpoint.rename(checkpoint.parent / "damaged")
    assert "start 0" in solo(checkpoint.parent, 8).stdout, "as the message says"


@pytest.mark.parametrize("launch", [0, 1])
def test_damage_of_the_only_checkpoint_that_one_rank_finds_in_its_share_is_refused_like_any_other(
    checkpoint: Path, tmp_path: Path, launch: int
) -> None:
    flip(checkpoint / "__0_0.distcp")
    for code, out, err in two_ranks(tmp_path, checkpoint.parent, checkpoint.parent, steps=8, launch=launch):
        assert code == 64 and "start" not in out, err
        assert "no checkpoint is whole, and the newest is of step 4" in err
        assert f"{checkpoint.name}: piece __0_0.distcp is damaged" in err and "Looking again" not in err


@pytest.mark.slow
def test_a_launcher_that_says_one_local_rank_to_all_hides_no_damage(
    solo: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """mpirun does so in a pod whose operator has set LOCAL_RANK. Then no rank would check half of the bytes."""
    newest = second_checkpoint(solo, checkpoint)
    flip(newest / Share(1, 2).of(Manifest.load(newest).pieces)[0].file)
    said = two_ranks(tmp_path, checkpoint.parent, checkpoint.parent, steps=8, places=(0, 0))
    assert all(code == 0 and "start 4" in out for code, out, _ in said), said
    assert all("LOCAL_RANK or LOCAL_WORLD_SIZE is wrong" in err for _, _, err in said), said


WITHOUT_TORCH = """
import sys
sys.path.append(sys.argv[1])
import numpy
from numpy_adapter import Sgd, protect
import ttp

@ttp.ttp_to_persist
def train():
    optimizer = protect(Sgd({"w": numpy.zeros(2)}, rate=0.5), sys.argv[2])
    ttp.restore()
    optimizer.step({"w": numpy.ones(2)})
    print("trained")

train()
if sys.argv[3] == "1":
    raise ValueError("after training")
"""

UNDECORATED = """
import sys
import torch
import ttp

model = torch.nn.Linear(2, 1)
optimizer = ttp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, save_dir=sys.argv[1])
ttp.restore()
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
raise ValueError("a bad batch")
"""


def test_a_program_without_the_decorator_is_saved_when_it_raises(tmp_path: Path) -> None:
    """When a rank dies, the others raise: their processes would have ended before they were saved."""
    script = tmp_path / "train.py"
    script.write_text(UNDECORATED)
    command, env = [sys.executable, str(script), str(tmp_path / "ck")], solo_env(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75 and "a bad batch" in done.stderr, done.stderr
    assert (tmp_path / "ck" / "tft_saved_checkpoints-step_3").is_dir()
