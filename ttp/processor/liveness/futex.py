"""Robust futexes by direct system calls: when the thread that holds one ends, the kernel wakes its waiters.

A thread gives the kernel a list of words that hold its id. When the thread ends, in whatever way, the kernel writes
"owner died" into them and wakes one waiter each, *before* it frees the memory and closes the sockets of the process. So
the death of a killed process is known at once, whatever its size. See ``set_robust_list(2)`` and ``futex(2)``.

Robust mutexes of the C library are made of the same words, but are not used here, because a watcher would have to write
(lock, mark, unlock). It would then trust bytes of another process (the library aborts on some), get in the way of other
watchers, and be taken for the dead owner if it died itself. A word, however, can be waited for through a read-only
mapping, so nothing that a watcher does or suffers can hurt another process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from types import TracebackType
from typing import Any, NamedTuple

WAITERS = 0x80000000
"""Bit that says that a thread may wait. Owners here always set it, so that watchers need not."""
OWNER_DIED = 0x40000000
TID_MASK = 0x3FFFFFFF
DIED = WAITERS | OWNER_DIED
"""The value that the kernel leaves in a word whose owner has ended."""

_WAIT, _WAKE, _WAKE_OP, _EVERYBODY = 0, 1, 5, 0x7FFFFFFF
_ADD_ONE = 1 << 28 | 1 << 12
"""Operation for ``_WAKE_OP``: add 1 to the second word."""
_PAGE = 4096
_NODE_BYTES = 64
_FIRST_NODE = 64
_HEAD_BYTES = 24  # next node, distance from a node to its word, the operation under way


class _Numbers(NamedTuple):
    futex: int
    set_robust_list: int
    get_robust_list: int


_NUMBERS = {"x86_64": _Numbers(202, 273, 274), "aarch64": _Numbers(98, 99, 100)}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=16)
def _timespec(seconds: float) -> Any:
    """Return a pointer to a time to sleep, for the kernel."""
    return ctypes.pointer(_Timespec(int(seconds), int(seconds % 1 * 1e9)))


class Mapping:
    """A mapped file in shared memory. Addresses stay valid until ``close``.

    Not ``mmap.mmap``: Python unmaps those while it shuts down, before the process has ended, and it has no address for
    a read-only one.

    Args:
        fd: descriptor of the file; -1 for private memory of this process. May be closed afterwards.
        size: bytes; the file must have that many, or touching the missing ones ends the process.
        writable: if False, any store through the mapping ends the process.

    Raises:
        OSError: the file cannot be mapped, or this platform is not known.
    """

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc().mmap(None, size, protection, kind, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise _problem("mmap")
        self.address, self._size = int(address), size
        self._words: Any = (ctypes.c_uint32 * (size // 4)).from_address(self.address)
        self._calls: dict[tuple[int, ...], Callable[..., int]] = {}

    def word(self, offset: int) -> int:
        """Return the 32-bit word at this offset."""
        value: int = self._words[offset >> 2]
        return value

    def reached(self, offsets: Sequence[int], number: int) -> bool:
        """Return whether the words at ``offsets``, which count modulo 2**32, have all come to ``number``."""
        words = self._words
        for offset in offsets:  # noqa: SIM110 - a generator takes longer, and every update of every rank comes by
            if (words[offset >> 2] - number) & 0xFFFFFFFF >= 1 << 31:
                return False
        return True

    def set_word(self, offset: int, value: int) -> None:
        """Store a 32-bit word with one access."""
        self._words[offset >> 2] = value

    def wait(self, offset: int, expected: int, timeout_s: float) -> bool:
        """Sleep while the word is ``expected``, without the interpreter lock. May return early without a reason.

        Returns:
            False if the time is over.

        Raises:
            OSError: futexes are not available here.
        """
        call = self._calls.get((_WAIT, offset)) or self._prepare(_libc(), _WAIT, offset)
        if call(expected, _timespec(timeout_s)) == -1:
            failed = ctypes.get_errno()
            if failed not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise _problem("futex wait")
            return failed != errno.ETIMEDOUT
        return True

    def wake(self, offset: int) -> None:
        """Wake all threads that wait for the word, in any process."""
        call = self._calls.get((_WAKE, offset)) or self._prepare(_prompt(), _WAKE, offset)
        call(_EVERYBODY)

    def add_one(self, offset: int, idle: int) -> None:
        """Add 1 to a word, as one step for all processes. A thread that sees the sum sees all that was stored before.

        Python has no such operation, but the kernel adds to one word while it wakes the waiters of another.

        Args:
            offset: offset of the word.
            idle: offset of another word, for which no thread waits.

        Raises:
            OSError: futexes are not available here.
        """
        self._add(offset, idle, 1)

    def add_one_and_wake(self, offset: int) -> None:
        """Add 1 to a word, then wake all threads that wait for it, by one call of the kernel.

        Raises:
            OSError: futexes are not available here.
        """
        self._add(offset, offset, _EVERYBODY)

    def _add(self, offset: int, woken: int, count: int) -> None:
        call = self._calls.get((_WAKE_OP, offset, woken))
        if call is None:
            second = ctypes.c_void_p(1), ctypes.c_void_p(self.address + offset), ctypes.c_int(_ADD_ONE)
            call = partial(self._prepare(_prompt(), _WAKE_OP, woken), ctypes.c_int(count), *second)
            self._calls[_WAKE_OP, offset, woken] = call
        if call() == -1:
            raise _problem("futex wake-op")

    def _prepare(self, libc: Any, operation: int, offset: int) -> Callable[..., int]:
        """Return the system call without its last arguments; it is cached, as making it takes longer than the call."""
        where, number = ctypes.c_void_p(self.address + offset), ctypes.c_long(_numbers().futex)
        call = self._calls[operation, offset] = partial(libc.syscall, number, where, ctypes.c_int(operation))
        return call

    def close(self) -> None:
        """Unmap the file."""
        _libc().munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self._size))


class RobustList:
    """Makes the kernel mark words as died, and wake their waiters, when the thread that opened this list ends.

    Meanwhile the thread must hold no robust mutex of the C library, whose list is put aside. The words must hold the
    thread's id already.

    Args:
        words: their addresses, 64 bytes apart.

    Raises:
        OSError: this kernel or sandbox has no robust futexes.
    """

    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._before = ctypes.c_void_p()
        self._memory: Mapping | None = None

    def __enter__(self) -> RobustList:
        size = ctypes.c_size_t()
        where = (ctypes.byref(self._before), ctypes.byref(size))
        if _syscall(_numbers().get_robust_list, ctypes.c_int(0), *where) or size.value != _HEAD_BYTES:
            raise _problem("get_robust_list")
        self._memory = Mapping(-1, _PAGE, writable=True)  # the kernel reads it at the very end of the process
        _set_robust_list(_link(self._memory.address, self._words))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        _set_robust_list(self._before.value or 0)
        if self._memory is not None:
            self._memory.close()


def _link(head: int, words: Sequence[int]) -> int:
    """Write the list to ``head``: a ring of nodes as far apart as the words are, with their distance. Returns it."""
    nodes = [head + _FIRST_NODE + i * _NODE_BYTES for i in range(len(words))]
    for node, following in zip([head, *nodes], [*nodes, head], strict=True):
        ctypes.c_uint64.from_address(node).value = following
    ctypes.c_int64.from_address(head + 8).value = words[0] - nodes[0]
    return head


def _set_robust_list(head: int) -> None:
    if _syscall(_numbers().set_robust_list, ctypes.c_void_p(head), ctypes.c_size_t(_HEAD_BYTES)):
        raise _problem("set_robust_list")


@cache
def _libc() -> Any:
    _numbers()
    return _typed(ctypes.CDLL(None, use_errno=True))


@cache
def _prompt() -> Any:
    """Return the C library for calls that return at once.

    They keep the interpreter lock, because another thread might not give it back for some milliseconds.
    """
    return _typed(ctypes.PyDLL(None, use_errno=True))


def _typed(libc: Any) -> Any:
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.syscall.restype = ctypes.c_long
    return libc


@cache
def _numbers() -> _Numbers:
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in _NUMBERS or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, f"robust futexes are not known to ttp on {sys.platform} {machine}")
    return _NUMBERS[machine]


def _syscall(number: int, *arguments: Any) -> bool:
    """Make a system call. Returns True if it failed; ``ctypes.get_errno()`` then says why."""
    return bool(_libc().syscall(ctypes.c_long(number), *arguments) == -1)


def _problem(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
