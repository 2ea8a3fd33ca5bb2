"""``ttp run --mindspore`` with fake ranks and with real MindSpore; torch is not needed."""

from __future__ import annotations

import errno
import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.launch.conftest import FRESH, OF_MINDSPORE, Controller, Job, Start, plan
from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.mindspore import launch
from ttp.launch.mindspore.flags import parse

TWO = ["--nproc-per-node", "2"]
MINDSPORE_S = 240.0
"""Bounds a wait for two workers and a scheduler that import MindSpore: 10 s where nobody else computes."""

NO_TORCH = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here: " + name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(autouse=True)
def without_torch(environ: dict[str, str], tmp_path: Path) -> None:
    """MindSpore's users may not have torch, so neither launcher nor controller nor ranks may import it."""
    site = tmp_path / "absent"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_TORCH)
    environ["PYTHONPATH"] = os.pathsep.join([str(site), environ["PYTHONPATH"]])


def scheduler(job: Job) -> tuple[int, int]:
    """Return the scheduler's pid and port."""
    pid, port = job.wait_for("scheduler").split()
    return int(pid), int(port)


def test_torch_is_absent_indeed(start: Start, environ: dict[str, str]) -> None:
    job = start(FRESH + "ttp-run", TWO, "fake_worker.py", plan())
    assert job.finish() == 64
    assert "there is no torch here" in job.log


def test_saving_ranks_are_waited_for_and_the_job_starts_again(start: Start, controller: Controller) -> None:
    flags = ["--nproc-per-node", "3", "--max-restarts=1"]
    job = start(FRESH + OF_MINDSPORE, flags, "fake_worker.py", plan(save_s=1))
    victim = job.pids(3)[1]
    first, _ = scheduler(job)
    os.kill(victim, signal.SIGKILL)
    job.rescue()
    job.pids(3, attempt=1)
    assert job.finish() == 0
    assert job.has("saved-0-0") and job.has("saved-2-0") and not job.has("sigterm-0-0")
    assert not psutil.pid_exists(first)
    assert [(f["ranks"], f["pids"], f["kind"]) for f in controller.faults] == [([1], [victim], "FAULT_KIND_EXITED")]


@pytest.mark.parametrize("drained", [socket.gethostname(), "another host of the job"])
def test_a_job_with_a_drained_host_is_not_started_again(drained: str, start: Start, controller: Controller) -> None:
    (controller.run_dir / "drained").write_text(drained)
    job = start(OF_MINDSPORE, [*TWO, "--max-restarts", "2"], "fake_worker.py", plan(save_s=0))
    job.pids(2)
    job.rescue()
    assert job.finish() == 75 and "is drained" in job.log, job.log
    assert not job.has("pid-0-1")


def test_a_crash_before_that_is_one(start: Start, controller: Controller) -> None:
    job = start(OF_MINDSPORE, TWO, "fake_worker.py", plan(crash="training", armed=False))
    assert job.finish() == 1
    assert "had trained" not in job.log


def test_an_operators_signal_leaves_time_to_save(start: Start, controller: Controller) -> None:
    """SIGINT is passed on as SIGTERM, because MindSpore's own handler of SIGINT ends the rank at once."""
    job = start(OF_MINDSPORE, [*TWO, "--max-restarts=3"], "fake_worker.py", plan(save_s=1, on_sigterm="save"))
    job.pids(2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("saving-0-0")
    job.process.send_signal(signal.SIGTERM)  # schedulers repeat it
    assert job.finish() == 75
    assert job.has("saved-0-0") and job.has("saved-1-0")
    assert not job.has("pid-0-1")
    assert controller.faults == []


class Saved:
    """Processes that have saved. The first signal comes while they start."""

    def __init__(self, *_: object) -> None:
        self.workers: dict[int, Any] = {0: None}
        self.scheduler, self.stopped = None, False

    def start(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        self.stopped = True

    def codes(self) -> dict[int, int]:
        return {0: 75} if self.stopped else {}


def test_a_signal_repeated_while_ranks_are_stopped_loses_neither_processes_nor_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    job = parse(["--mindspore", *TWO, str(tmp_path / "train.py")], {})
    stops = SimpleNamespace(stop=lambda *_: None, expect=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    host: Any = SimpleNamespace(before_workers=lambda *_, **__: None, stops=stops, look=lambda _: None, warm=None)
    monkeypatch.setattr(launch, "Processes", Saved)
    starts = launch._Starts(job, [], Config(), host)
    with launch._interrupting(), pytest.raises(launch.Interrupted):
        starts._start(0)
    assert starts.codes == {0: 75}


def test_a_run_directory_that_cannot_be_read_ends_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may lie on a file system of the network, which answers with an error for a while."""

    class Trained(Saved):
        def start(self, *_: object) -> None: ...

        def codes(self) -> dict[int, int]:
            return {0: 0}

        def stop_scheduler(self, _: float) -> None:
            self.stopped = True

    def look(_: object) -> None:
        raise OSError(errno.ESTALE, "the run directory")

    (tmp_path / "train.py").touch()
    job = parse(["--mindspore", *TWO, str(tmp_path / "train.py")], {})
    nothing = dict.fromkeys(("before_workers", "watch"), lambda *_, **__: None)
    stops = SimpleNamespace(expect=lambda _: None)
    warm = SimpleNamespace(look=lambda: None)
    host: Any = SimpleNamespace(**nothing, stops=stops, look=look, warm=warm)
    monkeypatch.setattr(launch, "Processes", Trained)
    assert launch._Starts(job, [], Config(), host).run() == 0


@pytest.mark.parametrize("fails", ["_number_of", "Processes"])
def test_a_restart_that_cannot_begin_leaves_the_job_saved(
    fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name service that is away for a while, or a host without room for a process: 64 would end the job for good."""
    (tmp_path / "train.py").touch()
    job = parse(["--mindspore", *TWO, "--max-restarts=3", str(tmp_path / "train.py")], {})
    warm = SimpleNamespace(hurry=lambda: None)
    stops = SimpleNamespace(**dict.fromkeys(("hold", "stop", "expect"), lambda *_: None))
    nothing = dict.fromkeys(("before_workers", "watch", "look"), lambda *_, **__: None)
    says = {"restart_helps": lambda *_: True, "is_drained": lambda **_: False}
    host: Any = SimpleNamespace(**nothing, **says, warm=warm, stops=stops)
    starts = launch._Starts(job, [], Config(), host)

    class Workers(Saved):
        def start(self, *_: object) -> None:
            if starts.codes and fails == "Processes":
                raise ConfigError("no room for a process")

        def codes(self) -> dict[int, int]:
            return {0: -15 if starts.codes else 75}

    def number_of(address: str, patience_s: float) -> str:
        if starts.codes and fails == "_number_of":
            raise ConfigError("no name service")
        return address

    monkeypatch.setattr(launch, "Processes", Workers)
    monkeypatch.setattr(launch, "_number_of", number_of)
    assert starts.run() == 75


@pytest.mark.parametrize(("hosts", "patience_s"), [(1, 0), (2, 600)])
def test_hosts_wait_for_the_name_of_the_first_as_for_each_other(
    hosts: int, patience_s: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A headless service of Kubernetes gives a name only once its pod exists."""
    (tmp_path / "train.py").touch()
    several = [f"--worker-num={2 * hosts}", "--local-worker-num=2", "--node-rank=1", "--master-addr=first"]
    flags = [*(several if hosts > 1 else TWO), *(["--master-port=8118"] if hosts > 1 else [])]
    job = parse(["--mindspore", *flags, str(tmp_path / "train.py")], {})
    asked: list[float] = []
    told: list[dict[str, Any]] = []

    def number_of(_: str, patience_s: float) -> str:
        asked.append(patience_s)
        return "127.0.0.1"

    def before_workers(_: str, **more: Any) -> None:
        told.append(more)
        raise ConfigError("far enough")

    monkeypatch.setattr(launch, "_number_of", number_of)
    host: Any = SimpleNamespace(before_workers=before_workers)
    with pytest.raises(ConfigError, match="far enough"):
        launch._Starts(job, [], Config(), host)._start(0)
    assert asked == [patience_s]
    assert told == [{"first_node": hosts == 1, "world_size": 2 * hosts, "here": 2}]


@pytest.mark.parametrize("nohup", [True, False])
def test_under_nohup_a_closed_terminal_does_not_end_the_job(nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with launch._interrupting(), nullcontext() if nohup else pytest.raises(launch.Interrupted, match="SIGHUP"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_means_it(start: Start, controller: Controller) -> None:
    job = start(OF_MINDSPORE, TWO, "fake_worker.py", plan(save_s=500, on_sigterm="save"))
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("saving-0-0")
    job.wait_for("saving-1-0")
    for pid in pids:  # they cannot be stopped politely while they sleep in a handler
        assert psutil.pid_exists(pid)
    job.process.send_signal(signal.SIGINT)
    job.wait_for_log("not waiting for ranks that save")
    job.end()


def test_without_a_scheduler_the_job_is_saved_at_once(start: Start, controller: Controller) -> None:
    job = start(OF_MINDSPORE, TWO, "fake_worker.py", plan(save_s=1, on_sigterm="save"))
    job.pids(2)
    os.kill(scheduler(job)[0], signal.SIGKILL)
    assert job.finish() == 75
    assert job.has("saved-0-0") and job.has("saved-1-0")
    assert "the scheduler ended with -9" in job.log


def test_two_hosts_share_one_scheduler(start: Start, environ: dict[str, str], controller: Controller) -> None:
    """Rank numbers follow from ``--node-rank``. Each host has its own logs and run directory."""
    port = str(int(environ["TTP_PORT"]) + 1 if int(environ["TTP_PORT"]) < 60000 else int(environ["TTP_PORT"]) - 1)
    flags = ["--worker_num=4", "--local_worker_num=2", "--master_addr=localhost", f"--master_port={port}"]
    logs = Path(environ["TTP_RUN_DIR"]) / "logs"
    first = start(OF_MINDSPORE, [*flags, "--node_rank=0", f"--log_dir={logs}"], "fake_worker.py", plan(save_s=1))
    second = start(OF_MINDSPORE, [*flags, "--node-rank", "1"], "fake_worker.py", plan(save_s=1), name="second")
    assert first.pids(2) and scheduler(first)[1] == int(port)
    second.wait_for("pid-2-0")  # before its launcher, which ends a rank that has nothing to save yet
    os.kill(int(second.wait_for("pid-3-0")), signal.SIGKILL)
    first.rescue()
    assert (first.finish(), second.finish()) == (75, 75)
    assert [first.has(f"saved-{rank}-0") for rank in range(4)] == [True, True, True, False]
    assert sorted(path.name for path in logs.iterdir()) == ["scheduler.log", "worker_0.log", "worker_1.log"]
    assert controller.faults[0]["ranks"] == [3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_survivors_of_a_real_job_outlive_what_mindspore_would_give_them(start: Start) -> None:
    """By MindSpore's defaults a survivor would exit 30 s after the death of a peer."""
    job = start(FRESH + OF_MINDSPORE, TWO, "mindspore_worker.py")
    job.patience_s = MINDSPORE_S
    assert job.wait_for("patience") == "600 600"  # seconds, where MindSpore has 30
    os.kill(job.pids(2)[1], signal.SIGKILL)
    job.rescue()
    assert job.finish(MINDSPORE_S) == 75
    assert job.has("saved-0")
