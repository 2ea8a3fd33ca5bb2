"""The launcher learns of a worker's death from its sentinel, and of no other process's death."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import Controller
from tests.making import making
from tests.processor.sentinel_owner import Owner, forged, put
from tests.waiting import until
from ttp.config import Config
from ttp.launch.host import Host
from ttp.launch.proc_files import start_of
from ttp.launch.sentinel_watch import SentinelWatch
from ttp.processor.liveness.futex import DIED
from ttp.processor.liveness.sentinel import sentinel_name, word_at
from ttp.processor.liveness.sentinel_reader import REASON
from ttp.processor.local_state.pages import PageWriter

LONG_S = 20.0
Start = Callable[..., Owner]


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Return the page directory of a host without shared memory."""
    path = tmp_path / "run" / "pages"
    path.mkdir(parents=True, mode=0o700)
    return path


@pytest.fixture
def start(pages: Path) -> Iterator[Start]:
    """Return ``start(rank, ...)``, which starts a process with a sentinel, by default in ``run_dir/pages``."""

    def begin(rank: int, directory: Path = pages, look_s: float = 0) -> Owner:
        return Owner(directory, rank, look_s=look_s)

    with making(begin, Owner.end) as start:
        yield start


class Watching:
    def __init__(
        self, tmp_path: Path, *owners: Owner, look_s: float = 4 * LONG_S, neighbours_first_s: float = 0.001
    ) -> None:
        """Start a watch that rarely polls, so that the kernel must have woken it for what it reports."""
        self.told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.watch = SentinelWatch(tmp_path / "run", tmp_path, look_s, neighbours_first_s)
        self.watch.watch({owner.rank: owner.pid for owner in owners}, lambda *words: self.told.put(words))

    def hear(self) -> tuple[int, int]:
        return self.told.get(timeout=LONG_S)


def test_each_worker_is_watched(start: Start, tmp_path: Path) -> None:
    in_memory = tmp_path / f"ttp-{os.getuid()}-0123456789ab"
    in_memory.mkdir(mode=0o700)
    first, second = start(0), start(1, in_memory)
    watching = Watching(tmp_path, first, second)
    second.kill()
    assert watching.hear() == (1, second.pid)
    first.kill()
    assert watching.hear() == (0, first.pid)
    watching.watch.close()
    assert watching.told.empty()


def test_a_neighbour_without_interpreter_lock_keeps_the_news_from_nobody(start: Start, tmp_path: Path) -> None:
    """The kernel wakes one waiter per word, so each watcher has its own word: this neighbour could not report."""
    victim, neighbour = start(1), start(0, look_s=4 * LONG_S)
    until(lambda: neighbour.ask("whom") == "1")
    assert neighbour.ask("hold the interpreter lock") == "holding it"
    watching = Watching(tmp_path, victim)
    victim.kill()
    assert watching.hear() == (1, victim.pid)


def test_neighbours_have_the_first_word(start: Start, tmp_path: Path) -> None:
    """While another worker lives, which sees the same, the launcher waits. It reports the last death of a host."""
    first, second = start(0), start(1)
    watching = Watching(tmp_path, first, second, neighbours_first_s=4 * LONG_S)
    until(lambda: watching.watch.living == {0, 1})
    second.kill()
    until(lambda: watching.watch.living == {0})
    first.kill()
    assert watching.hear() == (0, first.pid)
    assert watching.told.empty()
    watching.watch.close()


def test_a_sentinel_that_comes_later_is_found(start: Start, pages: Path, tmp_path: Path) -> None:
    owner = start(0)
    kept = (pages / sentinel_name(0)).rename(tmp_path / "kept")
    watching = Watching(tmp_path, owner, look_s=0.02)
    kept.rename(pages / sentinel_name(0))
    owner.kill()
    assert watching.hear() == (0, owner.pid)


def test_a_second_one_of_the_same_process_is_found(start: Start, tmp_path: Path) -> None:
    owner = start(0)
    watching = Watching(tmp_path, owner, look_s=0.02)
    assert owner.ask("leave") == "left"
    assert owner.ask("come again") == "placed"
    owner.kill()
    assert watching.hear() == (0, owner.pid)


@pytest.mark.parametrize("of", ["another start", "another pid", "this process"])
def test_what_an_earlier_process_left_is_not_believed(start: Start, pages: Path, tmp_path: Path, of: str) -> None:
    """Not even if the worker has the same pid."""
    owner, other = start(0), start(1)
    began = start_of(owner.pid)
    put(pages, 0, forged(0, owner.pid + (of == "another pid"), began - (of == "another start"), DIED))
    watching = Watching(tmp_path, owner, other, look_s=0.02)
    if of == "this process":
        assert watching.hear() == (0, owner.pid)
    assert watching.watch.shows_death(0, owner.pid) == (of == "this process")
    other.kill()
    assert watching.hear() == (1, other.pid)
    assert watching.told.empty()


def test_a_bad_sentinel_is_one_line_in_the_log(
    start: Start, pages: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ttp.launch")
    owner = start(0)
    put(pages, 0, forged(0, owner.pid, start_of(owner.pid), DIED))
    with (pages / sentinel_name(0)).open("r+b") as file:
        file.seek(word_at(1))
        file.write(b"\1\2\3\4")
    watching = Watching(tmp_path, owner)
    until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and "its word is" in record.getMessage()
    assert watching.told.empty()


# ----------------------------------------------------------------------------------------------------------- the host


@pytest.fixture
def host(controller: Controller, tmp_path: Path) -> Iterator[Host]:
    there = Host(Config(port=controller.port, token="sesame"), tmp_path / "run")
    there.before_workers("127.0.0.1", first_node=False)
    yield there
    there.close(several_nodes=False, code=0)


def test_the_controller_hears_of_the_death_and_then_of_its_kind(
    host: Host, controller: Controller, start: Start
) -> None:
    owner = start(0)
    host.watch({0: owner.process})
    owner.kill()
    until(lambda: len(controller.faults) == 2)
    reasons = [fault["reason"] for fault in controller.faults]
    assert sorted(reasons) == [REASON, "killed by signal 9 (SIGKILL)"]
    assert {fault["pids"][0] for fault in controller.faults} == {owner.pid}


@pytest.mark.parametrize("leaves", [True, False])
def test_an_exit_with_0_is_a_death_unless_the_rank_has_left(
    leaves: bool, host: Host, controller: Controller, start: Start
) -> None:
    """A library that calls exit(0) ends a rank as a kill does, and only the exit code says that it was no kill."""
    owner, killed = start(0), start(1)
    host.watch({0: owner.process, 1: killed.process})
    if leaves:
        assert owner.ask("leave") == "left"
    owner.tell("exit")
    owner.process.wait(LONG_S)
    if not leaves:
        until(lambda: len(controller.faults) == 2)
        assert sorted(fault["reason"] for fault in controller.faults) == ["exited with code 0", REASON]
        pid = owner.process.pid
        assert [host._sentinels.shows_death(0, each) for each in (pid, pid + 1)] == [True, False]
    killed.kill()
    until(lambda: {fault["ranks"][0] for fault in controller.faults} == ({1} if leaves else {0, 1}))


def test_the_last_one_of_a_host_leaves_its_page(host: Host, controller: Controller, start: Start, pages: Path) -> None:
    owner = start(0)
    writer = PageWriter(pages, 0, incarnation=7)
    writer._pid = owner.pid
    writer._write_header()
    writer.write(5, True, [b"its dice"])
    host.watch({0: owner.process})
    owner.kill()
    until(lambda: len(controller.faults) == 2)
    assert sorted((fault["pages"] for fault in controller.faults), key=len) == [[], [[0, 5, "its dice"]]]
    writer.close()


def test_whom_the_launcher_stops_is_not_accused(host: Host, controller: Controller, start: Start) -> None:
    stopped, killed = start(0), start(1)
    host.watch({0: stopped.process, 1: killed.process})
    host.stops.expect({0: stopped.process})
    stopped.end()
    killed.kill()
    until(lambda: len(controller.faults) == 2)
    assert {fault["ranks"][0] for fault in controller.faults} == {1}


def test_a_death_is_seen_while_another_group_is_taken(host: Host, controller: Controller, start: Start) -> None:
    """After a dead rank is replaced, the deaths of survivors and replacements are reported over the same connection."""
    first, other, second = start(0), start(1), start(2)
    host.watch({0: first.process, 1: other.process})
    reporter = host._reporter
    first.kill()
    until(lambda: len(controller.faults) == 2)
    other.kill()
    host.watch({0: second.process, 1: other.process})
    assert host._reporter is reporter
    until(lambda: {fault["pids"][0] for fault in controller.faults} == {first.pid, other.pid})
    second.kill()
    until(lambda: {fault["pids"][0] for fault in controller.faults} == {first.pid, other.pid, second.pid})


def test_threads_end_with_the_host(host: Host, start: Start) -> None:
    before = set(threading.enumerate())
    host.watch({0: start(0).process})
    (thread,) = [t for t in threading.enumerate() if t not in before and t.name == "ttp-sentinel-0"]
    host.close(several_nodes=False, code=0)
    thread.join(LONG_S)
    assert not thread.is_alive()
