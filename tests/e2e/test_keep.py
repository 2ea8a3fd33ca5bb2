"""Survivors that go on in their processes (``--continuity keep``): real kills, the bits of the unbroken run.

A failure on the way ends in the start of all ranks from the checkpoint that was made before.
"""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import shards
from tests.e2e.forked import ForkedJob
from tests.e2e.harness import JOB, Job, MakeJob, Unbroken
from tests.e2e.test_faults import PHASES, kills
from ttp.chaos.inspection import checkpoints

TIMEOUT_S = 300
ANEW = "ranks do not go on in their processes"
KEEP = ["--standalone", "--continuity", "keep"]
KILL = {"id": "kill", "rank": 1, "step": 5, "phase": "backward", "action": "kill"}
SAVED = "checkpoints/tft_saved_checkpoints-step_6"
HELD = {"id": "held", "rank": 0, "step": 6, "phase": "data", "action": "hold", "when": SAVED}
"""The job is not over before a command has saved it."""

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def again(job: Job) -> list[bool]:
    """Return for each incident whether the survivors went on in their processes."""
    return [bool(e.get("again")) for events in job.incidents() for e in events if e["kind"] == "released"]


def repeated(job: Job, rank: int) -> list[int]:
    """Return the updates that this rank made again in its loop."""
    said = rf"\[ttp rank {rank}\] its loop was not left: update (\d+) is called again"
    return [int(number) for number in re.findall(said, job.log.read_text())]


def ways(job: Job, rank: int) -> list[str]:
    """Return how the rank got its state each time that training went on in the processes."""
    said = rf"\[ttp rank {rank}\] its state was (kept|received from rank \d+|read from the checkpoint)"
    return re.findall(said, job.log.read_text())


@pytest.mark.parametrize(
    ("ranks", "phases"),
    [
        pytest.param(2, ["backward"], id="two"),
        pytest.param(4, [*PHASES, *PHASES], marks=pytest.mark.slow, id="every-phase-twice"),
    ],
)
def test_the_survivors_of_a_death_keep_their_processes(
    make_job: MakeJob, unbroken: Unbroken, ranks: int, phases: list[str]
) -> None:
    faults, _ = kills(ranks, phases)
    job = make_job(ranks=ranks, steps=3 * len(faults) + 3, max_restarts=len(faults), faults=faults, flags=[*KEEP])
    job.flags += ["--tee", "3", "--log-dir", str(job.directory / "output")]
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert all(again(job)[:10]) and len(again(job)) == len(faults), job.story()
    assert ANEW not in job.log.read_text()
    assert job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)
    assert sum(way == "kept" for rank in range(ranks) for way in ways(job, rank)), job.story()
    outputs = list((job.directory / "output").glob("*/attempt_0/0/stderr.log"))  # of all who had the seat of rank 0
    for version in job.committed()[:10]:
        restored = f"-step_{version}: training goes on with step {version + 1}"
        assert [restored in file.read_text() for file in outputs] == [True], job.story()
        assert re.search(rf"^\[default0\]:.*{restored}$", job.log.read_text(), re.MULTILINE), job.story()


def test_all_start_anew_when_they_have_gone_on_often_enough(make_job: MakeJob, unbroken: Unbroken) -> None:
    faults, _ = kills(2, ["backward"])
    job = make_job(ranks=2, steps=9, max_restarts=2, faults=faults, flags=KEEP, env={"TTP_CONTINUE_MAX": "1"})
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True, False] and job.starts() == [0, *job.committed()], job.story()
    assert "the ranks have gone on 1 times already, the limit (TTP_CONTINUE_MAX)" in job.story()
    assert job.results() == unbroken(job)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("kind", "who", "phases"),
    [
        pytest.param("hsdp", "one rank", ["barrier"], id="hsdp"),
        *(
            pytest.param(kind, who, shards.phases(kind, "redo"), id=f"{kind}-{who}", marks=pytest.mark.slow)
            for kind in ("hsdp", "tp", "pp", "replicated")
            for who in ("one rank", "rank 0", "one of each shard")
        ),
    ],
)
def test_ranks_of_several_shards_keep_their_processes(
    make_job: MakeJob, tmp_path: Path, kind: str, who: str, phases: list[str]
) -> None:
    """train() makes the device mesh and its groups; survivors make them again."""
    dead = shards.victims(kind, "redo")[who]
    faults = [shards.fault(phase, phase, dead) | {"step": 3 * n + 2} for n, phase in enumerate(phases)]
    settings: dict[str, Any] = {"steps": 3 * len(faults) + 2, "max_restarts": len(faults), "faults": faults}
    job = make_job(script=shards.SCRIPT, flags=KEEP, **settings)
    job.env |= {"JOB_KIND": kind, "JOB_TRANSFER": "1"}
    assert job.run(2 * TIMEOUT_S - 60) == 0, job.story()
    assert all(again(job)) and len(again(job)) == len(faults), job.story()
    assert ANEW not in job.log.read_text(), job.story()
    assert job.starts() == [0, *job.committed()], job.story()
    if kind != "replicated":
        assert {"kept", "received"} <= {way.split()[0] for rank in range(4) for way in ways(job, rank)}, job.story()
    shards.assert_same_bits(job, tmp_path / "unbroken")


def test_who_is_left_in_the_first_barrier_is_not_killed(make_job: MakeJob, tmp_path: Path) -> None:
    """Rank 0 has made its first update when rank 3 dies, so the ranks in the barrier must make this update too."""
    half = {"id": "half", "ranks": [3], "out": [0], "broken": False, "step": 5, "phase": "halfway", "action": "kill"}
    faults = [{"id": "first", "rank": 1, "step": 5, "phase": "data", "action": "kill"}, half]
    job = make_job(script=shards.SCRIPT, flags=KEEP, env={"JOB_KIND": "hsdp"}, steps=8, max_restarts=2, faults=faults)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert job.committed() == [5, 6] and again(job) == [True, True], job.story()
    shards.assert_same_bits(job, tmp_path / "unbroken")


@pytest.mark.slow
def test_who_has_made_an_update_for_a_save_leaves_its_loop_too(make_job: MakeJob, tmp_path: Path) -> None:
    """The exchange of weights at the end of the update would wait for the dead rank."""
    half = {"id": "half", "ranks": [2], "out": [0], "broken": False, "step": 5, "phase": "halfway", "action": "kill"}
    job = make_job(
        script=shards.SCRIPT, flags=KEEP, env={"JOB_KIND": "replicated"}, steps=8, max_restarts=2, faults=[half]
    )
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert "redo: this rank" in job.story() and again(job) == [True], job.story()
    assert "did not go on within" not in job.log.read_text(), job.story()
    shards.assert_same_bits(job, tmp_path / "unbroken")


TRANSFER, ONE_STEP = {"JOB_TRANSFER": "1"}, {"JOB_ONE_STEP": "1"}


@pytest.mark.parametrize(
    ("second", "env"),
    [
        ({"rank": 1, "phase": "data", "action": "kill"}, {}),
        pytest.param({"rank": 0, "phase": "loss", "action": "kill"}, {}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "data", "action": "raise"}, {}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "data", "action": "misuse"}, {}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "data", "action": "deadlock"}, {}, marks=pytest.mark.slow),
        pytest.param({"rank": 1, "phase": "data", "action": "stop"}, {}, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "data", "action": "hold-gil"}, {}, marks=pytest.mark.slow),
        # who sends the state, and who receives it
        ({"rank": 0, "phase": "transfer", "action": "kill"}, TRANSFER),
        pytest.param({"rank": 1, "step": 0, "phase": "transfer", "action": "kill"}, TRANSFER, marks=pytest.mark.slow),
        # in the repeated call of a function
        ({"rank": 0, "phase": "loss", "action": "kill"}, ONE_STEP),
        pytest.param(
            {"rank": 1, "phase": "data", "action": "kill", "when": "done/called.0"}, ONE_STEP, marks=pytest.mark.slow
        ),
        pytest.param({"rank": 0, "phase": "loss", "action": "raise"}, ONE_STEP, marks=pytest.mark.slow),
        pytest.param({"rank": 0, "phase": "loss", "action": "deadlock"}, ONE_STEP, marks=pytest.mark.slow),
    ],
)
def test_a_second_fault_while_they_go_on_costs_no_step(
    make_job: MakeJob, unbroken: Unbroken, second: dict[str, Any], env: dict[str, str]
) -> None:
    """The second fault comes before the first update, so all ranks are restarted from the same checkpoint."""
    here = {"step": KILL["step"], "launch": "1"}
    called = here | {"id": "called", "rank": 0, "phase": "called", "action": "hold"}  # rank 0 is in its step again
    faults = [KILL, called, here | {"id": "second"} | second]
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=faults, flags=KEEP, env={"TTP_CONTINUE_S": "5"} | env)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert (job.directory / "done" / f"second.{second['rank']}").exists(), job.story()
    assert again(job)[0] and job.committed() == [KILL["step"]] == job.starts()[-1:], job.story()
    assert ANEW in job.log.read_text()
    assert repeated(job, 0) == [6] * (env == ONE_STEP), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.parametrize("sent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_is_behind_gets_what_the_others_have(make_job: MakeJob, unbroken: Unbroken, sent: bool) -> None:
    """While rank 0 makes the update, rank 1 is killed before its own, and rank 2 leaves the step with an error."""
    before = {"step": 5, "phase": "allreduced", "when": "done/updates.0"}
    faults = [
        {"id": "updates", "rank": 0, "step": 5, "phase": "in_step", "action": "hold"},
        {"id": "kill", "rank": 1, "action": "kill", **before},
        {"id": "behind", "rank": 2, "action": "collective", **before},
    ]
    job = make_job(ranks=3, steps=9, max_restarts=1, faults=faults, flags=KEEP)
    job.env |= {"JOB_TRANSFER": "1"} if sent else {}
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0, 6], job.story()
    got = "received from rank 0" if sent else "read from the checkpoint"
    assert [ways(job, rank) for rank in range(3)] == [["kept"], [got], [got]], job.story()
    assert job.results() == unbroken(job)


def test_where_the_others_leave_nothing_stays_that_was_started_beside_their_save(
    make_job: MakeJob, unbroken: Unbroken
) -> None:
    """Rank 0 raises when rank 1 is killed. After that ranks do not go on, so the early replacement is stopped."""
    raises = {"id": "raise", "rank": 0, "step": KILL["step"], "phase": "data", "action": "raise"}
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=[KILL | {"phase": "data"}, raises], flags=KEEP)
    job.env["JOB_STEP_S"] = "0.3"  # there is a process to fork from when the fault comes
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert "1 started while the others save" in job.log.read_text(), job.story()
    assert again(job) == [False] and job.starts() == [0, *job.committed()], job.story()
    assert not [p for p in psutil.process_iter() if str(job.directory) in " ".join(environ(p))]
    assert job.results() == unbroken(job)


def test_a_program_is_tried_beforehand_without_any_death(make_job: MakeJob, unbroken: Unbroken) -> None:
    job = make_job(ranks=2, steps=12, max_restarts=0, flags=KEEP, faults=[HELD]).start()
    job.wait_for_version(6)
    tried = job.ttp("save", "--again", "--token", job.token())
    assert tried.returncode == 0 and "all ranks go on from it" in tried.stdout, tried.stdout + tried.stderr
    assert job.wait(TIMEOUT_S - 60) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0, *job.committed()], job.story()
    assert job.results() == unbroken(job)


NOT_OURS = "this process will not go on after a failure of another: no launcher that starts dead ranks alone has"


def test_ranks_without_a_launcher_train_on_when_they_are_tried(tmp_path: Path) -> None:
    """Nothing would tell them where they meet: they would wait for it, and leave."""
    env = {"TTP_CONTINUITY": "keep", "TTP_CONTINUE_S": "5"}
    job = ForkedJob(tmp_path / "job", 2, 12, faults=[HELD], env=env, module="tests.e2e.job").begin()
    assert_trains_on(job)
    assert job.end(TIMEOUT_S / 4) == [0, 0] and job.starts() == [0], job.story()
    assert [(job.directory / f"rank{rank}.out").read_text().count(NOT_OURS) for rank in range(2)] == [1, 1]


@pytest.mark.slow
def test_ranks_below_a_shell_train_on_when_they_are_tried(make_job: MakeJob, tmp_path: Path) -> None:
    """Their launcher knows the shell, not the rank that it has to wait for, or to start again."""
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} {JOB}\nexit $?\n")
    script.chmod(0o700)
    job = make_job(ranks=2, steps=12, max_restarts=0, flags=[*KEEP, "--no-python"], script=script, faults=[HELD])
    job.env["TTP_CONTINUE_S"] = "5"
    assert_trains_on(job.start())
    assert job.wait(TIMEOUT_S - 60) == 0 and job.starts() == [0], job.story()
    assert job.log.read_text().count(NOT_OURS) == 2, job.story()


def assert_trains_on(job: Job) -> None:
    job.wait_for_version(6)
    tried = job.ttp("save", "--again", "--token", job.token())
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "the ranks do not go on from it: not every rank is able to" in tried.stdout


def environ(process: psutil.Process) -> list[str]:
    try:
        return list(process.environ().values())
    except (psutil.Error, OSError):
        return []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_moment(make_job: MakeJob, unbroken: Unbroken, seed: int) -> None:
    """Kills a random rank, and often another one while the first is being replaced."""
    rng = random.Random(seed)
    env = {"JOB_STEP_S": "0.01"} | ({"JOB_TRANSFER": "1"} if seed % 2 else {})
    job = make_job(ranks=3, steps=150, max_restarts=40, flags=KEEP, env=env).start()
    for version in range(8, 140, 12):
        job.wait_for_version(version)
        for pause_s in (rng.random() * 0.02, *([rng.random() * 0.6] if rng.random() < 0.6 else [])):
            time.sleep(pause_s)
            ranks = workers(job)
            if ranks:
                rng.choice(ranks).kill()
    assert job.wait(TIMEOUT_S - 60) == 0, job.story()
    assert any(again(job)), job.story()
    assert job.results() == unbroken(job)


def workers(job: Job) -> list[psutil.Process]:
    """Return the live processes of the ranks that joined last, from the controller's log."""
    return [psutil.Process(pid) for pid in met(job).values() if psutil.pid_exists(pid)]


def met(job: Job) -> dict[int, int]:
    """Return the pid of each rank's latest process, from the controller's log."""
    log = (job.directory / "run" / "controller.log").read_text()
    return {int(rank): int(pid) for rank, pid in re.findall(r'joined \{"rank": (\d+), .*"pid": (\d+)', log)}


# ------------------------------------------------------------------ programs that do not meet the conditions of keep


def misbehaves(make_job: MakeJob, program: str) -> Job:
    """Run a job whose rank 1 is killed in step 5, and check what holds for every ``program``."""
    env = {"TTP_CONTINUE_S": "5", "JOB_AGAIN": program}
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=[KILL], flags=KEEP, env=env)
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job)[0] and job.committed()[0] == KILL["step"] == job.starts()[-1], job.story()
    found = checkpoints([job.directory / "checkpoints"])
    assert found and not any(checkpoint.problems for checkpoint in found), job.story()
    return job


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("end", "train() was called again, and has ended without restoring anything"),
        pytest.param("raise", "train() was called again, and raised ValueError", marks=pytest.mark.slow),
        pytest.param("exit", "", marks=pytest.mark.slow),
        pytest.param("hang", "it did not go on within 5 s", marks=pytest.mark.slow),
        pytest.param("swallow", "it did not go on within 5 s", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_go_on_is_started_anew(make_job: MakeJob, unbroken: Unbroken, program: str, why: str) -> None:
    job = misbehaves(make_job, program)
    assert ANEW in job.log.read_text() and why in job.log.read_text(), job.story()
    assert job.results() == unbroken(job)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["group", "thread"])
def test_what_a_loop_makes_and_leaves_is_no_obstacle(make_job: MakeJob, unbroken: Unbroken, program: str) -> None:
    """Groups that are made in every step are destroyed with the loop. A thread without end keeps its model alive."""
    job = misbehaves(make_job, program)
    assert ANEW not in job.log.read_text() and ways(job, 0), job.story()
    assert job.results() == unbroken(job)


def test_a_rank_that_gloo_does_not_wake_is_restarted_at_once(make_job: MakeJob, unbroken: Unbroken) -> None:
    """gloo forgets the thread that waits for a message of which a part was sent when the other end died."""
    half = [{"id": "half", "ranks": [0, 1], "step": 5, "phase": "data", "action": "half"}]
    job = make_job(ranks=2, steps=9, max_restarts=1, faults=half, flags=KEEP, env={"TTP_CONTINUE_S": "60"})
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert again(job) == [True] and job.starts() == [0, *job.committed()] == [0, 5], job.story()
    assert "a broken collective does not return" in job.log.read_text(), job.story()
    assert job.results() == unbroken(job)
