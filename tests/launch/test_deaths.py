"""The launcher sees the death of each of its child processes once, with its exit status or signal."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttp.launch import worker_watch
from ttp.launch.deaths import DeathWatch, describe_exit, exit_code
from ttp.launch.worker_watch import WorkerWatch

Child = subprocess.Popen[bytes]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
LONG_S = 30.0


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started = [subprocess.Popen(SLEEP) for _ in range(3)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def no_pidfd(_pid: int) -> int:
    raise OSError(errno.ENOSYS, "this kernel has none")


@pytest.fixture(params=[True, False], ids=["pidfd", "polling"])
def with_and_without_pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)


@pytest.mark.usefixtures("with_and_without_pidfd")
def test_sees_each_death_once_and_leaves_the_status(children: list[Child]) -> None:
    watch = DeathWatch(dict(enumerate(children)))
    assert watch.wait(0.0) == {}
    children[1].kill()
    assert watch.wait(LONG_S) == {1: -9}
    assert children[1].returncode is None  # not reaped
    assert children[1].wait() == -9  # and its status is still there
    assert watch.wait(0.0) == {}
    children[2].send_signal(signal.SIGTERM)
    assert watch.wait(LONG_S) == {2: -15}
    watch.close()


@pytest.mark.usefixtures("with_and_without_pidfd")
def test_sees_one_that_was_reaped_before() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    child.wait()
    watch = DeathWatch({7: child})
    assert watch.wait(LONG_S) == {7: 3}


def test_a_stopped_child_is_not_dead(children: list[Child]) -> None:
    watch = DeathWatch(dict(enumerate(children)))
    children[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, children[0].pid, os.WSTOPPED | os.WNOWAIT)
    assert watch.wait(0.05) == {}
    assert exit_code(children[0]) is None
    watch.close()


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_are_given_back(children: list[Child]) -> None:
    before = open_descriptors()
    watch = DeathWatch(dict(enumerate(children)))
    assert open_descriptors() == before + 3
    watch.close()
    assert open_descriptors() == before


def test_descriptions() -> None:
    assert describe_exit(-9) == "killed by signal 9 (SIGKILL)"
    assert describe_exit(1) == "exited with code 1"
    assert describe_exit(-63) == "killed by signal 63"


class Notes:
    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[int, int, str]] = queue.Queue()

    def exited(self, rank: int, pid: int, reason: str, code: int = 0) -> None:
        self.heard.put((rank, pid, reason))


@pytest.fixture
def watch() -> Iterator[WorkerWatch]:
    watching = WorkerWatch()
    yield watching
    watching.close()


def test_watch_tells_of_kills_but_not_of_orderly_exits(watch: WorkerWatch, children: list[Child]) -> None:
    notes = Notes()
    orderly = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (0, 70, 75)]
    for child in orderly:
        child.wait()
    watch.watch(dict(enumerate([*orderly, *children])), notes)
    children[0].kill()
    assert notes.heard.get(timeout=LONG_S) == (3, children[0].pid, "killed by signal 9 (SIGKILL)")
    assert notes.heard.empty()


def test_an_error_about_one_worker_hides_no_other(children: list[Child], caplog: pytest.LogCaptureFixture) -> None:
    def shows_death(rank: int, pid: int) -> bool:
        raise MemoryError("no room to look")

    notes, orderly = Notes(), subprocess.Popen([sys.executable, "-c", ""])
    orderly.wait()
    children[0].kill()
    children[0].wait()
    watching = WorkerWatch(shows_death)
    watching.watch({0: orderly, 1: children[0]}, notes)
    assert notes.heard.get(timeout=LONG_S)[0] == 1
    watching.close()
    assert "cannot report the death of rank 0 (exited with code 0)" in caplog.text


def test_watch_is_silent_about_what_the_launcher_stops(watch: WorkerWatch, children: list[Child]) -> None:
    notes = Notes()
    watch.watch(dict(enumerate(children)), notes)
    watch.expect([children[0].pid])
    children[0].terminate()
    children[0].wait()
    children[1].kill()
    assert notes.heard.get(timeout=LONG_S)[0] == 1
    assert notes.heard.empty()


def test_watch_goes_on_with_the_next_group(watch: WorkerWatch, children: list[Child]) -> None:
    notes = Notes()
    watch.watch({0: children[0]}, notes)
    watch.watch({5: children[1], 6: children[2]}, notes)
    children[2].kill()
    assert notes.heard.get(timeout=LONG_S)[0] == 6


class FailsForRank0(Notes):
    def exited(self, rank: int, pid: int, reason: str, code: int = 0) -> None:
        if not rank:
            raise ValueError("the channel is closed")
        super().exited(rank, pid, reason)


def test_watch_goes_on_after_an_error(
    watch: WorkerWatch, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, wait, failed = FailsForRank0(), DeathWatch.wait, threading.Event()

    def fails_once(self: DeathWatch, timeout_s: float) -> dict[int, int]:
        if not failed.is_set():
            failed.set()
            raise OSError("a system call failed")
        return wait(self, timeout_s)

    monkeypatch.setattr(worker_watch, "AFTER_ERROR_S", 0.0)
    monkeypatch.setattr(DeathWatch, "wait", fails_once)
    assert failed.wait(LONG_S)
    for child in children:
        child.kill()
        child.wait()
    watch.watch(dict(enumerate(children)), notes)
    assert [notes.heard.get(timeout=LONG_S)[0] for _ in range(2)] == [1, 2]
    assert watch.died.is_set()
