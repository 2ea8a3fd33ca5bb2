"""``Host`` with real worker processes, without any launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import has_ended, until
from ttp.config import Config
from ttp.launch import early_failures, job_verdict, leases, ring, worker_stops
from ttp.launch.host import Host
from ttp.launch.preparation import settled
from ttp.launch.proc_files import is_ending
from ttp.launch.run_dir import forget_launcher, launcher_lives, prepare_run_dir
from ttp.launch.token_file import read_token, write_token
from ttp.wire.v1.controller_pb2 import GetStatusResponse, GetVerdictResponse, IncidentStatus

HERE = Path(__file__).parent
Worker = subprocess.Popen[bytes]
StartWorkers = Callable[..., dict[int, Worker]]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stops, "FIRST_LEASE_S", 0.3)
    monkeypatch.setattr(worker_stops, "GRACE_S", 1.0)


@pytest.fixture
def host(unused_port: int, tmp_path: Path) -> Iterator[Host]:
    there = Host(Config(port=unused_port, rescue_patience_s=5.0), tmp_path / "run")
    yield there
    there.close(several_nodes=False, code=0)


@pytest.fixture
def workers(environ: dict[str, str], out: Path) -> Iterator[StartWorkers]:
    """Return ``workers(plan of rank 0, plan of rank 1, ...)``, which starts workers and waits until they run."""
    started: dict[int, Worker] = {}

    def start(*plans: dict[str, object]) -> dict[int, Worker]:
        for rank, plan in enumerate(plans):
            env = environ | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
            command = [sys.executable, str(HERE / "fake_worker.py"), str(out), json.dumps(plan)]
            if shell := plan.get("shell"):
                command = ["sh", "-c", str(shell), *command]
            started[rank] = subprocess.Popen(command, env=env, start_new_session=True)
        for rank in started:
            until((out / f"pid-{rank}-0").exists)
        return started

    yield start
    for worker in started.values():
        worker.kill()
        worker.wait()


def test_files_of_a_long_job_look_used(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a cleaner of temporary files removes them after some days, and no rank seems to be armed."""
    host.leases.arm(10)
    old = tmp_path / "run" / "armed" / "10"
    os.utime(old, (1e9, 1e9))
    host.look({})
    assert old.stat().st_mtime == 1e9
    monkeypatch.setattr(leases, "FRESH_S", 0.0)
    host.look({})
    assert min(old.stat().st_mtime, old.stat().st_atime) > 1e9


def test_a_rank_that_ends_before_any_has_joined_keeps_others_waiting(
    host: Host, workers: StartWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In init_process_group, which says nothing for half an hour."""
    monkeypatch.setattr(early_failures, "WAITED_S", 0.0)
    host._early.failed(0, GetStatusResponse(stage="waiting", world_size=2, incarnation=1), [75])
    group = workers({"armed": False}, {"armed": False, "attempts": 0})
    assert group[1].wait() == 0
    host.leases.arm(group[0].pid)
    host.look(group)
    assert not caplog.messages
    host.leases.disarm(group[0].pid)
    host.look(group)
    host.look(group)
    (said,) = caplog.messages
    assert "rank 1 ended with exit code 0 before it had joined the job" in said


def test_armed_ones_without_lease_are_asked_and_waited_for(host: Host, workers: StartWorkers) -> None:
    """The launcher waits longer than the grace period: workers with a lease may take TTP_OT."""
    group = workers({"on_sigterm": "save", "save_s": 2}, {}, {"on_sigterm": "save", "save_s": 2})
    group[1].kill()
    host.stops.hold(group)
    assert [worker.poll() for worker in group.values()] == [75, -9, 75]


def test_armed_ones_that_ignore_it_are_killed_after_the_grace(host: Host, workers: StartWorkers) -> None:
    group = workers({}, {})
    group[0].send_signal(signal.SIGSTOP)
    group[1].kill()
    host.stops.hold(group)
    assert group[0].wait(10) == -signal.SIGKILL


def test_ctrl_c_that_a_shell_has_them_ignore_is_sigterm(
    host: Host, workers: StartWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    group = workers({"deaf": True, "on_sigterm": "save", "save_s": 0.1}, {"on_sigterm": "save", "save_s": 0.1})
    host.stops.stop({0: group[0]}, signal.SIGINT, 5.0)
    assert "Ctrl-C" not in caplog.text
    host.stops.stop(group, signal.SIGINT, 5.0)
    assert "Ctrl-C (SIGINT) saves nothing: to stop a job with a save, send SIGTERM to its launcher" in caplog.text
    assert group[0].poll() == 75
    assert group[1].wait(10) != 75, "whoever hears Ctrl-C gets it as it is, and holds no lease while it ends"


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_on_which_ranks_would_just_die_is_sigterm_for_them(
    how: signal.Signals, host: Host, workers: StartWorkers
) -> None:
    group = workers({"on_sigterm": "save", "save_s": 0.1})
    host.stops.stop(group, how, 5.0)
    assert group[0].poll() == 75


SHELLS = {
    "a shell": '"$0" "$@"; exit $?',
    "a shell that gives its rank a session": 'setsid "$0" "$@"; exit $?',
    "a rank whose shell has no other process": 'exec "$0" "$@"',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_rank_of_a_shell_script_saves_before_its_shell_ends(shell: str, host: Host, workers: StartWorkers) -> None:
    plan: dict[str, object] = {"shell": SHELLS[shell], "on_sigterm": "save", "save_s": 0.5}
    group = workers(plan, plan)
    host.stops.stop(group, signal.SIGTERM, 5.0)
    assert [worker.wait(10) for worker in group.values()] == [75, 75]  # a shell ends after its rank


@pytest.mark.parametrize("shell", SHELLS)
def test_the_rank_of_a_shell_script_is_waited_for(shell: str, host: Host, workers: StartWorkers, out: Path) -> None:
    plan: dict[str, object] = {"shell": SHELLS[shell], "save_s": 0.5}
    group = workers(plan, {}, {"save_s": 0.1})
    group[1].kill()
    (out / "rescue").touch()
    until((out / "saving-0-0").exists)
    host.stops.hold(group)
    assert [worker.poll() for worker in group.values()] == [75, -9, 75]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_rank_that_does_not_stop_is_killed_with_its_shell(
    shell: str, host: Host, workers: StartWorkers, out: Path
) -> None:
    group = workers({"shell": SHELLS[shell]})
    rank = int((out / "pid-0-0").read_text())
    os.kill(rank, signal.SIGSTOP)
    host.stops.stop(group, signal.SIGTERM, 0.1)
    until(lambda: has_ended(rank))
    assert group[0].wait(10) < 0


def test_patience_ends(host: Host, workers: StartWorkers, out: Path) -> None:
    """After TTP_OT (here 5 s) the launcher stops waiting."""
    group = workers({"save_s": 60}, {})
    group[1].kill()
    (out / "rescue").touch()
    host.stops.hold(group)
    assert (out / "saving-0-0").exists()
    assert group[0].poll() is None


def test_one_whose_memory_is_being_freed_is_not_hung(
    host: Host, workers: StartWorkers, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That takes the kernel seconds if a process was large, and only after them is known why it was killed."""
    group = workers({"save_s": 0.1}, {"dying": True})
    until(lambda: is_ending(group[1].pid))
    (out / "rescue").touch()
    assert not host.stops.hold(group)
    assert "hung" not in caplog.text and group[1].poll() is None
    host.stops.expect(group)
    assert not host._watch.expects(group[1].pid), "its death is reported"
    (out / "freed").touch()
    assert group[1].wait(30) == -signal.SIGKILL


def test_unarmed_ones_are_left_to_the_launcher(host: Host, workers: StartWorkers, out: Path) -> None:
    group = workers({"armed": False}, {"armed": False})
    group[1].kill()
    host.stops.hold(group)
    host.stops.stop(group, signal.SIGTERM, 1.0)
    assert group[0].poll() is None
    (out / "rescue").touch()
    assert group[0].wait(30) == 75
    assert not (out / "sigterm-0-0").exists()


def test_a_signal_while_all_is_ended_does_not_leave_the_controller(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    stopped: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(host.warm, "close", interrupted)
        patch.setattr(host._keeper, "stop", lambda: stopped.append(True))
        with pytest.raises(KeyboardInterrupt):
            host.close(several_nodes=False, code=0)
    assert stopped == [True]


def test_leases_of_earlier_processes_are_swept(host: Host, workers: StartWorkers, tmp_path: Path) -> None:
    group = workers({}, {})
    for worker in group.values():
        worker.kill()
        worker.wait()
    host.before_workers("127.0.0.1", first_node=False)
    assert os.listdir(tmp_path / "run" / "armed") == []  # noqa: PTH208


@pytest.mark.parametrize(("ranks", "joined", "said"), [(4, False, 1), (4, True, 0), (2, False, 0)])
def test_ranks_that_wait_for_a_lost_host_at_their_start_are_told_of(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: int, joined: bool, said: int
) -> None:
    """With the static rendezvous nobody else notices it, and the log of this host said nothing at all."""
    monkeypatch.setattr("ttp.launch.early_failures.STARTS_S", 0.0)
    caplog.set_level(logging.INFO, "ttp.launch")
    host.before_workers("127.0.0.1", first_node=False, world_size=ranks, here=2)
    if joined:
        host.leases.arm(os.getpid())
    for _ in range(3):
        host.look({})
    assert caplog.text.count("or wait for ranks of another host") == said
    host.leases.disarm(os.getpid())


def test_a_second_job_on_the_port_of_a_running_one_leaves_its_run_directory_as_it_is(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused a little later. The other job's token and ring are what its ``ttp status`` needs."""
    for name in ("TTP_PORT", "TTP_TOKEN", "TTP_RUN_DIR"):
        monkeypatch.setenv(name, "")
    config = Config(port=unused_port, run_dir=str(tmp_path / "run"))
    run_dir = prepare_run_dir(tmp_path / "run")
    write_token(run_dir, "theirs")
    (run_dir / "ring.json").write_text("theirs")

    def launch() -> str | None:
        with settled(config, several_nodes=False) as job:
            Host(job, run_dir).forget_token()
            return read_token(run_dir)

    with socket.create_server(("127.0.0.1", unused_port)):
        assert launch() == "theirs"
        assert (run_dir / "ring.json").exists()
    assert read_token(run_dir) == "theirs"
    assert launch() is None and not (run_dir / "ring.json").exists(), "nobody runs there any more"
    assert read_token(run_dir) is None


def test_who_comes_before_another_job_has_ended_is_known_after_it(
    unused_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other launcher removes the note of a launcher when it ends. It has the same port, and so the same files."""
    monkeypatch.setattr("ttp.launch.host.is_of_another_job", lambda *job: True)
    host = Host(Config(port=unused_port), run_dir := prepare_run_dir(tmp_path / "run"))
    forget_launcher(run_dir)
    host.before_workers("127.0.0.1", first_node=False)
    assert launcher_lives(run_dir)
    host.close(several_nodes=False, code=0)
    assert not launcher_lives(run_dir)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([(75, 1, 1), (70, 1, 2)], 75),  # the second one led only a rank that could not reach the first one
        ([(70, 1, 1), (75, 1, 2)], 75),  # the first one was stopped, and found its ranks gone
        ([(75, 1, 3), (70, 2, 1)], 70),  # of the launch before
        ([(70, 1, 2), (64, 1, 1)], 64),
    ],
)
def test_the_verdict_of_several_controllers(
    answers: list[tuple[int, int, int]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {f"h:{at}": GetVerdictResponse(code=c, incarnation=i, term=t) for at, (c, i, t) in enumerate(answers, 1)}
    monkeypatch.setattr(job_verdict, "_ask", lambda host, port, *_: said[f"{host}:{port}"])
    for around in (said, reversed(said)):
        assert job_verdict.ask_verdict(around, "", "", 0).code == code


@pytest.mark.parametrize(
    ("own", "job", "code"),
    [(1, 0, 1), (75, 0, 0), (70, 0, 0), (1, 75, 75), (0, 70, 70), (64, 75, 64), (75, None, 75)],
)
def test_which_of_two_codes_a_launcher_leaves_with(own: int, job: int | None, code: int) -> None:
    """A program that fails after it has trained to the end has failed. Others have replaced saved or fenced ranks."""
    assert job_verdict.settled_code(own, GetVerdictResponse(code=job)) == code


@pytest.mark.parametrize(
    ("term", "code", "leaves"), [(1, 0, 0), (1, 75, 75), (1, 1, 70), (2, 0, 70), (2, 75, 70), (3, 0, 70)]
)
def test_a_controller_that_was_replaced_does_not_call_a_job_lost_that_its_successor_has_led_to_the_end(
    host: Host, monkeypatch: pytest.MonkeyPatch, term: int, code: int, leaves: int
) -> None:
    """It was cut off, so that it knows of no rank any more; the successor has ended with the job."""
    answer = GetVerdictResponse(code=70, text="no copy left", incarnation=1, term=term)
    monkeypatch.setattr(job_verdict, "_ask", lambda *_: answer)
    host.before_workers("127.0.0.1", first_node=False)
    ring.write_ring(host._run_dir, ring.Ring("job", 1, 2, "a:1", "b:1", ("b:1",)))
    assert host.close(several_nodes=False, code=code) == leaves


def test_a_launcher_whose_ranks_are_gone_waits_until_those_of_other_hosts_have_saved(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes of the job is not known before; by the codes of this host's ranks, nothing is saved."""
    stages = ["freezing", "saving", "released"]

    def status(*_: object) -> GetStatusResponse:
        stage = stages.pop(0) if len(stages) > 1 else stages[0]
        return GetStatusResponse(world_size=2, last_incident=IncidentStatus(stage=stage))

    def verdict(*_: object) -> GetVerdictResponse:
        return GetVerdictResponse(code=75 if stages == ["released"] else None)

    monkeypatch.setattr(ring, "ask_status", status)
    monkeypatch.setattr(job_verdict, "_ask", verdict)
    host.before_workers("127.0.0.1", first_node=False)
    assert host.close(several_nodes=True, code=1) == 75


@pytest.mark.parametrize(("said", "code", "saved"), [(None, 75, True), (75, -9, True), (70, 75, False), (0, 1, False)])
def test_a_restart_of_a_saved_job_loses_nothing_until_a_rank_has_joined(
    host: Host, monkeypatch: pytest.MonkeyPatch, said: int | None, code: int, saved: bool
) -> None:
    """A launcher that gets SIGTERM before that leaves with 75, whatever its controller knows at that moment."""
    monkeypatch.setattr(host, "_verdict", lambda: GetVerdictResponse(code=said))
    assert not host.saved_before
    assert host.restart_helps({0: code}, 1)
    assert not host.is_drained()
    host.look({})
    assert host.saved_before is saved
    host.leases.arm(os.getpid())
    host.look({})
    assert not host.saved_before


@pytest.mark.parametrize(("code", "leaves"), [(1, 70), (75, 70), (64, 64), (0, 0)])
def test_a_checkpoint_in_memory_that_was_not_copied_is_not_saved_before(
    host: Host, monkeypatch: pytest.MonkeyPatch, code: int, leaves: int
) -> None:
    """SIGTERM comes at a restart, before the ranks have joined."""
    host.saved_before = True
    monkeypatch.setattr(host.shadows, "wait", lambda patience_s: False)
    assert host.close(several_nodes=False, code=code) == leaves


@pytest.mark.parametrize(("code", "left"), [(None, True), (75, True), (0, False)])
def test_a_host_whose_ranks_were_moved_leaves_also_when_the_job_fails_right_after(
    host: Host, monkeypatch: pytest.MonkeyPatch, code: int | None, left: bool
) -> None:
    """Ranks that were moved have ended with 0; otherwise their launcher would wait for other hosts at the end."""
    answer = GetVerdictResponse(code=code, drained=[socket.gethostname()])
    monkeypatch.setattr(job_verdict, "_ask", lambda *_: answer)
    host.before_workers("127.0.0.1", first_node=False)
    assert host.is_moved() is left
