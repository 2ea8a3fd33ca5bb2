"""Real launchers, fake ranks, real kills: who is stopped, and when. See test_hold.py and test_host.py, too."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import HERE, LAUNCHERS, OF_MINDSPORE, Controller, Start, plan
from tests.waiting import until
from ttp.launch.again import Again
from ttp.launch.leases import Leases
from ttp.launch.worker_stops import WorkerStops
from ttp.launch.worker_watch import WorkerWatch

THREE = ["--nproc-per-node", "3"]
EVERY = ["ttp-run", OF_MINDSPORE, pytest.param("torchrun", marks=pytest.mark.slow)]


def exit_code(launcher: str, ttp_run: int) -> int:
    """Return the exit code to expect: stock torchrun has the same code for every failure."""
    return 1 if launcher == "torchrun" else ttp_run


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS), indirect=True)
def test_saving_ranks_are_not_stopped(launcher: str, start: Start, controller: Controller) -> None:
    """Stock torchrun would send SIGTERM within 0.1 s. These saves take 3 s, and two of them start late."""
    job = start(launcher, THREE, "fake_worker.py", plan(save_s=3))
    victim = job.pids(3)[1]
    os.kill(victim, signal.SIGKILL)
    job.rescue()
    assert job.finish() == exit_code(launcher, 75)
    assert job.has("saved-0-0")
    assert job.has("saved-2-0")
    assert not job.has("sigterm-0-0")
    assert controller.faults == [
        {
            "ranks": [1],
            "pids": [victim],
            "reason": "killed by signal 9 (SIGKILL)",
            "kind": "FAULT_KIND_EXITED",
            "pages": [],  # of a rank whose neighbours live: they have them
        }
    ]
    root_cause = job.log.split("Root Cause")[1]
    assert "Signal 9 (SIGKILL) received by PID" in root_cause  # torch's summary names the dead rank, not one that saved


def test_a_rank_below_a_shell_saves_after_an_operators_signal(start: Start, controller: Controller, out: Path) -> None:
    script = out / "run.sh"
    script.write_text(f'#!/bin/sh\n"{sys.executable}" "{HERE / "fake_worker.py"}" "$@"\nexit $?\n')
    script.chmod(0o700)
    job = start("ttp-run", ["--nproc-per-node", "1", "--no-python"], str(script), plan(save_s=1, on_sigterm="save"))
    job.pids(1)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 75 and job.has("saved-0-0")


def test_a_rank_is_asked_to_save_whatever_process_has_the_pid_of_one_that_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be a child of the rank, such as a worker of its data loader.

    A wait that is soon over says nothing: the line came when the ranks had said "saved", before the cause.
    """
    caplog.set_level(logging.INFO, "ttp")
    monkeypatch.setattr("ttp.launch.worker_stops.TELL_S", 60.0)  # on a loaded machine the wait may take a second
    script = "trap 'exit 75' TERM; sleep 100 & echo $!; while :; do sleep 0.05; done"
    worker = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdout is not None
    leases = Leases(tmp_path)
    for pid in (worker.pid, int(worker.stdout.readline())):
        leases.arm(pid)
    stops = WorkerStops(leases, Again(tmp_path), WorkerWatch(), patience_s=60)
    stops.stop({0: worker}, signal.SIGTERM, grace_s=5)
    assert worker.wait() == 75 and not caplog.messages
    worker.stdout.close()


def test_a_hung_rank_below_a_shell_is_killed_in_whatever_process_group_it_is(tmp_path: Path) -> None:
    """``timeout``, for example, begins a group of its own."""
    script = """timeout 100 sh -c "trap '' TERM; exec sleep 100" & wait"""
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as worker:
        (rank,) = until(lambda: [p for p in psutil.Process(worker.pid).children(recursive=True) if p.name() == "sleep"])
        leases = Leases(tmp_path)
        leases.arm(rank.pid)
        stops = WorkerStops(leases, Again(tmp_path), WorkerWatch(), patience_s=60)
        stops.stop({0: worker}, signal.SIGTERM, grace_s=0.1)
        rank.wait(timeout=60)


def test_a_signal_while_workers_are_started_reaches_them_when_all_have(
    start: Start, controller: Controller, out: Path
) -> None:
    """In the first moments of a launch torch does not know the workers that it has started."""
    script = out / "run.sh"
    told = f'[ "$RANK" = 0 ] && trap \'touch "{out}/told"; exit 0\' TERM && kill -TERM "$PPID"\n'
    script.write_text(f"#!/bin/sh\n{told}sleep 60 & wait\n")
    script.chmod(0o700)
    job = start("ttp-run", ["--nproc-per-node", "20", "--no-python"], str(script), plan())
    job.finish()
    assert job.has("told")


@pytest.mark.parametrize("launcher", EVERY, indirect=True)
def test_nobody_armed_is_stock_behaviour(launcher: str, start: Start, controller: Controller) -> None:
    job = start(launcher, THREE, "fake_worker.py", plan(armed=False))
    os.kill(job.pids(3)[1], signal.SIGKILL)
    assert job.finish() == 1
    assert job.has("sigterm-0-0")
    assert job.has("sigterm-2-0")


@pytest.mark.parametrize("launcher", EVERY, indirect=True)
def test_a_crash_of_programs_that_have_ended_is_no_failure(launcher: str, start: Start, controller: Controller) -> None:
    """Libraries sometimes crash while they are unloaded. A restart would make all steps since the last save again."""
    job = start(launcher, [*THREE, "--max-restarts=1"], "fake_worker.py", plan(crash="ended"))
    assert job.finish() == 0
    assert not job.has("pid-0-1") and "rank 1 had trained to its end when signal 11 killed it" in job.log


def test_stopped_rank_is_killed_when_the_others_have_left(launcher: str, start: Start, controller: Controller) -> None:
    """The launcher does not wait 30 s: the bound is below that."""
    job = start(launcher, THREE, "fake_worker.py", plan(save_s=1))
    pids = job.pids(3)
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    job.rescue()
    assert job.finish(timeout_s=20) == exit_code(launcher, 75)
    assert job.has("saved-0-0")
    assert not psutil.pid_exists(pids[2])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGQUIT])
def test_operators_signal_leaves_time_to_save_and_a_second_one_does_not_cut_it_short(
    how: signal.Signals, launcher: str, start: Start, controller: Controller
) -> None:
    """These saves take 4 s. Stock torchrun with a shutdown timeout of 1 s would kill the ranks."""
    flags = [*THREE, "--shutdown-timeout", "1"]
    job = start(launcher, flags, "fake_worker.py", plan(save_s=4, on_sigterm="save"))
    job.pids(3)
    job.process.send_signal(how)
    job.wait_for("saving-0-0")
    job.process.send_signal(how)
    assert job.finish() == exit_code(launcher, 75)
    assert all(job.has(f"saved-{rank}-0") for rank in range(3))
    assert controller.faults == []


@pytest.mark.parametrize("launcher", EVERY, indirect=True)
@pytest.mark.parametrize(("code", "expected"), [(70, 70), (64, 64), (3, 1)])
def test_exit_code_tells_what_happened(
    code: int, expected: int, launcher: str, start: Start, controller: Controller
) -> None:
    """The job is not restarted after errors that a restart cannot repair."""
    restarts = ["--max-restarts", "2"] if code == 64 else []
    job = start(launcher, [*THREE, *restarts], "fake_worker.py", plan(save_s=0, exit=code))
    job.pids(3)
    job.rescue()
    assert job.finish() == exit_code(launcher, expected)
    assert not job.has("pid-0-1")


def test_without_port_torchrun_is_stock(start: Start, environ: dict[str, str]) -> None:
    """The plug-in is installed but the job has no TTP_PORT, so ranks that save are stopped at once."""
    job = start("torchrun", THREE, "fake_worker.py", plan(save_s=50))
    os.kill(job.pids(3)[1], signal.SIGKILL)
    job.rescue()
    assert job.finish() == 1
    assert job.has("sigterm-0-0")
