"""Finds and starts a controller; a stub takes its place."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.ports import taken
from tests.processor.fake_source import no_thread
from tests.waiting import until
from ttp.config import Config
from ttp.errors import EXIT_PORT_TAKEN, ConfigError
from ttp.launch import controller_keeper
from ttp.launch import controller_process as subject
from ttp.launch.controller_keeper import ControllerKeeper
from ttp.launch.host import Host
from ttp.launch.presence import Presence, listeners, listens, may_be_bound, port_owner, probe
from ttp.launch.ring import Ring, job_is_busy, write_ring
from ttp.wire.address import target

HERE = Path(__file__).parent
TOKEN = "sesame"
LONG_S = 30.0


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "COMMAND", (sys.executable, str(HERE / "stub_controller.py")))
    root = str(HERE.parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    yield directory
    for pid in started(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def started(run_dir: Path) -> list[int]:
    """Return the pids of the stubs that served, oldest first."""
    path = run_dir / "started"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def stranger(unused_port: int) -> Iterator[int]:
    """Return a port on which a program listens that is not a controller."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", unused_port))
        listening.listen()
        yield unused_port


def test_controller_is_known_by_its_token(run_dir: Path, unused_port: int) -> None:
    child = subject.start_controller(Config(port=unused_port, token=TOKEN), run_dir)
    assert subject.wait_until_serving("127.0.0.1", unused_port, TOKEN, LONG_S)
    assert probe("127.0.0.1", unused_port, "wrong") == "refused"
    assert not job_is_busy([target("127.0.0.1", unused_port)], TOKEN)
    (run_dir / "busy").touch()
    assert job_is_busy([target("127.0.0.1", unused_port)], TOKEN)
    assert TOKEN not in " ".join(psutil.Process(child.pid).cmdline())
    assert os.getsid(child.pid) == child.pid
    subject.stop_controller(child)
    assert child.returncode == 0
    assert not subject.wait_until_serving("127.0.0.1", unused_port, TOKEN, 0.2)


def test_one_that_does_not_listen_is_killed() -> None:
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        subject.stop_controller(child, patience_s=0.1)
        assert child.returncode == -9


# -------------------------------------------------------------------------------------------------------------- ensure


def ensure(
    run_dir: Path, port: int, address: str = "127.0.0.1", bind: str = "", patience_s: float = 30.0
) -> subprocess.Popen[bytes] | None:
    return subject.ensure_controller(address, Config(port=port, token=TOKEN, bind=bind), run_dir, patience_s=patience_s)


def test_a_stranger_on_the_port_is_reported(run_dir: Path, stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "STRANGER_S", 0.1)
    assert probe("127.0.0.1", stranger, TOKEN, timeout_s=0.3) == "other"
    assert port_owner(stranger) == f"pid {os.getpid()} ({psutil.Process().name()})"
    with pytest.raises(ConfigError, match=rf"port {stranger} .* \(pid {os.getpid()} .*another TTP_PORT"):
        ensure(run_dir, stranger)


def test_another_jobs_controller_is_reported(run_dir: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "STRANGER_S", 0.1)
    other = subject.start_controller(Config(port=unused_port, token="another"), run_dir)
    assert subject.wait_until_serving("127.0.0.1", unused_port, "another", LONG_S)
    with pytest.raises(ConfigError, match=rf"another job \(pid {other.pid}"):
        ensure(run_dir, unused_port)
    other.send_signal(signal.SIGSTOP)  # the job's own would not answer either, and was called another program
    with pytest.raises(ConfigError, match=rf"pid {other.pid} \(.*, stopped\)\).* if it is a controller of this job"):
        ensure(run_dir, unused_port)
    subject.stop_controller(other, patience_s=0.1)


def test_the_controller_of_an_earlier_job_is_given_time_to_end(run_dir: Path, unused_port: int) -> None:
    earlier = subject.start_controller(Config(port=unused_port, token="another"), run_dir)
    assert subject.wait_until_serving("127.0.0.1", unused_port, "another", LONG_S)
    ending = threading.Timer(0.5, subject.stop_controller, (earlier,))
    ending.start()
    mine = ensure(run_dir, unused_port)
    assert mine is not None and started(run_dir) == [earlier.pid, mine.pid]
    subject.stop_controller(mine)
    ending.join()


@pytest.mark.parametrize("code", [3, 64])
def test_one_that_cannot_start_shows_its_log(run_dir: Path, unused_port: int, code: int) -> None:
    (run_dir / "controller.log").write_text("of an earlier one\n")
    (run_dir / "refuse-to-start").write_text(str(code))
    with pytest.raises(ConfigError, match=rf"exit code {code}\):\nno luck today$"):
        ensure(run_dir, unused_port)


def test_an_address_of_another_machine_is_only_waited_for(run_dir: Path, unused_port: int) -> None:
    with pytest.raises(ConfigError, match=r"; the name no.such.host.invalid has no address"):
        ensure(run_dir, unused_port, address="no.such.host.invalid", patience_s=0.2)
    assert started(run_dir) == []


def test_of_several_that_start_at_once_one_serves(run_dir: Path, unused_port: int) -> None:
    children: list[subprocess.Popen[bytes] | None] = []
    threads = [threading.Thread(target=lambda: children.append(ensure(run_dir, unused_port))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(children) == 4
    assert probe("127.0.0.1", unused_port, TOKEN) == "controller"
    (winner,) = filter(None, children)
    subject.stop_controller(winner)
    assert started(run_dir) == [winner.pid]  # nobody else lay in wait for the port
    assert not listens("127.0.0.1", unused_port, 1.0)


def test_one_that_was_too_slow_does_not_stay(run_dir: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another controller serves before ours does. Ours must end, or it would take the port when the other ends."""
    real, slow = subject.COMMAND, run_dir / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    begun: list[subprocess.Popen[bytes]] = []
    start = subject.start_controller

    def start_slowly(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        monkeypatch.setattr(subject, "COMMAND", (sys.executable, str(slow)))
        begun.append(start(*arguments, **more))
        monkeypatch.setattr(subject, "COMMAND", real)
        begun.append(start(*arguments, **more))
        return begun[0]

    monkeypatch.setattr(subject, "start_controller", start_slowly)
    assert ensure(run_dir, unused_port) is None
    late, serving = begun
    assert -late.returncode in (signal.SIGINT, signal.SIGTERM)
    assert started(run_dir) == [serving.pid] and serving.poll() is None
    subject.stop_controller(serving)


@pytest.mark.parametrize("known", [True, False])
def test_one_that_takes_long_to_load_and_to_answer_is_waited_for(
    known: bool, run_dir: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the job with 64. The owner of a socket is not known while psutil's list of files is older than it."""
    go, slow, answers = run_dir / "go", run_dir / "slow.py", list[int]()
    code = f"import pathlib, runpy, sys, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
    slow.write_text(f"{code}runpy.run_path({subject.COMMAND[1]!r}, run_name='__main__')\n")
    monkeypatch.setattr(subject, "COMMAND", (sys.executable, str(slow)))

    def after_the_patience(port: int) -> set[int | None]:
        go.touch()
        return {pid if known else None for pid in listeners(port)}

    def busy(address: str, port: int, token: str) -> Presence:
        answers.extend([port] * ((found := probe(address, port, token)) == "controller"))
        return "other" if 0 < len(answers) < 20 else found

    monkeypatch.setattr(subject, "listeners", after_the_patience)
    monkeypatch.setattr(subject, "probe", busy)
    monkeypatch.setattr(subject, "LOOK_S", 0.1)
    mine = ensure(run_dir, unused_port, patience_s=0.2)
    assert mine is not None and len(answers) == 20
    subject.stop_controller(mine)


def lost_starts(run_dir: Path) -> int:
    log = run_dir / "controller.log"
    return log.read_text().count("is taken") if log.exists() else 0


def test_losing_the_port_again_and_again_is_no_failure(
    run_dir: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "RETRY_MAX_S", 0.05)
    children: list[subprocess.Popen[bytes] | None] = []
    with taken(unused_port):
        starter = threading.Thread(target=lambda: children.append(ensure(run_dir, unused_port, patience_s=LONG_S)))
        starter.start()
        until(lambda: lost_starts(run_dir) >= 4 or not starter.is_alive())
        assert starter.is_alive()
    starter.join()
    (child,) = children
    assert child is not None and started(run_dir) == [child.pid]
    subject.stop_controller(child)


def test_a_port_that_is_never_given_up_is_said_when_patience_is_over(run_dir: Path, unused_port: int) -> None:
    with taken(unused_port):
        for patience_s in (3.0, LONG_S, 4 * LONG_S):  # a busy machine does not start one in three seconds
            with pytest.raises(ConfigError) as refused:
                ensure(run_dir, unused_port, patience_s=patience_s)
            if "was taken" in str(refused.value):
                break
    assert re.search(rf"(?s)was taken \d+ times .*port {unused_port} is taken", str(refused.value))
    assert started(run_dir) == []


def test_an_address_that_cannot_be_bound_is_said_at_once(run_dir: Path, unused_port: int) -> None:
    with pytest.raises(ConfigError, match="exit code 64"):
        ensure(run_dir, unused_port, bind="192.0.2.1", patience_s=10 * LONG_S)  # of no machine
    assert may_be_bound("", unused_port)
    assert not may_be_bound("192.0.2.1", unused_port)
    with taken(unused_port):
        assert may_be_bound("", unused_port)


# -------------------------------------------------------------------------------------------------------------- keeper


@pytest.fixture
def config(unused_port: int) -> Config:
    return Config(port=unused_port, token=TOKEN)


@pytest.fixture
def keeper(config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerKeeper]:
    monkeypatch.setattr(subject, "STOPPED_S", 0.0)
    keeping = ControllerKeeper(config, run_dir)
    yield keeping
    keeping.stop()


def test_a_dead_or_stopped_controller_is_replaced(keeper: ControllerKeeper, config: Config, run_dir: Path) -> None:
    keeper.start("127.0.0.1")
    for killed, how in enumerate((signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL), start=1):
        os.kill(started(run_dir)[-1], how)
        until(lambda: len(started(run_dir)) == killed + 1)  # noqa: B023 - called here
    keeper.stop()
    assert not listens("127.0.0.1", config.port or 0, 1.0)


def test_a_controller_that_no_thread_can_look_after_is_ended_with_the_job(
    keeper: ControllerKeeper, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        keeper.start("127.0.0.1")
    assert listens("127.0.0.1", config.port or 0, 1.0)
    keeper.stop()
    assert not listens("127.0.0.1", config.port or 0, 1.0)


def test_one_that_ended_by_itself_is_replaced_with_the_next_workers(keeper: ControllerKeeper, run_dir: Path) -> None:
    keeper.start("127.0.0.1")
    child = keeper._child
    assert child is not None
    child.terminate()
    until(lambda: keeper._child is None)
    keeper.start("127.0.0.1")
    assert len(started(run_dir)) == 2


@pytest.mark.parametrize(("code", "told"), [(EXIT_PORT_TAKEN, False), (1, True)])
def test_one_that_has_lost_the_port_to_another_is_no_news(
    keeper: ControllerKeeper, caplog: pytest.LogCaptureFixture, code: int, told: bool
) -> None:
    keeper._child = subprocess.Popen(["sh", "-c", f"exit {code}"])
    keeper._child.wait()
    assert keeper._gone()
    assert (f"the controller ended (exit code {code})" in caplog.text) is told


@pytest.mark.parametrize(("leads", "text"), [(True, "a standby controller leads"), (False, "would lose steps")])
def test_one_that_cannot_be_replaced_costs_nothing_while_a_standby_leads(
    keeper: ControllerKeeper, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    leads: bool, text: str,
) -> None:  # fmt: skip
    keeper.start("127.0.0.1")
    write_ring(run_dir, Ring("a", 1, 2, "127.0.0.1:5", "127.0.0.9:5", ("127.0.0.9:5",)))
    monkeypatch.setattr(keeper, "_ensure", Mock(side_effect=ConfigError("port 5 is in use")))
    monkeypatch.setattr(controller_keeper, "job_is_busy", lambda around, _token: leads and "127.0.0.9:5" in around)
    os.kill(started(run_dir)[-1], signal.SIGKILL)
    until(lambda: "port 5 is in use" in caplog.text)
    assert text in caplog.text


def test_somebody_elses_is_left_alone_but_replaced(keeper: ControllerKeeper, config: Config, run_dir: Path) -> None:
    assert config.port is not None
    other = ensure(run_dir, config.port)
    assert other is not None
    keeper.start("127.0.0.1")
    assert started(run_dir) == [other.pid]
    other.kill()
    other.wait()
    until(lambda: len(started(run_dir)) == 2)


def test_stop_ends_one_that_a_rank_has_put_in_the_place_of_ours(
    keeper: ControllerKeeper, config: Config, run_dir: Path
) -> None:
    """A rank that finds no controller starts one. If it stayed, it would keep the port, and the next launch fail."""
    keeper.start("127.0.0.1")
    assert config.port is not None
    with keeper._lock:
        os.kill(started(run_dir)[0], signal.SIGKILL)
        until(lambda: not listens("127.0.0.1", config.port or 0, 1.0))
        of_a_rank = ensure(run_dir, config.port)
    assert of_a_rank is not None
    until(lambda: keeper._child is None)
    keeper.stop()
    assert of_a_rank.wait(LONG_S) == 0
    assert not listens("127.0.0.1", config.port, 1.0)


def test_stop_leaves_somebody_elses_running(keeper: ControllerKeeper, config: Config, run_dir: Path) -> None:
    other = ensure(run_dir, config.port or 0)
    assert other is not None
    keeper.start("127.0.0.1")
    keeper.stop()
    assert probe("127.0.0.1", config.port or 0, TOKEN) == "controller"
    subject.stop_controller(other)


def test_first_node_waits_for_the_others_before_it_ends_the_controller(config: Config, run_dir: Path) -> None:
    host = Host(config, run_dir)
    host.before_workers("127.0.0.1", first_node=True)
    (run_dir / "busy").touch()
    closing = threading.Thread(target=lambda: host.close(several_nodes=True, code=0))
    closing.start()
    closing.join(1.0)
    assert closing.is_alive()
    assert probe("127.0.0.1", config.port or 0, TOKEN) == "controller"
    (run_dir / "busy").unlink()
    closing.join(LONG_S)
    assert not listens("127.0.0.1", config.port or 0, 1.0)


def test_later_a_missing_controller_does_not_stop_the_job(
    config: Config, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(config, run_dir)
    host.before_workers("127.0.0.1", first_node=True)
    os.kill(started(run_dir)[0], signal.SIGKILL)
    (run_dir / "refuse-to-start").touch()
    until(lambda: "no luck today" in caplog.text)
    host.before_workers("127.0.0.1", first_node=True)
    host.close(several_nodes=False, code=0)
    assert "restarts without a controller" in caplog.text


def test_who_is_the_first_node_no_more_ends_its_controller(config: Config, run_dir: Path) -> None:
    host = Host(config, run_dir)
    for address, first_node in (("127.0.0.1", True), ("127.0.0.1", False), ("0.0.0.1", False)):
        assert not started(run_dir) or probe("127.0.0.1", config.port or 0, TOKEN) == "controller"
        host.before_workers(address, first_node)
    assert not listens("127.0.0.1", config.port or 0, 1.0)
    host.close(several_nodes=False, code=0)
