"""Finds out which ranks share memory, and makes the shared memory for the barrier before each update.

Host names and paths do not prove that ranks share memory: containers of one host may share ``/dev/shm`` or not, and
hosts may have the same directory on a network disk. So ranks tell each other which kernel they run on and in which
directory of it they keep pages. Among ranks with equal answers, the lowest one makes a file there that begins with a
random secret. The others have to find this file, and all have to see each other's sentinels (``liveness.sentinel``),
because otherwise no rank would learn of a death. A rank that cannot do this counts as a host of its own.

The file is unlinked when all ranks have mapped it, so there is nothing to clean up, and no process of a later launch
can open it. A forked child has the mapping too, but never uses it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TypeVar

from ttp.launch.proc_files import start_of
from ttp.processor.gate.meeting import IDLE, OwnWords, SharedWords, Words, size_of
from ttp.processor.liveness.futex import Mapping
from ttp.processor.liveness.sentinel import Watcher
from ttp.processor.liveness.sentinel_reader import BadSentinelError, SentinelReader, State, look
from ttp.processor.local_state.page_file import SAFE_OPEN, UnsafeError, open_directory, open_file
from ttp.store.encoding import decode, encode

T = TypeVar("T")

log = logging.getLogger("ttp.processor")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SEEN_S = 10.0
"""Seconds to wait for the sentinel of a rank. If a rank cannot have one, the job starts this much later."""
_SECRET_BYTES = 32

Gather = Callable[[bytes], Sequence[bytes]]
"""Collective call: returns the bytes that every rank gives, in the order of the ranks. All ranks call it together."""


@dataclass(frozen=True, slots=True)
class Place:
    """The shared memory in which a rank meets others.

    Args:
        words: memory shared with the other ranks here.
        number: number of this rank among them.
        ranks: all ranks that meet here, in order.
        firsts: the first rank of every such place in the job, in order.
        readers: readers of the other ranks' sentinels, by their number here.
    """

    words: Words
    number: int
    ranks: tuple[int, ...]
    firsts: tuple[int, ...]
    readers: dict[int, SentinelReader]

    async def gone(self, number: int) -> bool:
        """Return whether the process of a rank has ended, or left the job."""
        try:
            return self.readers[number].state() is not State.ALIVE
        except BadSentinelError:
            return False  # an invalid sentinel does not show a death


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the other ranks: its memory, page directory, secret and process. Empty: no memory to share."""

    memory: str
    directory: str
    secret: bytes
    pid: int
    start: int


def find_place(rank: int, page_dir: Path | None, gather: Gather) -> Place:
    """Find the ranks that share memory with this one. All ranks call it at the same point of their programs.

    Args:
        rank: this rank.
        page_dir: the directory of this rank's page and sentinel; None: it has none.
        gather: see ``Gather``; called three times.
    """
    pid = os.getpid()
    mine = _Offer("", "", secrets.token_bytes(_SECRET_BYTES), pid, start_of(pid))
    if page_dir is not None and _tried(rank, lambda: _see(page_dir, rank, mine)) is not None:
        mine = replace(mine, memory=_memory(page_dir), directory=str(page_dir))
    offers = [_Offer(*decode(answer)) for answer in gather(encode(astuple(mine)))]
    together = [r for r, offer in enumerate(offers) if (offer.memory, offer.directory) == (mine.memory, mine.directory)]
    alone = len(together) == 1 or not mine.memory
    with contextlib.ExitStack() as held:
        opened: Mapping | None = None
        if not alone and rank == together[0]:
            opened = _tried(rank, lambda: _make(Path(mine.directory), offers[rank].secret, len(together), held))
        gather(b"1")  # the rank that makes a file has made it now
        if not alone and rank != together[0]:
            opened = _tried(rank, lambda: _open(Path(mine.directory), offers[together[0]].secret, len(together)))
        readers: dict[int, SentinelReader] | None = None
        if opened is not None:
            others = [(number, r) for number, r in enumerate(together) if r != rank]
            readers = _tried(rank, lambda: {number: _see(Path(mine.directory), r, offers[r]) for number, r in others})
        could = [answer == b"1" for answer in gather(b"1" if readers is not None else b"0")]
    places = _places(offers, could)
    ranks = next(place for place in places if rank in place)
    firsts = tuple(place[0] for place in places)
    if len(ranks) == 1 or opened is None or readers is None:
        return Place(OwnWords(), 0, (rank,), firsts, {})
    return Place(SharedWords(opened), ranks.index(rank), ranks, firsts, readers)


def _places(offers: Sequence[_Offer], could: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return all groups of ranks that meet in shared memory, in order; every rank gets the same result.

    A group counts only if every rank of it could map the memory. All other ranks are groups of one.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, offer in enumerate(offers):
        groups.setdefault((offer.memory, offer.directory), []).append(rank)
    places: list[tuple[int, ...]] = []
    for ranks in groups.values():
        whole = len(ranks) > 1 and all(could[r] for r in ranks)
        places += [tuple(ranks)] if whole else [(r,) for r in ranks]
    return sorted(places)


def _memory(page_dir: Path) -> str:
    """Return what names a directory on one running kernel, where a path may name one in each container; empty: none."""
    with contextlib.suppress(OSError):
        found = page_dir.stat()
        return f"{BOOT_ID.read_text().strip()} {found.st_dev} {found.st_ino}"
    return ""


def _tried(rank: int, attempt: Callable[[], T]) -> T | None:
    """Return the result of ``attempt``; None if it fails, which is logged."""
    try:
        return attempt()
    except (OSError, UnsafeError, _NotSharedError) as problem:
        log.info("rank %d does not use shared memory for the barrier before each update: %s", rank, problem)
        return None


class _NotSharedError(Exception):
    """Ranks with equal answers do not share memory after all; the text says why."""


def _name(secret: bytes) -> str:
    return f".meeting_{secret[:8].hex()}"


def _make(directory: Path, secret: bytes, count: int, held: contextlib.ExitStack) -> Mapping:
    """Make and map the file in which ranks meet. ``held`` removes the file."""
    size = size_of(count)
    with open_directory(directory) as opened:
        fd = os.open(_name(secret), os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE_OPEN, 0o600, dir_fd=opened)
        held.callback(_unlink, directory / _name(secret))
        with os.fdopen(fd, "r+b", buffering=0) as file:
            if file.write(secret.ljust(size, b"\0")) != size:  # reserves the memory: touching a hole can be a SIGBUS
                raise OSError("no space left in shared memory for the barrier")
            return _mapped(fd, size)


def _open(directory: Path, secret: bytes, count: int) -> Mapping:
    size = size_of(count)
    with open_file(directory, _name(secret), os.O_RDWR) as fd:
        if os.fstat(fd).st_size != size or os.pread(fd, len(secret), 0) != secret:
            raise _NotSharedError(f"{directory / _name(secret)} is another file")
        return _mapped(fd, size)


def _mapped(fd: int, size: int) -> Mapping:
    """Map the file until the process ends: the thread that closes the gate may ring after the training thread left."""
    mapping = Mapping(fd, size, writable=True)
    mapping.add_one(IDLE, IDLE + 64)  # a test: some sandboxes have futexes without this operation
    return mapping


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _see(directory: Path, rank: int, offer: _Offer) -> SentinelReader:
    """Wait for the sentinel of the process that made an offer, and return its reader."""
    deadline = time.monotonic() + SEEN_S
    while True:
        found = look(directory, rank, Watcher.NEIGHBOUR)
        if isinstance(found, SentinelReader):
            if _is(found, offer):
                return found
            found.close()
        if time.monotonic() > deadline:
            why = found if isinstance(found, str) else "its sentinel is of another process"
            raise _NotSharedError(f"the death of rank {rank} could not be seen: {why}")
        time.sleep(0.005)


def _is(found: SentinelReader, offer: _Offer) -> bool:
    """Return whether the sentinel belongs to the process that made the offer, and that process lives."""
    with contextlib.suppress(BadSentinelError):
        return (found.owner.pid, found.owner.start) == (offer.pid, offer.start) and found.state() is State.ALIVE
    return False
