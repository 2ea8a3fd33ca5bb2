"""Watches the sentinel of another process, and checks everything that the file says; see ``sentinel``."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ttp.processor.liveness.futex import DIED, TID_MASK, WAITERS, Mapping
from ttp.processor.liveness.sentinel import (
    DIGEST,
    FILE_BYTES,
    HEADER,
    MAGIC,
    PREFIX,
    WORDS,
    Watcher,
    sentinel_name,
    word_at,
)
from ttp.processor.local_state.page_file import UnsafeError, open_file

REASON = "its process died (robust futex)"
"""Reason that a watcher reports for a death; only the parent knows how the process died."""


class State(enum.Enum):
    """What a sentinel shows of its owner."""

    ALIVE = "alive"
    DIED = "died"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process to which a sentinel belongs.

    Args:
        rank: its rank.
        pid: its process id.
        start: its start; see ``ttp.launch.proc_files.start_of``.
        incarnation: incarnation of the job.
        nonce: random id of the process, as the controller knows it.
    """

    rank: int
    pid: int
    start: int
    incarnation: int
    nonce: str


class SentinelReader:
    """A read-only view of one sentinel. Made by ``look``; must be closed."""

    def __init__(self, mapping: Mapping, owner: Owner, watcher: Watcher) -> None:
        self.owner = owner
        self._mapping, self._at = mapping, word_at(watcher)

    def state(self) -> State:
        """Return the state of the owner.

        Raises:
            BadSentinelError: the word makes no sense.
        """
        return _state(self._mapping.word(self._at))

    def wait(self, timeout_s: float) -> State:
        """Wait until the owner has died or left, for at most ``timeout_s`` seconds, and return its state.

        Raises:
            BadSentinelError: the word makes no sense.
            OSError: futexes are not available here.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            word = self._mapping.word(self._at)
            state, left_s = _state(word), deadline_s - time.monotonic()
            if state is not State.ALIVE:
                self._mapping.wake(self._at)  # the kernel woke only one of those that wait for this word
                return state
            if left_s <= 0:
                return state
            self._mapping.wait(self._at, word, left_s)

    def close(self) -> None:
        """Unmap the file."""
        self._mapping.close()


class BadSentinelError(Exception):
    """A file is no valid sentinel; the text says why."""


def look(page_dir: Path, rank: int, watcher: Watcher) -> SentinelReader | str:
    """Open the sentinel of ``rank``. Returns a text instead if there is no valid one. Never raises."""
    name = sentinel_name(rank)
    try:
        with open_file(page_dir, name) as fd:
            return SentinelReader(*_read(fd, rank), watcher)
    except FileNotFoundError:
        return f"there is no sentinel {page_dir / name}"
    except (OSError, UnsafeError, BadSentinelError) as problem:
        return f"sentinel {page_dir / name} cannot be used: {problem}"


def ranks_in(page_dir: Path) -> list[int]:
    """Return the ranks with a sentinel in this directory, in order; none if it cannot be read."""
    try:
        names = os.listdir(page_dir)  # noqa: PTH208 - once a second: no object per page
    except OSError:
        return []
    numbers = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted({int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 10})


def _read(fd: int, rank: int) -> tuple[Mapping, Owner]:
    size = os.fstat(fd).st_size
    if size != FILE_BYTES:
        raise BadSentinelError(f"it has {size} bytes instead of {FILE_BYTES}")
    header = os.pread(fd, HEADER.size + DIGEST.size, 0)
    owner = _parse(header)
    if owner.rank != rank:
        raise BadSentinelError(f"it says that it belongs to rank {owner.rank}")
    return Mapping(fd, FILE_BYTES, writable=False), owner


def _parse(header: bytes) -> Owner:
    magic, words, rank, pid, start, incarnation, nonce = HEADER.unpack_from(header)
    if magic != MAGIC or words != WORDS:
        raise BadSentinelError(f"it is not of this version of ttp (it begins with {magic!r})")
    if DIGEST.unpack_from(header, HEADER.size) != (xxhash.xxh3_64_intdigest(header[: HEADER.size]),):
        raise BadSentinelError("its digest is wrong")
    try:
        return Owner(rank, pid, start, incarnation, nonce.rstrip(b"\0").decode())
    except UnicodeDecodeError:
        raise BadSentinelError("its nonce is no text") from None


def _state(word: int) -> State:
    if word == 0:
        return State.LEFT
    if word == DIED:
        return State.DIED
    if word & WAITERS and word & TID_MASK and not word & ~(WAITERS | TID_MASK):
        return State.ALIVE
    raise BadSentinelError(f"its word is {word:#010x}")
