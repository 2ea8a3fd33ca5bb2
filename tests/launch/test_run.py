"""``ttp run``: settings, bad input, and the real controller beside a job."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from tests.launch.conftest import FRESH, Job, Start, Unread
from tests.ports import free_port
from tests.waiting import until
from ttp.cli.connection import find
from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.preparation import settled
from ttp.launch.presence import listens, probe
from ttp.launch.run import _parse, _TorchLaunch, run
from ttp.launch.stand_by import HostMissingError


@pytest.fixture(autouse=True)
def own_environment(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``run``, which writes to the environment, a copy."""
    monkeypatch.setattr(os, "environ", dict(environ))


# ----------------------------------------------------------------------------------------------------------- bad input

BAD: dict[str, tuple[dict[str, str], list[str], str]] = {
    "not a port": ({"TTP_PORT": "abc"}, ["x.py"], "TTP_PORT='abc' is not valid"),
    "unknown name": ({"TTP_PROT": "1"}, ["x.py"], "did you mean TTP_PORT"),
    "no such level": ({"TTP_LOG": "loud"}, ["x.py"], "TTP_LOG='loud' is not valid: expected one of DEBUG"),
    "several nodes, no port": ({}, ["--nnodes", "2", "x.py"], "needs TTP_PORT"),
    "elastic nodes, no port": ({}, ["--nnodes", "1:4", "x.py"], "needs TTP_PORT"),
    "stands by for itself": ({}, ["--stand-by", "x.py"], "--stand-by takes the place of a lost host"),
    "stands by without the script": (
        {"TTP_PORT": "29400"},
        ["--nnodes", "2", "--stand-by", "none.py"],
        "the training script none.py does not exist on this host",
    ),
    "no such script": ({}, ["none.py"], "the training script none.py does not exist on this host"),
    "no such module": ({}, ["-m", "no_such.module"], "there is no module no_such for -m no_such.module"),
    "relative module": ({}, ["-m", ".train"], "there is no module .train for -m .train"),
    "nnodes": ({}, ["--nnodes", "many", "x.py"], "neither a number nor MIN:MAX"),
    "no process": ({}, ["--nproc-per-node", "0", __file__], "does not accept these flags"),
    "elastic, but all are waited for": ({}, ["--nnodes", "2", "--elastic", "x.py"], "use --rdzv-backend c10d"),
    "no script": ({}, [], "training_script"),
    "unknown flag": ({}, ["--no-such-flag", "x.py"], "training_script"),
    "run dir": ({"TTP_RUN_DIR": "/dev/null/x"}, ["x.py"], "TTP_RUN_DIR"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_64(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    env, argv, message = BAD[name]
    os.environ.update(env)
    assert run(argv) == 64
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    assert run(["x.py"]) == 64
    assert "torch is missing" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_without_torch_is_ours(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    assert run([flag]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "usage: ttp run" in said and "torch is missing here" in said
    assert "--continuity" in said and "--stand-by" in said and "75 saved and wants to be started again" in said


def test_help_is_torchruns_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ttp run")
    for word in ("--max-restarts", "--rdzv-backend", "TTP_OT", "75 saved"):
        assert word in said


def test_both_spellings_of_flags() -> None:
    for flag in ("--nproc-per-node", "--nproc_per_node"):
        parsed = _parse([flag, "3", "x.py", "--lr", "1"])
        assert (parsed.nproc_per_node, parsed.training_script_args) == ("3", ["--lr", "1"])


@pytest.mark.parametrize(("nnodes", "taken"), [("4", "1:4"), ("3:4", "3:4"), ("1", "1:1")])
def test_elastic_keeps_the_fewest_hosts_that_are_given(nnodes: str, taken: str) -> None:
    assert _parse(["--nnodes", nnodes, "--rdzv-backend", "c10d", "--elastic", "x.py"]).nnodes == taken


def test_under_nohup_torch_leaves_sighup_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _parse(["x.py"]).signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"
    finally:
        signal.signal(signal.SIGHUP, before)
    if before is not signal.SIG_IGN:
        assert "SIGHUP" in _parse(["x.py"]).signals_to_handle


@pytest.mark.parametrize("pid", [1, 2])
def test_process_1_of_a_container_ends_on_sigterm_from_the_start(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def launch(_: object) -> Any:
        os.kill(real_pid, signal.SIGTERM)
        raise ConfigError("seen")

    real_pid, before = os.getpid(), signal.signal(signal.SIGTERM, lambda *_: codes.append(0))
    try:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        monkeypatch.setattr(os, "_exit", codes.append)
        monkeypatch.setattr("ttp.launch.run._launch", launch)
        run(["x.py"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert codes == [143 if pid == 1 else 0]


def test_ranks_that_change_their_directory_find_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with settled(Config(port=29999, run_dir="mine"), several_nodes=False) as job:
        assert os.environ["TTP_RUN_DIR"] == str(job.resolved_run_dir()) == str(tmp_path / "mine")


def test_torch_takes_no_rank_that_has_saved_for_the_root_cause(tmp_path: Path) -> None:
    """torch's own time of the killed rank is that of its report, after the others have saved."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from ttp.launch.agent import _root_causes_first

    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank + 1, exitcode=code, error_file=str(tmp_path / "none"))
        for rank, code in enumerate([75, -9, 70])
    }
    for rank, second in enumerate([5, 9, 6]):
        failures[rank].timestamp = second
    assert ChildFailedError("job", _root_causes_first(failures)).get_first_failure()[0] == 1


# ------------------------------------------------------------------------------------------------------ real processes


def environment(job: Job, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads(job.wait_for(f"env-{rank}")))


def controllers(run_dir: Path) -> list[int]:
    """Return the real controllers of this run directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if "ttp.controller" in command and str(run_dir) in command:
            found.append(process.info["pid"])
    return found


def test_a_job_of_one_node_needs_no_settings(start: Start, tmp_path: Path) -> None:
    """Port and token are made. The controller starts before the workers, is replaced when killed, and ends last."""
    job = start("ttp-run", ["--nproc-per-node", "2"], "env_worker.py", "0", "wait")
    env, run_dir = environment(job), tmp_path / "run"
    port, token = int(env["TTP_PORT"]), env["TTP_TOKEN"]
    assert len(token) == 32
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and int(env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) >= 480
    assert (run_dir / "token").read_text().strip() == token
    assert stat.S_IMODE((run_dir / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert probe(env["MASTER_ADDR"], port, token) == "controller"
    (controller,) = controllers(run_dir)
    os.kill(controller, signal.SIGKILL)
    until(lambda: [pid for pid in controllers(run_dir) if pid != controller])
    (job.out / "go").touch()
    assert job.finish() == 0
    assert controllers(run_dir) == []
    assert not listens("localhost", port, 1.0)
    assert not (run_dir / "token").exists()


def test_plugin_runs_a_controller_too(start: Start, environ: dict[str, str], tmp_path: Path, unused_port: int) -> None:
    environ.update(TTP_PORT=str(unused_port), TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="4711")
    job = start(FRESH + "torchrun", ["--nproc-per-node", "2"], "env_worker.py", "0", "wait")
    env = environment(job)
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "torchrun's own default is 1"
    assert env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "4711", "what the user sets stays"
    assert env["TTP_RUN_DIR"] == str(tmp_path / "run")
    assert probe(env["MASTER_ADDR"], unused_port, env["TTP_TOKEN"]) == "controller"
    assert (tmp_path / "run" / "token").read_text().strip() == env["TTP_TOKEN"]
    (job.out / "go").touch()
    assert job.finish() == 0
    assert controllers(tmp_path / "run") == []
    assert not (tmp_path / "run" / "token").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node", "some"], "Unsupported nproc_per_node value: some"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--rdzv-backend", "none"], "'none' is not registered"),
    ],
)
def test_what_torch_does_not_like_is_64_too(flags: list[str], message: str, start: Start) -> None:
    job = start("ttp-run", flags, "env_worker.py", "0")
    assert job.finish() == 64
    assert f"ttp run: {message}" in job.log or f"ttp run: The rendezvous backend {message}" in job.log
    assert "Traceback" not in job.log


def test_controller_of_a_killed_launcher_ends_by_itself(start: Start, tmp_path: Path) -> None:
    job = start("ttp-run", ["--nproc-per-node", "1"], "env_worker.py", "0", "wait")
    environment(job)
    (controller,) = controllers(tmp_path / "run")
    job.process.kill()
    job.process.wait()
    (job.out / "go").touch()
    psutil.Process(controller).wait(timeout=30)


def test_a_port_that_was_drawn_is_nobody_elses_until_the_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller and a later one can listen on it, but other programs are not given this port."""
    for name in ("TTP_PORT", "TTP_TOKEN", "TTP_RUN_DIR"):
        monkeypatch.setenv(name, "")  # what is left there goes with the test
    with settled(Config(run_dir=str(tmp_path)), several_nodes=False) as job:
        assert job.port is not None
        monkeypatch.setenv("TTP_PORT", "")
        assert find(None, None, None).port == job.port, "`ttp status` with the TTP_RUN_DIR of the job alone"
        for _ in range(2):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", job.port))
                server.listen()
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("", job.port))
    with socket.socket() as stranger:
        stranger.bind(("", job.port))


def test_controller_that_cannot_start_says_why(start: Start, environ: dict[str, str]) -> None:
    environ["TTP_BIND"] = "192.0.2.1"  # an address of no machine
    job = start("ttp-run", ["--nproc-per-node", "1"], "env_worker.py", "0")
    assert job.finish() == 64
    assert "the controller cannot start" in job.log
    assert "192.0.2.1" in job.log
    assert not job.has("env-0")


def test_run_path_is_launched_too(start: Start, launcher: str, environ: dict[str, str], unused_port: int) -> None:
    """torch runs such workers in another way, in which ttp cannot make the launcher wait for saves."""
    environ["TTP_PORT"] = str(unused_port)
    job = start(launcher, ["--run-path"], "env_worker.py", "0")
    assert job.finish() == 0, job.log
    assert job.has("env-0")


def test_a_restart_that_cannot_begin_leaves_the_job_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after the loss of the first node's launcher, which passes the token on: 64 would end the job for good."""
    launch = _TorchLaunch([__file__])

    def torchrun(_: object) -> None:
        launch._remember(SimpleNamespace(job_code=75, exit_codes=lambda: {0: 75, 1: -9}))
        raise ConfigError("the first node has not passed on the token")

    monkeypatch.setattr("torch.distributed.run.run", torchrun)
    monkeypatch.setattr(launch, "_our_agent", lambda _: nullcontext())
    assert launch.run(Config()) == 75


SIGTERM = SignalException("Process 1 got signal: 15", signal.SIGTERM)


@pytest.mark.parametrize(("problem", "fails"), [(SIGTERM, 143), (HostMissingError(), 1), (RendezvousError("gone"), 1)])
@pytest.mark.parametrize(
    ("code", "saved_before", "leaves"), [(1, True, 75), (1, False, 0), (75, False, 75), (70, True, 70)]
)
def test_a_start_that_ends_before_the_ranks_have_joined(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, fails: int, code: int, saved_before: bool, leaves: int
) -> None:
    """A failure at the first start, and 75 at a restart of a saved job: the moment does not matter."""
    launch = _TorchLaunch([__file__])

    def torchrun(_: object) -> None:
        launch._remember(SimpleNamespace(job_code=code, saved_before=saved_before))
        raise problem

    monkeypatch.setattr("torch.distributed.run.run", torchrun)
    monkeypatch.setattr(launch, "_our_agent", lambda _: nullcontext())
    assert launch.run(Config()) == (leaves or fails)


def test_a_host_that_does_not_know_its_own_name_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its message was "Temporary failure in name resolution"."""
    launch = _TorchLaunch(["--rdzv-endpoint", "n1:29500", __file__])
    monkeypatch.setattr("torch.distributed.run.run", Mock(side_effect=socket.gaierror(-3, "Temporary failure")))
    monkeypatch.setattr(launch, "_our_agent", lambda _: nullcontext())
    assert launch.run(Config()) == 64
    said = capfd.readouterr().err
    assert f"its own name, {socket.gethostname()}." in said and "--rdzv-endpoint n1:29500, is_host=0" in said
    launch._remember(SimpleNamespace(job_code=75))  # a name service that fails later does not make settings wrong
    assert launch.run(Config()) == 75


@pytest.mark.parametrize(
    ("code", "leaves", "said"),
    [
        (75, 130, "leaving with 130: the job is saved; unless other hosts go on with it, start it again with the same"),
        (70, 70, "leaving with 70: no newer version was saved"),
        (0, 0, ""),
    ],
)
def test_the_last_line_of_the_log_says_what_to_do(
    code: int, leaves: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was torch's report of a killed rank, or "Process 7 got signal: 15"."""
    made = SimpleNamespace(continuity=None, elastic=False, mindio=False, several_nodes=False, saved_exit_code=130)
    made.run = lambda job: code
    for name, fake in {"_launch": lambda _: made, "show_log": print, "forget_run_dir": print}.items():
        monkeypatch.setattr(f"ttp.launch.run.{name}", fake)
    monkeypatch.setattr("ttp.launch.run.settled", lambda config, _: nullcontext(config))
    assert run([]) == leaves
    assert [text[: len(said)] for text in caplog.messages] == [said] * bool(said)


@pytest.mark.parametrize(
    "problem",
    [
        SIGTERM,
        ChildFailedError("train.py", {0: ProcessFailure(0, 1, 75, "none")}),
        RendezvousError("the other host has left"),
        RuntimeError("of torch"),
    ],
)
def test_nobody_reads_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    """``ttp run 2>&1 | tee log``, where tee is gone: the job is saved, and its exit code must say so."""
    launch = _TorchLaunch([__file__])

    def torchrun(_: object) -> None:
        launch._remember(SimpleNamespace(job_code=75))
        raise problem

    monkeypatch.setattr("torch.distributed.run.run", torchrun)
    monkeypatch.setattr(launch, "_our_agent", lambda _: nullcontext())
    with monkeypatch.context() as gone:
        gone.setattr(sys, "stderr", Unread())
        code = launch.run(Config())
    assert code == 75


@pytest.mark.parametrize(
    "flags", [["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint"], ["--master-port"]]
)
def test_a_host_that_leaves_while_another_waits_for_it_is_told_in_words(
    start: Start, environ: dict[str, str], tmp_path: Path, flags: list[str]
) -> None:
    """The first host, whose launcher serves the meeting, gets SIGTERM. torch raises an error with its own frames.

    If the other one is still about to connect, it tries for ``read_timeout`` seconds.
    """
    port, jobs = free_port(), []
    environ |= {"TTP_PORT": str(free_port()), "TTP_TOKEN": "secret"}
    meeting = [*flags, f"localhost:{port}" if "c10d" in flags else str(port)]
    for number in (0, 1):
        environ |= {"TTP_HOST": f"h{number}", "TTP_RUN_DIR": str(tmp_path / str(number))}
        conf = f"--rdzv-conf=is_host={1 - number},read_timeout=15"
        here = [conf] if "c10d" in flags else ["--node-rank", str(number)]
        jobs.append(start("ttp-run", ["--nnodes", "3", *meeting, *here], "env_worker.py", "0", name=f"h{number}"))
        until(lambda: any(c.laddr.port == port for c in psutil.Process(jobs[0].process.pid).net_connections()))
    waits = psutil.Process(jobs[1].process.pid)
    until(lambda: any(c.raddr and c.raddr.port == port for c in waits.net_connections()))
    jobs[0].process.terminate()
    assert jobs[1].finish() == 1
    assert "ttp run: the hosts of the job cannot meet: " in jobs[1].log and "its log says why" in jobs[1].log
    assert "Traceback" not in jobs[1].log, jobs[1].log
