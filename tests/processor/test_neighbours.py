"""Ranks of a host watch each other in a ring, while ranks come, leave and die."""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.making import making
from tests.processor.fake_source import FakeSource, no_thread
from tests.processor.sentinel_owner import Owner, forged, put
from tests.waiting import until
from ttp.config import Config, RankEnv
from ttp.processor.liveness import peer_watcher as subject
from ttp.processor.liveness.futex import DIED
from ttp.processor.liveness.host_services import HostServices
from ttp.processor.liveness.peer_watcher import PeerWatcher
from ttp.processor.liveness.sentinel import Watcher, sentinel_name, word_at
from ttp.processor.liveness.sentinel_reader import REASON, SentinelReader, State, look

LONG_S = 20.0
ME, INCARNATION = 1, 7
Start = Callable[..., Owner]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a directory in memory, like that of real sentinels: on a disk the end of a process may be delayed."""
    with tempfile.TemporaryDirectory(prefix="ttp-test-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return ``start(rank, ...)``, which starts a process with a sentinel in ``tmp_path``."""
    with making(partial(Owner, tmp_path), Owner.end) as start:
        yield start


class Watching:
    """A ``PeerWatcher`` of rank 1, in this process, and its reports."""

    def __init__(self, directory: Path, look_s: float = 0.02) -> None:
        self.told: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self.ring = PeerWatcher(directory, ME, INCARNATION, lambda *words: self.told.put(words), look_s)
        self.ring.start()

    def hear(self) -> tuple[int, str, str]:
        return self.told.get(timeout=LONG_S)

    def wait_for(self, rank: int | None) -> None:
        until(lambda: self.ring.watched == rank)

    def end(self) -> None:
        self.ring.close()
        self.ring._thread.join(LONG_S)
        assert not self.ring._thread.is_alive()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    ring = Watching(tmp_path)
    yield ring
    ring.end()
    assert ring.told.empty()  # whatever a test did not ask for must not have been said


def word_of(owner: Owner) -> tuple[int, str, str]:
    return owner.rank, owner.nonce, REASON


def test_one_death_after_the_other_round_the_ring(start: Start, watching: Watching) -> None:
    before, after, last = start(0), start(2), start(3)
    watching.wait_for(2)
    after.kill()
    assert watching.hear() == word_of(after)
    watching.wait_for(3)
    last.kill()
    assert watching.hear() == word_of(last)
    watching.wait_for(0)
    before.kill()
    assert watching.hear() == word_of(before)
    watching.wait_for(None)


def test_woken_not_found_by_chance(start: Start, tmp_path: Path) -> None:
    """The watcher polls rarely, so the kernel must have woken it."""
    owner, ring = start(2), Watching(tmp_path, look_s=4 * LONG_S)
    ring.wait_for(2)
    owner.kill()
    assert ring.hear() == word_of(owner)
    ring.ring.close()


def test_three_die_together_and_one_is_left_to_tell(start: Start) -> None:
    """In a ring 4 watches 0, which watches 1, and so on. All watchers of the dead have died, except 4."""
    owners = {rank: start(rank, look_s=0.05) for rank in (0, 1, 2, 4)}
    for rank in (1, 0, 2):
        owners[rank].kill()
    told = {owners[4].hear() for _ in range(3)}
    assert told == {f"died {rank} {owners[rank].nonce}" for rank in (0, 1, 2)}


def test_who_leaves_is_followed_by_the_next(start: Start, watching: Watching) -> None:
    leaver, after = start(2), start(3)
    watching.wait_for(2)
    assert leaver.ask("leave") == "left"
    leaver.end()
    watching.wait_for(3)
    after.kill()
    assert watching.hear() == word_of(after)


def test_who_comes_later_and_nearer_is_found(start: Start, watching: Watching) -> None:
    start(3)
    watching.wait_for(3)
    late = start(2)
    watching.wait_for(2)
    late.kill()
    assert watching.hear() == word_of(late)
    watching.wait_for(3)
    again = start(2)  # launched again: the same name, another process
    watching.wait_for(2)
    again.kill()
    assert watching.hear() == word_of(again)


def test_who_died_before_anybody_looked_is_told_of(start: Start, tmp_path: Path) -> None:
    owner = start(2)
    owner.end()
    ring = Watching(tmp_path)
    assert ring.hear() == word_of(owner)
    ring.end()


def test_another_incarnation_is_nobodys_neighbour(start: Start, watching: Watching) -> None:
    start(2, incarnation=6).end()
    start(3, incarnation=8).end()
    last = start(4)
    watching.wait_for(4)
    last.kill()
    assert watching.hear() == word_of(last)


def test_nothing_is_said_after_close(start: Start, tmp_path: Path) -> None:
    owner, ring = start(2), Watching(tmp_path, look_s=4 * LONG_S)
    ring.wait_for(2)
    ring.ring.close()
    owner.end()  # wakes the thread, which is to end without a word
    ring.end()
    assert ring.told.empty()


def test_bad_files_are_passed_by_and_noted_once(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ttp.processor")
    (tmp_path / sentinel_name(2)).write_bytes(b"garbage")
    put(tmp_path, 3, forged(3, word=DIED | 1))
    last = start(4)
    ring = Watching(tmp_path)
    ring.wait_for(4)
    put(tmp_path, 2, forged(2, word=DIED | 2))
    until(lambda: len(caplog.records) == 3)
    last.kill()
    assert ring.hear() == word_of(last)
    ring.end()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"rank {rank} is not watched by this one" for rank in (2, 3, 2)
    ]


def test_a_file_that_goes_bad_while_it_is_watched(start: Start, tmp_path: Path, watching: Watching) -> None:
    put(tmp_path, 2, forged(2))
    last = start(3)
    watching.wait_for(2)
    with (tmp_path / sentinel_name(2)).open("r+b") as file:
        file.seek(word_at(0))
        file.write(b"\1\2\3\4")
    watching.wait_for(3)
    last.kill()
    assert watching.hear() == word_of(last)


def test_without_a_directory_there_is_nobody(tmp_path: Path) -> None:
    ring = Watching(tmp_path / "gone")
    assert ring.ring._thread.is_alive()
    ring.end()
    assert ring.ring.watched is None and ring.told.empty()


def test_whatever_fails_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    caplog.set_level(logging.DEBUG, "ttp.processor")
    monkeypatch.setattr(subject, "ranks_in", broken)
    ring = Watching(tmp_path)
    ring.ring._thread.join(LONG_S)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and "a defect" in record.getMessage()


@pytest.mark.parametrize("started", ["ttp-sentinel", "none"])
def test_a_rank_that_cannot_watch_its_neighbours_still_leaves_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    """Otherwise its neighbours would report its death."""
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda t: start(t) if t.name == started else no_thread())
    env = RankEnv(0, 1, 0, "127.0.0.1", "job", 0)
    host = HostServices(Config(port=1, run_dir=str(tmp_path), mirror=True), env, nonce="n", died=lambda *_: None)
    source = FakeSource()
    monkeypatch.setattr(source, "watch_pages", Mock(side_effect=AssertionError("nothing would take the changes")))
    page_dir = host.begin(source, INCARNATION)
    seen = None if started == "none" else until(lambda: shown(page_dir))
    assert host._kept is not None, "what needs no thread is there"
    host.leave()
    if seen is not None:
        assert seen.state() is State.LEFT
        seen.close()
    host.close()


def shown(page_dir: Path) -> SentinelReader | None:
    found = look(page_dir, 0, Watcher.NEIGHBOUR)
    return None if isinstance(found, str) else found
