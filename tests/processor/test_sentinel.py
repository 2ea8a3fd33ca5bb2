"""A sentinel shows a death as a death, an orderly exit as that, and nothing else as either."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.making import making
from tests.processor.sentinel_owner import Owner, forged, put, without_settings
from tests.store.storage import fill, small_disk
from ttp.config import RankEnv
from ttp.launch.proc_files import start_of
from ttp.processor.liveness import futex
from ttp.processor.liveness.futex import DIED, WAITERS, Mapping
from ttp.processor.liveness.sentinel import (
    FILE_BYTES,
    NONCE_BYTES,
    WORDS,
    Sentinel,
    Watcher,
    pack_header,
    sentinel_name,
    word_at,
)
from ttp.processor.liveness.sentinel_reader import BadSentinelError, SentinelReader, State, look, ranks_in
from ttp.processor.local_state.page_dir import PageDirectory

LONG_S = 20.0
Start = Callable[..., Owner]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return ``start(rank, ...)``, which starts a process with a sentinel in ``tmp_path``."""

    def begin(rank: int = 3, directory: Path = tmp_path) -> Owner:
        return Owner(directory, rank)

    with making(begin, Owner.end) as start:
        yield start


def seen(directory: Path, rank: int = 3, watcher: Watcher = Watcher.NEIGHBOUR) -> SentinelReader:
    reader = look(directory, rank, watcher)
    assert isinstance(reader, SentinelReader), reader
    return reader


def test_it_says_whose_it_is(tmp_path: Path, start: Start) -> None:
    owner = start()
    reader = seen(tmp_path)
    assert (reader.owner.rank, reader.owner.pid, reader.owner.incarnation) == (3, owner.pid, 7)
    assert reader.owner.nonce == owner.nonce
    assert reader.owner.start == start_of(owner.pid) != start_of(os.getpid())
    assert reader.wait(0.0) is State.ALIVE
    assert ranks_in(tmp_path) == [3] and [p.name for p in tmp_path.iterdir()] == ["alive_3"]  # no draft is left


@pytest.mark.parametrize("number", range(WORDS))
def test_the_kernel_wakes_who_waits_for_any_word(tmp_path: Path, start: Start, number: int) -> None:
    owner = start()
    fd = os.open(tmp_path / sentinel_name(3), os.O_RDONLY)
    mapping = Mapping(fd, FILE_BYTES, writable=False)
    os.close(fd)
    word = mapping.word(word_at(number))
    assert word > WAITERS
    waiting = threading.Timer(0.1, owner.kill)
    waiting.start()
    assert mapping.wait(word_at(number), word, LONG_S)  # woken; the end of the time would be False
    assert mapping.word(word_at(number)) == DIED
    mapping.close()


def test_everybody_at_one_word_is_woken(tmp_path: Path, start: Start) -> None:
    """The kernel wakes one waiter, which has to wake the others."""
    owner = start()
    states: list[State] = []
    watchers = [threading.Thread(target=lambda: states.append(seen(tmp_path).wait(4 * LONG_S))) for _ in range(4)]
    for watcher in watchers:
        watcher.start()
    owner.kill()
    for watcher in watchers:
        watcher.join(LONG_S)
    assert states == [State.DIED] * 4


def test_leaving_is_not_dying(tmp_path: Path, start: Start) -> None:
    owner = start()
    reader = seen(tmp_path)
    watcher = threading.Thread(target=reader.wait, args=(4 * LONG_S,))
    watcher.start()
    assert owner.ask("leave") == "left"
    watcher.join(LONG_S)
    assert not watcher.is_alive()  # woken
    owner.end()
    assert reader.state() is State.LEFT


@pytest.mark.parametrize("end", ["exec", "raise"])
def test_a_process_that_ends_without_a_word_has_died(tmp_path: Path, start: Start, end: str) -> None:
    owner = start()
    reader = seen(tmp_path)
    owner.tell(end)
    assert reader.wait(LONG_S) is State.DIED


def test_children_neither_prolong_nor_end_it(tmp_path: Path, start: Start) -> None:
    owner = start()
    reader = seen(tmp_path)
    first, second = int(owner.ask("fork")), int(owner.ask("fork"))
    owner.ask("fork and close")
    assert owner.ask("spawn") == "spawned"
    os.kill(first, signal.SIGKILL)
    assert reader.wait(0.1) is State.ALIVE
    try:
        owner.kill()
        assert reader.wait(LONG_S) is State.DIED
        os.kill(second, 0)  # lives all the while
    finally:
        os.kill(second, signal.SIGKILL)


def test_a_thread_that_ends_with_its_list_put_back_leaves_no_trace(tmp_path: Path) -> None:
    """Afterwards the process can place another sentinel under the same name."""
    for nonce in ("one", "two"):
        sentinel = Sentinel(tmp_path, 3, nonce, 7)
        assert sentinel.wait_placed(LONG_S)
        reader = seen(tmp_path)
        assert reader.owner.nonce == nonce and reader.state() is State.ALIVE
        sentinel.close()
        sentinel.close()
        assert reader.state() is State.LEFT


# --------------------------------------------------------------------------------------------------- no shared memory


def fails_quietly(directory: Path, caplog: pytest.LogCaptureFixture, nonce: str = "n") -> str:
    with caplog.at_level(logging.DEBUG, "ttp.processor"):
        sentinel = Sentinel(directory, 3, nonce, 7)
        sentinel.close()
    assert not sentinel.wait_placed(0)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    return record.getMessage()


def test_without_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "No such file" in fails_quietly(tmp_path / "gone", caplog)


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "others may write" in fails_quietly(tmp_path / "open", caplog)
    assert list((tmp_path / "open").iterdir()) == []


def test_a_nonce_that_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "64 bytes at most" in fails_quietly(tmp_path, caplog, "n" * (NONCE_BYTES + 1))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_platform_without_futexes_or_a_kernel_that_refuses_robust_lists(
    refuses: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = OSError(errno.ENOSYS, "robust futexes are not known to ttp on plan9")
    asked = (
        {"return_value": futex._numbers()._replace(set_robust_list=100_000)} if refuses else {"side_effect": unknown}
    )
    monkeypatch.setattr(futex, "_numbers", Mock(**asked))
    assert (os.strerror(errno.ENOSYS) if refuses else "plan9") in fails_quietly(tmp_path, caplog)
    assert list(tmp_path.iterdir()) == []


NO_ROOM = """
import resource, sys
from pathlib import Path
from ttp.processor.liveness.sentinel import Sentinel

if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sentinel = Sentinel(Path(sys.argv[1]), 3, "n", 7)
sentinel._thread.join(20)
print(sentinel.wait_placed(0))
"""


def try_without_room(directory: Path, how: str) -> None:
    command = [sys.executable, "-c", NO_ROOM, str(directory), how]
    done = subprocess.run(command, capture_output=True, text=True, env=without_settings(), timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")  # no SIGBUS above all
    assert ranks_in(directory) == [] and not list(directory.glob(".alive*"))


def test_no_room_for_a_page(tmp_path: Path) -> None:
    try_without_room(tmp_path, "limit")


def test_full_shared_memory() -> None:
    with small_disk("16k") as memory:
        fill(memory)
        memory.chmod(0o700)
        try_without_room(memory, "full")


ENV = RankEnv(rank=0, world_size=2, local_rank=0, master_addr="host", run_id="run", launch=0)


def test_nothing_is_left_when_all_are_killed(tmp_path: Path, start: Start) -> None:
    pages = PageDirectory(tmp_path / "run", ENV, 1, tmp_path)
    owners = [start(rank, pages.path) for rank in (0, 1)]
    for owner in owners:
        owner.end()
    pages.close()  # as the kernel does it for a process that dies
    assert not pages.path.exists()


# ---------------------------------------------------------------------------------------------------------- bad files


def changed(at: int, to: bytes) -> bytes:
    content = bytearray(forged(3))
    content[at : at + len(to)] = to
    return bytes(content)


def refused(directory: Path) -> str:
    reason = look(directory, 3, Watcher.NEIGHBOUR)
    assert isinstance(reason, str)
    return reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (forged(3)[:-1], "4095 bytes"),
        (forged(3) + b"\0", "4097 bytes"),
        (bytes(FILE_BYTES), "not of this version"),
        (changed(7, b"\x02"), "not of this version"),
        (changed(16, b"\x04"), "digest is wrong"),
        (pack_header(4, 1234, 5, 7, "n").ljust(FILE_BYTES, b"\0"), "belongs to rank 4"),
    ],
)
def test_a_file_that_is_no_sentinel(tmp_path: Path, content: bytes, reason: str) -> None:
    put(tmp_path, 3, content)
    assert reason in refused(tmp_path)


def test_a_file_that_somebody_else_may_have_put_there(tmp_path: Path) -> None:
    """See test_pages.py: pages are opened in the same way."""
    put(tmp_path, 3, forged(3), mode=0o666)
    assert "others may write" in refused(tmp_path)


@pytest.mark.parametrize("word", [1, WAITERS, DIED | 1234, DIED & ~WAITERS, 0xFFFFFFFF])
def test_a_word_that_makes_no_sense_is_neither_life_nor_death(tmp_path: Path, word: int) -> None:
    put(tmp_path, 3, forged(3, word=word))
    reader = seen(tmp_path)
    with pytest.raises(BadSentinelError, match="its word is"):
        reader.wait(LONG_S)
    reader.close()


@given(st.integers(0, 127), st.integers(1, 255))
def test_no_flipped_byte_of_the_header_is_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    directory = tmp_path_factory.mktemp("flipped")
    put(directory, 3, changed(at % 112, bytes([forged(3)[at % 112] ^ flip])))
    assert isinstance(look(directory, 3, Watcher.NEIGHBOUR), str)


def test_names_that_are_no_ranks(tmp_path: Path) -> None:
    for name in ("alive_2", "alive_10", "alive_", "alive_x", "alive_-1", "alive_1.5", ".alive_4.99", "rank_1.page"):
        (tmp_path / name).touch()
    assert ranks_in(tmp_path) == [2, 10]
    assert ranks_in(tmp_path / "gone") == []


def test_a_process_that_is_gone_started_never() -> None:
    assert start_of(2**22 + 1) == 0


def test_waiting_again_and_again_takes_no_memory() -> None:
    mapping = Mapping(-1, FILE_BYTES, writable=True)
    tracemalloc.start()
    try:
        for count in range(2000):
            if count == 100:
                before, _ = tracemalloc.get_traced_memory()
            mapping.wait(64, 1, 0.9 + count * 1e-6)  # the word is 0
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
        mapping.close()


def test_one_is_added_to_the_word_that_is_meant() -> None:
    mapping = Mapping(-1, FILE_BYTES, writable=True)
    for at, idle in ((128, 64), (192, 128), (128, 64), (64, 128)):
        mapping.add_one(at, idle)
    assert [mapping.word(at) for at in (64, 128, 192)] == [1, 2, 1]
    mapping.set_word(64, 0xFFFFFFFF)
    mapping.add_one(64, 128)
    assert mapping.word(64) == 0
    mapping.close()
