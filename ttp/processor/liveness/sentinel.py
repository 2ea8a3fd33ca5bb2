"""A sentinel: a small file in shared memory that shows, within microseconds, that a rank's process has died.

Each rank keeps one, ``alive_<rank>`` in the host's page directory::

    0      magic, number of words, rank, pid, start of the process, incarnation, nonce, digest of all these
    512    the words, 64 bytes apart: id of the owner's thread; "owner died"; 0 when it left in good order

The words are held by a thread of the rank that does nothing else; see ``futex`` for what the kernel does when that
thread ends. The kernel wakes one waiter per word. Each kind of watcher has a word of its own, so that a neighbour that
waits for its interpreter lock does not delay the launcher. Only the owner ever writes.

The file becomes visible when it is complete, and then only its words change. Files are not removed one by one: they are
removed with their directory (``ttp.processor.local_state.page_dir``).

Children: a forked child has no such thread and a pid of its own, so it neither prolongs the owner's life nor ends it. A
process that replaces itself (``exec``) is dead as a rank.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import struct
import threading
from pathlib import Path

import xxhash

from ttp.launch.proc_files import start_of
from ttp.processor.liveness.futex import WAITERS, Mapping, RobustList
from ttp.processor.local_state.page_file import SAFE_OPEN, open_directory

log = logging.getLogger("ttp.processor")

MAGIC = b"TTPLIFE\x01"
WORDS = 4
FILE_BYTES = 4096
NONCE_BYTES = 64
HEADER = struct.Struct(f"<8sIIQQQ{NONCE_BYTES}s")  # magic, number of words, rank, pid, start, incarnation, nonce
DIGEST = struct.Struct("<Q")
PREFIX = "alive_"
_LEAVE_PATIENCE_S = 1.0


class Watcher(enum.IntEnum):
    """The kinds of watchers of a sentinel; each kind has a word of its own."""

    NEIGHBOUR = 0
    LAUNCHER = 1


def sentinel_name(rank: int) -> str:
    """Return the file name of a rank's sentinel."""
    return f"{PREFIX}{rank}"


def word_at(number: int) -> int:
    """Return the offset of a word."""
    return 512 + number * 64


class Sentinel:
    """Shows that this process lives, until ``close``. Does not block and never raises.

    Args:
        page_dir: the host's page directory, held by this process.
        rank: rank of this process.
        nonce: random id of this process, as the controller knows it; 64 bytes at most.
        incarnation: incarnation of the job.
    """

    def __init__(self, page_dir: Path, rank: int, nonce: str, incarnation: int) -> None:
        self._pid = os.getpid()
        self._placed, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(page_dir, rank, nonce, incarnation), name="ttp-sentinel", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread can be started: the death of this rank will be seen later
            self._thread.start()

    def wait_placed(self, timeout_s: float) -> bool:
        """Wait until watchers can see the sentinel. Returns whether they can."""
        return self._placed.wait(timeout_s)

    def close(self) -> None:
        """Tell watchers that this process leaves in good order. Does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._over.set()
            if self._thread.is_alive():
                self._thread.join(_LEAVE_PATIENCE_S)

    def _run(self, page_dir: Path, rank: int, nonce: str, incarnation: int) -> None:
        """Hold the sentinel on the thread whose end is the signal: once placed, only ``close`` may wake it."""
        try:
            header = pack_header(rank, self._pid, start_of(self._pid), incarnation, nonce)
            with contextlib.ExitStack() as held:
                with open_directory(page_dir) as directory:
                    _place(directory, rank, header, held)
                self._placed.set()
                self._over.wait()
        except Exception as problem:
            log.debug("no sentinel in %s, the death of this rank will be seen later: %s", page_dir, problem)


def _place(directory: int, rank: int, header: bytes, held: contextlib.ExitStack) -> None:
    """Make the sentinel visible, held by the calling thread. Closing ``held`` releases it in good order."""
    draft = f".{sentinel_name(rank)}.{threading.get_native_id()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=directory)  # left by a process that died here
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE_OPEN, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "r+b", buffering=0) as file:
            if file.write(header.ljust(FILE_BYTES, b"\0")) != FILE_BYTES:  # no hole: touching one can be a SIGBUS
                raise OSError(errno.ENOSPC, "no room for a sentinel")
            mapping = Mapping(fd, FILE_BYTES, writable=True)
        held.callback(mapping.close)
        for number in range(WORDS):
            mapping.set_word(word_at(number), threading.get_native_id() | WAITERS)
        held.enter_context(RobustList([mapping.address + word_at(number) for number in range(WORDS)]))
        held.callback(_leave, mapping)
        os.rename(draft, sentinel_name(rank), src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(draft, dir_fd=directory)
        raise


def _leave(mapping: Mapping) -> None:
    for number in range(WORDS):
        mapping.set_word(word_at(number), 0)
        mapping.wake(word_at(number))


def pack_header(rank: int, pid: int, start: int, incarnation: int, nonce: str) -> bytes:
    """Return the fixed part of a sentinel, with its digest.

    Raises:
        ValueError: the nonce is too long.
    """
    encoded = nonce.encode()
    if len(encoded) > NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes at most, this one {len(encoded)}")
    header = HEADER.pack(MAGIC, WORDS, rank, pid, start, incarnation, encoded)
    return header + DIGEST.pack(xxhash.xxh3_64_intdigest(header))
