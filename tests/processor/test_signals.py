"""SIGTERM reaches ttp even while the main thread hangs in C, and goes back to its owner afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.controller.conftest import Controller
from tests.processor.fake_source import no_thread
from tests.waiting import until
from ttp.processor.liveness import signals
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


async def _use_a_signal() -> None:
    """Take the wake-up descriptor, as clients and servers of asyncio do."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)


async def _send_inside(told: threading.Event) -> None:
    await _use_a_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.to_thread(told.wait, 10)


@pytest.mark.parametrize("when", ["before", "after", "inside"])
def test_a_signal_is_reported_once_although_asyncio_takes_the_wakeup_descriptor(when: str) -> None:
    heard: list[str] = []
    told, mine = threading.Event(), threading.Event()

    def note(text: str) -> None:
        heard.append(text)
        told.set()

    before = signal.signal(signal.SIGTERM, lambda *_: mine.set())
    try:
        if when == "before":
            asyncio.run(_use_a_signal())
        preemption = Preemption(note)
        preemption.install()
        if when == "inside":
            asyncio.run(_send_inside(told))
        else:
            if when == "after":
                asyncio.run(_use_a_signal())
            os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(10) and mine.wait(10)
        preemption.uninstall()
        assert len(heard) == 1 and signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first", ["asyncio", "ttp"])
def test_asyncio_still_has_its_signals_while_and_after_ttp_listens(first: str) -> None:
    """Whoever comes second takes the wake-up descriptor."""

    async def main() -> None:
        loop, preemption, came = asyncio.get_running_loop(), Preemption(print), asyncio.Event()
        if first == "ttp":
            preemption.install()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        if first == "asyncio":
            preemption.install()
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
            await asyncio.wait_for(came.wait(), 10)
            came.clear()
            preemption.uninstall()

    asyncio.run(main())


def test_a_handler_that_was_installed_later_stays_and_may_call_the_former_one() -> None:
    mine: list[int] = []
    before, preemption = signal.getsignal(signal.SIGTERM), Preemption(print)
    try:
        preemption.install()
        former: Any = signal.getsignal(signal.SIGTERM)

        def handler(signum: int, frame: object) -> None:
            mine.append(signum)
            former(signum, frame)

        signal.signal(signal.SIGTERM, handler)
        preemption.uninstall()
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.raise_signal(signal.SIGTERM)
        assert mine == [signal.SIGTERM]
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


TRAINING = """
import signal, sys, threading, time
from pathlib import Path
import ttp
from tests.processor.fake_source import FakeSource
from ttp import session
from ttp.config import RankEnv
from ttp.core.layout import Layout
from ttp.core.messages import Piece
from ttp.store.digest import HashingFile

class Slow(FakeSource):
    def write_pieces(self, *, order, draft, **_):
        print("saving", flush=True)
        sys.stdin.readline()
        file = HashingFile(draft / "piece")
        file.write(b"state")
        return [Piece("piece", *file.sync_and_close(), "shard", shard, order.rank) for shard in order.shards]

def train():
    env = RankEnv.from_env()
    rank = session.current().start_processor(env, Layout.data_parallel(1), Slow(), Path(sys.argv[1]))
    rank.begin_update()
    rank.end_update()
    if sys.argv[3] == "after":
        signal.signal(signal.SIGTERM, told)
    sys.addaudithook(imports)
    print("training", flush=True)
    while True:
        time.sleep(1)

def imports(event, of):
    if event == "import":
        print("imports", of[0], file=sys.stderr, flush=True)

def told(*_):
    print("told to end", flush=True)
    raise eval(sys.argv[2])

signal.signal(signal.SIGTERM, told)
if sys.argv[3] == "thread":
    threading.Thread(target=ttp.ttp_to_persist(train), daemon=True).start()
    while True:
        time.sleep(0.1)
train() if sys.argv[3] == "bare" else ttp.ttp_to_persist(train)()
"""


@pytest.mark.parametrize("program", ["before", "after", "bare"])
@pytest.mark.parametrize("leaves", ["SystemExit(0)", "KeyboardInterrupt"])
def test_the_job_is_saved_however_the_handler_of_the_program_leaves(leaves: str, program: str, tmp_path: Path) -> None:
    """It is installed before ttp's or after it; or the program does not decorate ``train()``."""
    with _training(tmp_path, leaves, program) as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate("\n", timeout=60)
        assert process.returncode == 75
        assert re.search(r"Cause: rank 0 on \S+ was asked to end by SIGTERM", said)
        late = [line for line in said.splitlines() if line.startswith("imports ")]
        assert not late, "a rescue needs no file of a library: the disk may hang, or have gone"


@pytest.mark.parametrize("program", ["before", "thread"])
def test_a_second_signal_does_not_end_a_rank_that_saves(program: str, tmp_path: Path) -> None:
    """A scheduler signals the ranks, and so does their launcher; the handler of the program raises each time.

    A program that ends while another thread trains was taken for one that had trained to its end.
    """
    with _training(tmp_path, "SystemExit(143)", program) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"told to end\n", "saving\n"}
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.communicate("\n", timeout=60)
        assert process.returncode == 75


@contextlib.contextmanager
def _training(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a rank that trains; its save waits until a line is written to it."""
    controller = Controller(directory)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TTP_PORT": str(controller.port),
        "TTP_RUN_DIR": str(directory / "run"), "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, str(directory), *arguments]
    try:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "training\n"
            yield process
    finally:
        controller.close()


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


def test_who_leaves_without_a_signal_does_not_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C in that time would take the goodbye from the rank."""
    monkeypatch.setattr(signals, "NOTED_S", 3600)
    preemption = Preemption(lambda _: None)
    preemption.install()
    try:
        assert not preemption.came()
    finally:
        preemption.uninstall()


def test_without_room_for_another_thread_the_next_signal_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    preemption = Preemption(said.append, lambda _: False)
    preemption.install()
    try:
        with monkeypatch.context() as crowded:
            crowded.setattr(threading.Thread, "start", no_thread)
            signal.raise_signal(signal.SIGTERM)
            until(lambda: len(said) == 1)
            signal.raise_signal(signal.SIGTERM)
            until(lambda: len(said) == 2)
    finally:
        preemption.uninstall()


@pytest.mark.parametrize("handles", [True, False])
def test_a_handler_that_was_installed_later_decides_what_becomes_of_the_process(
    handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has had the signal, and may write a checkpoint of its own. No controller can order a save."""
    ended = Mock()
    monkeypatch.setattr(signals, "set_default", lambda _: None)
    monkeypatch.setattr(os, "kill", ended)
    preemption = Preemption(lambda _: None)
    preemption._installed, preemption._previous = True, signal.SIG_DFL
    monkeypatch.setattr(preemption, "_handles", lambda: handles)
    preemption._end_if(lambda _: True)
    assert ended.called is handles
