"""SIGTERM reaches ttp even while the main thread hangs in C, and goes back to its owner afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from ttp.processor.liveness.signals import Preemption

HANGING = """
import ctypes, signal, sys, os
from ttp.processor.liveness.signals import Preemption
def report(text):
    print(text, flush=True)
    os._exit(75)
Preemption(report).install()
print("ready", flush=True)
ctypes.CDLL(None).sleep(1000)   # the interpreter lock is free, Python handlers cannot run
while True:
    ctypes.CDLL(None).sleep(1000)
"""


def test_a_main_thread_that_hangs_in_c_does_not_keep_the_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM" in process.stdout.readline()
        assert process.wait(20) == 75


def test_the_users_handler_still_runs_and_comes_back() -> None:
    heard: list[str] = []
    mine: list[int] = []
    told = threading.Event()

    def note(text: str) -> None:
        heard.append(text)
        told.set()

    def handler(signum: int, frame: object) -> None:
        mine.append(signum)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        preemption = Preemption(note)
        preemption.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(10)
        assert mine == [signal.SIGTERM] and len(heard) == 1
        preemption.uninstall()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


ALONE = """
import signal, sys, time
from ttp.processor.liveness.signals import Preemption
if sys.argv[1] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
Preemption(lambda text: print("reported", flush=True), lambda timeout_s: True).install()
signal.raise_signal(signal.SIGTERM)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("handler", "code"), [("none", -signal.SIGTERM), ("handler", 3)])
def test_without_a_controller_the_signal_ends_the_process_as_without_ttp(handler: str, code: int) -> None:
    command = [sys.executable, "-c", ALONE, handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr


ARRIVES = """
import signal, sys
from ttp.processor.liveness.signals import Preemption
preemption, set_wakeup_fd = Preemption(print), signal.set_wakeup_fd
def arrives_before(fd, **how):
    signal.raise_signal(signal.SIGTERM)
    return set_wakeup_fd(fd, **how)
def arrives_after(fd, **how):
    before = set_wakeup_fd(fd, **how)
    signal.raise_signal(signal.SIGTERM)
    return before
if sys.argv[1] == "install":
    signal.set_wakeup_fd = arrives_before
    preemption.install()
else:
    preemption.install()
    signal.set_wakeup_fd = arrives_after
    preemption.uninstall()
"""


@pytest.mark.parametrize("during", ["install", "uninstall"])
def test_a_signal_that_arrives_while_the_handler_changes_is_not_swallowed(during: str) -> None:
    command = [sys.executable, "-c", ARRIVES, during]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGTERM


FORKING = """
import os, signal, time
from ttp.processor.liveness.signals import Preemption
Preemption(lambda text: print("the rank was asked to end", flush=True)).install()
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"1")
    while True:
        time.sleep(1)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
for _ in range(1000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.01)
print(os.waitstatus_to_exitcode(status) if pid else "the child lives", flush=True)
os.kill(child, signal.SIGKILL) if not pid else None
"""


def test_sigterm_for_a_forked_child_ends_the_child_and_is_not_reported() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{-signal.SIGTERM}\n"


def test_off_the_main_thread_nothing_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Preemption(print).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "outside the main thread" in caplog.text
