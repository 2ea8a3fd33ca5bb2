"""A released rank exits, whatever hangs in it: the storage of its log, or a driver that holds the interpreter lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.disks.bad_disk import BadDisk, Rule, why_not
from tests.ports import free_port
from tests.processor.fake_source import no_thread
from ttp.processor.link.stream import Stream
from ttp.store.history import leave_word, read_word

LEAVES = """
import ctypes
import logging
import multiprocessing
import signal
import sys
import threading
import time
from tests.processor.fake_source import FakeSource
from ttp.config import Config, RankEnv
from ttp.core.layout import Layout
from ttp.core.rank import actions as act
from ttp.processor import exiting
from ttp.processor.processor import Processor

exiting.EXIT_S = 0.2
if "handler" in sys.argv:
    signal.signal(signal.SIGALRM, print)
logging.basicConfig()
if "driver" in sys.argv:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
env = RankEnv(0, 1, 0, "127.0.0.1", "none", 0)
processor = Processor(Config(port=1), env, Layout.data_parallel(1), FakeSource(), "/nowhere")
if "driver" in sys.argv:
    processor.host.leave = lambda: libc.pthread_mutex_lock(mutex)  # keeps the lock, as a call into CUDA may
logging.warning("the last line that it takes")
def refuse(*_):
    raise RuntimeError("can't start new thread")
if "threads" in sys.argv:
    threading.Thread.start = refuse
if "helper" in sys.argv:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(90,), daemon=True).start()
if "pages" in sys.argv:
    processor.host.close = refuse
processor._exit(act.Exit(75, "saved"))
"""


def test_a_log_on_storage_that_hangs_keeps_no_rank(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with BadDisk(tmp_path / "mount", tmp_path / "below") as disk:
        with (disk.mountpoint / "log").open("w") as log:
            disk.rules(Rule(("WRITE",), "log", hang="mount"))
            done = subprocess.run([sys.executable, "-c", LEAVES], stderr=log, timeout=60, check=False)
            disk.thaw()
        assert done.returncode == 75


@pytest.mark.parametrize("handler", ["handler", "none"])
def test_a_driver_that_keeps_the_interpreter_lock_keeps_no_rank(handler: str) -> None:
    """Even if the program has a handler of its own for the signal that ends such a process."""
    command = [sys.executable, "-c", LEAVES, "driver", handler]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM, done.stderr


@pytest.mark.parametrize("what", ["threads", "pages"])
def test_what_cannot_be_done_any_more_keeps_no_rank(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES, what], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 75, done.stderr


def test_its_daemons_end_with_it() -> None:
    """As at the end of every Python program. One that lives keeps the pipe open."""
    done = subprocess.run([sys.executable, "-c", LEAVES, "helper"], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 75, done.stderr


@pytest.mark.parametrize(
    ("port", "command"),
    [
        ("nonsense", ["-c", "import ttp; ttp.ttp_to_persist(print)()"]),
        ("1", ["-c", "import ttp; ttp.ttp_to_persist(ttp.step_done)()"]),
        ("nonsense", ["-m", "ttp.cli.main", "run", "--mindspore", "--nproc-per-node", "1", __file__]),
    ],
)
def test_what_is_wrong_decides_the_exit_code_though_nobody_reads_it(port: str, command: list[str]) -> None:
    """Another code would start the job again and again."""
    reads, writes = os.pipe()
    os.close(reads)
    env = {**os.environ, "TTP_PORT": port}
    done = subprocess.run([sys.executable, *command], env=env, stderr=writes, timeout=120, check=False)
    os.close(writes)
    assert done.returncode == 64


def test_a_stream_that_could_not_be_started_does_not_stop_a_rank_from_leaving() -> None:
    stream = Stream("127.0.0.1", free_port(), "", on_up=print, on_order=print, on_down=print)
    stream.finish(timeout_s=0.1)
    stream.finish(timeout_s=0.1)


def test_a_word_that_no_thread_can_write_changes_no_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    leave_word(tmp_path, "job", "no model")
    assert read_word(tmp_path) is None
