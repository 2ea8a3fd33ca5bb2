"""Stacks of real processes that wait, hold the interpreter lock, are stopped, or are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttp.launch.proc_files import start_of, status_of
from ttp.processor.liveness import stacks

LONG_S = 30.0
FREE = int(signal.SIGRTMIN) + stacks.FIRST_OFFSET if hasattr(signal, "SIGRTMIN") else 0

PREFACE = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from ttp.processor.liveness import stacks
run_dir = Path(sys.argv[1])
def ready():
    print("ready", flush=True)
def install():
    assert stacks.install(run_dir)
"""

DEADLOCK = """
install()
one, two = threading.Lock(), threading.Lock()
def the_other_way_round(met):
    with two:
        met.wait()
        with one:
            pass
def train():
    met = threading.Barrier(2)
    threading.Thread(target=the_other_way_round, args=(met,), daemon=True).start()
    with one:
        met.wait()
        ready()
        with two:
            pass
train()
"""

HOLDS_THE_LOCK = """
install()
def a_kernel_that_never_ends():
    ready()
    while True:
        ctypes.PyDLL(None).sleep(1000)
thread = threading.Thread(target=a_kernel_that_never_ends, daemon=True)
thread.start()
thread.join()
"""

SLEEPS = """
ready()
time.sleep(1000)
"""

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program, and return its pid when it is ready."""
    running: list[subprocess.Popen[str]] = []

    def run(program: str) -> int:
        command = [sys.executable, "-c", PREFACE + program, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield run
    for process in running:
        process.kill()
        process.communicate()


def test_a_deadlock(start: Start, tmp_path: Path) -> None:
    pid = start(DEADLOCK)
    text = stacks.take(pid, tmp_path, LONG_S)
    assert text.startswith(f"pid {pid}: state ")
    main, _, other = text.partition("Main thread")[2].partition("Thread 0x")
    assert "in train" in main and "in the_other_way_round" in other, text
    again = stacks.take(pid, tmp_path, LONG_S)
    assert again.count("in train") == 1, "what was said before is not said again"


def test_a_thread_that_holds_the_interpreter_lock_in_c(start: Start, tmp_path: Path) -> None:
    text = stacks.take(start(HOLDS_THE_LOCK), tmp_path, LONG_S)
    assert "a_kernel_that_never_ends" in text and "Main thread" in text


def test_a_stopped_one_is_left_alone(start: Start, tmp_path: Path) -> None:
    pid = start("install()" + SLEEPS)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    text = stacks.take(pid, tmp_path, LONG_S)
    assert "stopped (SIGSTOP?): no stack can be taken" in text
    assert int(status_of(pid)["ShdPnd"], 16) == 0, "nothing waits for it to go on"


def test_gone_and_ended(start: Start, tmp_path: Path) -> None:
    pid = start("install()" + SLEEPS)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert "it has ended" in stacks.take(pid, tmp_path, LONG_S)
    os.waitpid(pid, 0)
    assert stacks.take(pid, tmp_path, LONG_S) == f"pid {pid}: no such process"


def test_one_that_installed_nothing_is_not_killed_by_the_question(start: Start, tmp_path: Path) -> None:
    pid = start(SLEEPS)
    assert "has no handler" in stacks.take(pid, tmp_path, LONG_S)
    header = stacks._Header(pid, start_of(pid), FREE, 0)
    os.close(stacks._create(tmp_path / "stacks", header))
    assert "no longer handles" in stacks.take(pid, tmp_path, LONG_S)
    header = stacks._Header(pid, start_of(pid) - 1, FREE, 0)
    os.close(stacks._create(tmp_path / "stacks", header))
    assert "has no handler" in stacks.take(pid, tmp_path, LONG_S), "the pid was used again"
    assert status_of(pid)["State"][0] in "RSD", "it lives"


def test_one_that_cannot_answer(start: Start, tmp_path: Path) -> None:
    pid = start("install()\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(35, 64))" + SLEEPS)
    assert "did not answer within 0.05 s" in stacks.take(pid, tmp_path, 0.05)


def test_after_uninstall_nobody_finds_it_and_a_late_signal_is_harmless(start: Start, tmp_path: Path) -> None:
    pid = start(f"install(); stacks.uninstall(run_dir); os.kill(os.getpid(), {FREE})" + SLEEPS)
    assert "has no handler" in stacks.take(pid, tmp_path, LONG_S)


def test_a_second_install_moves(start: Start, tmp_path: Path) -> None:
    second = tmp_path / "second"
    files = "len(os.listdir('/proc/self/fd'))"
    pid = start(f"install(); n = {files}; assert stacks.install(run_dir / 'second') and n == {files}" + SLEEPS)
    assert "Main thread" in stacks.take(pid, second, LONG_S)
    assert f'"signal": {FREE}' in (second / "stacks" / f"{pid}.txt").read_text()


@pytest.mark.parametrize("taken", ["signal.SIG_IGN", "lambda *_: None"])
def test_a_signal_in_use_is_left_to_its_owner(start: Start, tmp_path: Path, taken: str) -> None:
    pid = start(f"signal.signal({FREE}, {taken}); install(); os.kill(os.getpid(), {FREE})" + SLEEPS)
    assert f'"signal": {FREE + 1}' in (tmp_path / "stacks" / f"{pid}.txt").read_text()
    assert "Main thread" in stacks.take(pid, tmp_path, LONG_S)


def test_a_signal_that_c_code_uses_is_left_to_its_owner(start: Start, tmp_path: Path) -> None:
    """Python does not know of such a handler."""
    behind_its_back = f"ctypes.CDLL(None).signal({FREE}, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)); "
    pid = start(behind_its_back + f"install(); os.kill(os.getpid(), {FREE})" + SLEEPS)
    assert f'"signal": {FREE + 1}' in (tmp_path / "stacks" / f"{pid}.txt").read_text()


def test_no_signal_is_free(start: Start) -> None:
    first, last = (int(signal.SIGRTMIN) + n for n in (stacks.FIRST_OFFSET, stacks.LAST_OFFSET))
    take_them_all = f"for n in range({first}, {last} + 1): signal.signal(n, signal.SIG_IGN)\n"
    start(take_them_all + "assert not stacks.install(run_dir)" + SLEEPS)


def test_a_place_that_cannot_be_written_is_no_error(start: Start) -> None:
    start("assert not stacks.install(Path('/proc/nothing'))" + SLEEPS)


def test_files_of_killed_processes_go(start: Start, tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    gone = tmp_path / "stacks" / "99999999.txt"
    gone.write_text("{}")
    pid = start("install()" + SLEEPS)
    assert [path.name for path in (tmp_path / "stacks").iterdir()] == [f"{pid}.txt"]


def test_it_is_bounded_and_the_main_thread_comes_first(start: Start, tmp_path: Path) -> None:
    crowd = "def wait(n):\n    wait(n - 1) if n else time.sleep(1000)\n"
    crowd += "for _ in range(40): threading.Thread(target=wait, args=(30,), daemon=True).start()\n"
    pid = start("install()\n" + crowd + "def train():\n    ready(); time.sleep(1000)\ntrain()")
    text = stacks.take(pid, tmp_path, LONG_S)
    assert len(text) == stacks.TEXT_MAX
    assert text.splitlines()[1].startswith("Main thread") and "in train" in "".join(text.splitlines()[2:5])


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b'"x"', b"\xff\xfe", b'{"pid": {}, "a": 1}'])
def test_a_damaged_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / f"{os.getpid()}.txt").write_bytes(content)
    assert "has no handler" in stacks.take(os.getpid(), tmp_path, 1.0)


def test_a_file_that_names_another_process_is_no_reason_to_signal_that(start: Start, tmp_path: Path) -> None:
    pid, other = start(SLEEPS), start("install()" + SLEEPS)
    header = stacks._Header(other, start_of(pid), FREE, 0)
    os.close(stacks._create(tmp_path / "stacks", header))
    (tmp_path / "stacks" / f"{other}.txt").rename(tmp_path / "stacks" / f"{pid}.txt")
    assert "has no handler" in stacks.take(pid, tmp_path, LONG_S)


@pytest.mark.parametrize("pid", [0, -1, 2**40])
def test_a_pid_that_is_none(tmp_path: Path, pid: int) -> None:
    assert "no such process" in stacks.take(pid, tmp_path, 1.0)


def test_a_process_takes_its_own(start: Start, tmp_path: Path) -> None:
    ask = "(run_dir / 'own').write_text(stacks.take(os.getpid(), run_dir, 30.0))"
    start(f"install()\ndef train():\n    {ask}\ntrain()" + SLEEPS)
    assert "in train" in (tmp_path / "own").read_text()
