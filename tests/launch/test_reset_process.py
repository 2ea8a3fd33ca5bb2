"""``ttp reset-process``: real processes are killed and started again as ``reset.json`` says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.waiting import has_ended, until
from ttp.launch import reset_process
from ttp.launch.reset_process import ResetProcess, Training, main

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, out = os.environ["RANK_ID"], Path(sys.argv[1])
def put(name):
    (out / f".{name}").write_text(str(os.getpid()))
    (out / f".{name}").replace(out / name)
def save(*_):
    put(f"saved-{rank}")
    os._exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else save)
if "parent" in sys.argv:
    put(f"child-{subprocess.Popen(['sleep', '100']).pid}")
print("training", flush=True)
put(f"rank-{rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 'first')}-{os.environ['MARK']}")
while not (out / "finish").exists():
    time.sleep(0.01)
sys.exit(int((out / "finish").read_text() or 0))
"""
WAIT_S = 60.0


class Host:
    """The ranks of one host and their ``ttp reset-process``."""

    def __init__(self, folder: Path) -> None:
        self.out, self.reset_json = folder, folder / "reset.json"
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.manager: subprocess.Popen[str] | None = None

    def rank(self, *how: str) -> subprocess.Popen[bytes]:
        """Start a rank as a script would."""
        place = self.out / f"device{len(self.ranks)}"
        place.mkdir()
        environ = os.environ | {"RANK_ID": str(len(self.ranks)), "MARK": "mine"}
        command = [sys.executable, "-c", RANK, str(self.out), *how]
        self.ranks.append(subprocess.Popen(command, env=environ, cwd=place, stdout=subprocess.DEVNULL))
        self.wait(lambda: self.has(f"rank-{len(self.ranks) - 1}-first-mine"))
        return self.ranks[-1]

    def manage(self, *flags: str) -> None:
        """Start ``ttp reset-process``."""
        pids = [str(rank.pid) for rank in self.ranks]
        command = [sys.executable, "-m", "ttp.cli", "reset-process", "-p", *pids, *flags, "--every", "0.05"]
        command += ["--reset-json", str(self.reset_json)]
        self.manager = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def says(self, statuses: dict[int, str]) -> None:
        """Write ``reset.json`` in one step."""
        draft = self.reset_json.with_suffix(".draft")
        entries = [{"RankId": rank, "LogicId": rank, "Status": status} for rank, status in statuses.items()]
        draft.write_text(json.dumps({"RankList": entries, "GracefulExit": 0, "RetryTime": 0}))
        draft.replace(self.reset_json)

    def has(self, name: str) -> bool:
        return (self.out / name).exists()

    def running(self) -> list[psutil.Process]:
        """Return all ranks that run, whoever has started them."""
        return [each for each in psutil.process_iter(["cmdline"]) if str(self.out) in (each.info["cmdline"] or [])]

    def wait(self, condition: Callable[[], bool]) -> None:
        until(condition, WAIT_S, lambda: sorted(path.name for path in self.out.iterdir()))

    def finish(self) -> tuple[int, str]:
        """Return exit code and log of ``ttp reset-process``."""
        assert self.manager is not None
        _, log = self.manager.communicate(timeout=WAIT_S)
        return self.manager.returncode, log


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for process in made.running():
        process.kill()
    for rank in made.ranks:
        rank.kill()
        rank.wait()
    if made.manager is not None:
        made.manager.kill()
        made.manager.communicate()


def test_common_kills_all_and_starts_them_again_where_they_were(host: Host) -> None:
    """The broken rank is on another host; the ranks of this host are killed all the same."""
    first, second = host.rank(), host.rank()
    host.manage("-r", "-m", "common", "-f", "ms")
    host.says({5: "unrecovered", 6: "unrecovered"})
    assert (first.wait(WAIT_S), second.wait(WAIT_S)) == (-9, -9)
    host.says({5: "recovered", 6: "unrecovered"})
    host.says({5: "recovered", 6: "recovered"})
    host.wait(lambda: host.has("rank-0-1-mine") and host.has("rank-1-1-mine"))  # environment and arguments
    assert (host.out / "device1/newlog").read_text() == "training\n"
    assert not host.has("saved-0")
    host.says({0: "unrecovered"})  # once more, and the plugin clears the file afterwards
    host.wait(lambda: has_ended(int((host.out / "rank-0-1-mine").read_text())))
    host.says({})
    host.wait(lambda: host.has("rank-0-2-mine") and host.has("rank-1-2-mine"))
    (host.out / "finish").write_text("")
    code, log = host.finish()
    assert code == 0, log


def test_elastic_lets_the_healthy_save(host: Host) -> None:
    broken, healthy, deaf = host.rank("deaf"), host.rank(), host.rank("deaf")
    host.manage("-r", "-m", "elastic", "-t", "5", "--faulty-after", "3")  # the healthy one needs a second under load
    began_s = time.monotonic()
    host.says({0: "unrecovered"})
    assert healthy.wait(WAIT_S) == 75 and broken.poll() is None
    assert broken.wait(WAIT_S) == -9 and time.monotonic() - began_s >= 3
    assert deaf.wait(WAIT_S) == -9 and time.monotonic() - began_s >= 5
    host.says({0: "recovered"})
    host.wait(lambda: all(host.has(f"rank-{rank}-1-mine") for rank in range(3)))
    (host.out / ".finish").write_text("3")
    (host.out / ".finish").replace(host.out / "finish")  # whole at once: a rank may be reading
    code, log = host.finish()
    assert code == 1 and "3, 3, 3" in log


def test_if_one_rank_cannot_be_started_again_none_is(host: Host) -> None:
    """A rank that waits for a missing one would hold its device, after the job was called failed."""
    first, second = host.rank("parent"), host.rank()
    host.manage("-r")
    host.says({5: "unrecovered"})
    assert (first.wait(WAIT_S), second.wait(WAIT_S)) == (-9, -9)
    (host.out / "device1").rmdir()
    host.says({5: "recovered"})
    code, log = host.finish()
    until(lambda: not host.running(), 5)
    assert code == 1 and "cannot be started again, so none is: " in log and "device1" in log


def test_without_ranks_the_main_process_goes_with_its_children(host: Host) -> None:
    main = host.rank("parent")
    host.wait(lambda: bool(list(host.out.glob("child-*"))))
    child = int(next(host.out.glob("child-*")).name.removeprefix("child-"))
    host.manage()
    host.says({0: "unrecovered"})
    assert main.wait(WAIT_S) == -9
    host.wait(lambda: has_ended(child))
    host.says({0: "failed"})
    code, log = host.finish()
    assert code == 1 and "rank 0 cannot be reset" in log


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR2, 1), (None, 1)])
def test_how_it_ends(host: Host, how: signal.Signals | None, code: int) -> None:
    """After signals of the script, or with the last process. An unreadable reset.json kills none and is logged once."""
    rank = host.rank()
    host.reset_json.write_text('{"RankList": [{"RankId": 0, "Sta')
    host.manage("-r")
    assert host.manager is not None and host.manager.stderr is not None
    assert "is no reset.json" in host.manager.stderr.readline()
    assert rank.poll() is None
    if how is None:
        (host.out / "finish").write_text("")
    else:
        host.manager.send_signal(how)
    found, log = host.finish()
    assert found == code and "reset.json" not in log


def test_no_rank_is_started_again_before_all_devices_have_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training: Any = Mock(rank=0, child=None)
    training.process.children.return_value = []
    running = iter([True, True, False])
    monkeypatch.setattr(reset_process, "_runs", lambda _: next(running, False))
    host = Host(tmp_path)
    watched = ResetProcess([training], host.reset_json, elastic=False, faulty_s=0, healthy_s=0)
    for statuses in ({5: "unrecovered", 6: "unrecovered"}, {5: "recovered", 6: "unrecovered"}):
        host.says(statuses)
        assert watched.look() is None and not training.again.called
    host.says({5: "recovered", 6: "recovered"})
    training.again.return_value.process.pid = 1
    assert watched.look() is None and training.again.call_count == 1


def test_a_signal_while_the_ranks_are_started_again_leaves_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for a missing one would hold its device."""
    again, started = Training.again, list[Training]()
    before = {how: signal.getsignal(how) for how in (signal.SIGTERM, signal.SIGUSR2)}
    ranks = [subprocess.Popen(["sleep", "600"], cwd=tmp_path) for _ in range(2)]

    def told_to_end(training: Training) -> Training:
        os.kill(os.getpid(), signal.SIGTERM)
        started.append(again(training))
        return started[-1]

    def statuses(_: ResetProcess) -> dict[int, str]:
        return {5: "unrecovered" if any(rank.poll() is None for rank in ranks) else "recovered"}

    monkeypatch.setattr(Training, "again", told_to_end)
    monkeypatch.setattr(ResetProcess, "_statuses", statuses)
    try:
        assert main(["-p", *(str(rank.pid) for rank in ranks), "--every", "0.01"]) == 0
        assert len(started) == 2 and all(training.process.is_running() for training in started)
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)
        for each in [*ranks, *(training.child for training in started if training.child is not None)]:
            each.kill()
            each.wait()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-p", "999999999"], "process 999999999 cannot be watched"),
        (["-p", "PID", "-m", "elastic"], "-m elastic needs -r"),
        (["-p", "PID", "-r"], "has no RANK_ID"),
        (["-p", "PID", "-t", "3001"], "seconds from 0 to 3000"),
        (["-p", "PID", "-f", "pt"], "invalid choice: 'pt'"),
        ([], "the following arguments are required: -p"),
    ],
)
def test_bad_usage(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ttp.cli.main import main as ttp

    monkeypatch.delenv("RANK_ID", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command keeps its handlers to its end
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        assert ttp(["reset-process", *(str(process.pid) if flag == "PID" else flag for flag in flags)]) == 64
        process.kill()
    assert text in capsys.readouterr().err
