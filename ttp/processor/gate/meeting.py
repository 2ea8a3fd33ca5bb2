"""A barrier of the ranks of one host in shared memory, before each update. Decision 33 gives the proof of it.

Each rank has a word that only it writes: the number of the last meeting to which it came. All ranks have come when all
words have reached the number of the meeting, and this stays true: a rank that leaves by order and comes to later
meetings only writes higher numbers. All ranks sleep on one more word, the *bell*. The kernel alone changes it, by
adding to it in one step::

    come     write my word; add to the bell; read all words; if all have come, wake all sleepers, and go on
    wait     read the bell; read all words, the gate, the word for trouble; sleep unless the bell has changed
    ring     add to the bell, and wake all sleepers     (my gate was closed)
    warn     write the word for trouble; ring           (a neighbour died: all ranks check which rank has ended)

Of two ranks the one that adds to the bell later sees the word of the other, so the last one sees all words.

If the job has several hosts (``wide``), the words of this host alone release no rank. The ranks ring another bell, the
*front*, for the courier: a thread of one rank, which waits for all words, meets the couriers of the other hosts over
the network, and then writes the number into a word that only it writes, ``RELEASED``.

The protocol is written as coroutines over ``Words``. The words of real memory never suspend; those of a model (in
``tests/processor/meeting_model.py``) do at every access, so that all orders of accesses can be tried.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ttp.processor.liveness.futex import Mapping

T = TypeVar("T")

NET_S = 0.1
"""Seconds after which a sleeper looks again. Every change that matters wakes it earlier; this is a safety net."""

BELL, FRONT, RELEASED, BROKEN, TROUBLE, IDLE = 64, 128, 192, 256, 320, 384
_SLOTS, _LINE = 512, 64


def slot(place: int) -> int:
    """Return the index of a rank's word; ``place`` is its number among the ranks that meet here."""
    return _SLOTS + _LINE * place


def size_of(count: int) -> int:
    """Return the bytes that the words of ``count`` ranks need."""
    return slot(count)


def reached(word: int, turn: int) -> bool:
    """Return whether a word that counts meetings has come to ``turn``; both are counted modulo 2**32."""
    return (word - turn) & 0xFFFFFFFF < 1 << 31


class BrokenError(Exception):
    """The barrier was broken and will never be passed; the text says why."""


class Words(Protocol):
    """Memory that is accessed by words of 32 bits."""

    async def load(self, at: int) -> int:
        """Return the word at ``at``."""

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """Return whether the words at ``places``, read one after the other, have all ``reached`` meeting ``turn``."""

    async def store(self, at: int, value: int) -> None:
        """Write a word that no other rank writes, or into which all ranks write the same value."""

    async def add_one(self, at: int) -> None:
        """Add 1 in one step. A rank that sees the sum, or adds later, sees all that was stored before."""

    async def wake(self, at: int) -> None:
        """Wake all sleepers of a word."""

    async def ring(self, at: int) -> None:
        """Add 1, then wake all sleepers."""

    async def sleep(self, at: int, expected: int) -> bool:
        """Sleep until woken, ``NET_S`` seconds at most; not at all if the word is not ``expected``.

        Returns:
            False if the time is over.
        """


class SharedWords:
    """``Words`` in a file that several processes have mapped."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    async def load(self, at: int) -> int:
        """See ``Words.load``."""
        return self._mapping.word(at)

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """See ``Words.all_reached``."""
        return self._mapping.reached(places, turn)

    async def store(self, at: int, value: int) -> None:
        """See ``Words.store``."""
        self._mapping.set_word(at, value)

    async def add_one(self, at: int) -> None:
        """See ``Words.add_one``."""
        self._mapping.add_one(at, IDLE)

    async def wake(self, at: int) -> None:
        """See ``Words.wake``."""
        self._mapping.wake(at)

    async def ring(self, at: int) -> None:
        """See ``Words.ring``."""
        self._mapping.add_one_and_wake(at)

    async def sleep(self, at: int, expected: int) -> bool:
        """See ``Words.sleep``."""
        return self._mapping.wait(at, expected, NET_S)


class OwnWords:
    """``Words`` of the threads of one process."""

    def __init__(self) -> None:
        self._words: defaultdict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    async def load(self, at: int) -> int:
        """See ``Words.load``."""
        return self._words[at]

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """See ``Words.all_reached``."""
        return all(reached(self._words[at], turn) for at in places)

    async def store(self, at: int, value: int) -> None:
        """See ``Words.store``."""
        self._words[at] = value

    async def add_one(self, at: int) -> None:
        """See ``Words.add_one``."""
        with self._changed:
            self._words[at] += 1

    async def wake(self, at: int) -> None:
        """See ``Words.wake``."""
        with self._changed:
            self._changed.notify_all()

    async def ring(self, at: int) -> None:
        """See ``Words.ring``."""
        await self.add_one(at)
        await self.wake(at)

    async def sleep(self, at: int, expected: int) -> bool:
        """See ``Words.sleep``."""
        with self._changed:
            return self._words[at] != expected or self._changed.wait(NET_S)


def run(protocol: Coroutine[Any, Any, T]) -> T:
    """Run a protocol over words that never suspend, and return its result."""
    try:
        protocol.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("a protocol over real memory must not suspend")


class Meeting:
    """The barrier of the ranks of this host, as one of them sees it.

    Args:
        words: shared by the ranks, all 0 before the first meeting.
        place: number of this rank among them.
        count: number of ranks.
        wide: ranks of other hosts take part; the rank at place 0 has a courier.
        gone: returns whether the rank at a place has ended; asked while that rank is waited for.
    """

    def __init__(
        self, words: Words, place: int, count: int, *, wide: bool, gone: Callable[[int], Awaitable[bool]]
    ) -> None:
        self._words, self._place, self._wide, self._gone = words, place, wide, gone
        self._slots = tuple(map(slot, range(count)))
        self._heard = FRONT if wide else BELL  # the bell at which all words of this host are waited for

    async def come(self, turn: int) -> bool:
        """Note that this rank has come to a meeting.

        Args:
            turn: number of the meeting, 1 more than in the meeting before.

        Returns:
            True if that ends the meeting; otherwise ``wait`` is to be called.
        """
        await self._words.store(self._slots[self._place], turn)
        await self._words.add_one(self._heard)
        if not await self._words.all_reached(self._slots, turn):
            return False
        await self._words.wake(self._heard)
        return not self._wide

    async def wait(self, turn: int, leave: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until all ranks have come.

        Args:
            turn: number of the meeting.
            leave: returns whether this rank is to go on without the others; asked after each ``ring``.

        Returns:
            False: this rank was told to leave.

        Raises:
            BrokenError: a rank will never come.
        """
        return await self._sleep_until(self.over, turn, BELL, leave)

    async def _sleep_until(
        self, over: Callable[[int], Awaitable[bool]], turn: int, bell: int, leave: Callable[[], Awaitable[bool]]
    ) -> bool:
        in_time = True
        while True:
            heard = await self._words.load(bell)
            if await over(turn):
                return True
            if await leave():
                return False
            if bell == BELL and (not in_time or await self._words.load(TROUBLE)):
                await self._check(turn)
            in_time = await self._words.sleep(bell, heard)

    async def pause(self, over: Callable[[], bool]) -> None:
        """Sleep until the next ``ring``, unless ``over`` returns True already. May return early without a reason."""
        heard = await self._words.load(BELL)
        if not over():
            await self._words.sleep(BELL, heard)

    async def over(self, turn: int) -> bool:
        """Return whether all ranks have come."""
        if self._wide:
            return reached(await self._words.load(RELEASED), turn)
        return await self._all_came(turn)

    async def ring(self) -> None:
        """Wake all ranks that wait, so that they look at what has changed."""
        await self._words.ring(BELL)

    async def warn(self) -> None:
        """Wake all ranks that wait, so that they find out which rank has ended."""
        await self._words.store(TROUBLE, 1)
        await self.ring()

    async def _check(self, turn: int) -> None:
        if await self._words.load(BROKEN):
            raise BrokenError("the barrier between the hosts is broken")
        for place, at in enumerate(self._slots):
            wanted = RELEASED if self._wide and place == 0 else at  # its courier has to meet those of the other hosts
            if place == self._place or reached(await self._words.load(wanted), turn) or not await self._gone(place):
                continue
            if not reached(await self._words.load(wanted), turn):  # else it did its part, and ended then
                raise BrokenError(f"a rank of this host has ended (number {place} among the ranks of this host)")

    # ------------------------------------------------------------------------------------------------- of the courier

    async def all_here(self, turn: int, leave: Callable[[], Awaitable[bool]]) -> bool:
        """Wait as the courier for all ranks of this host. Returns False if it was told to leave."""
        return await self._sleep_until(self._all_came, turn, FRONT, leave)

    async def _all_came(self, turn: int) -> bool:
        return await self._words.all_reached(self._slots, turn)

    async def release(self, turn: int) -> None:
        """Release the ranks of this host: all ranks of all hosts have come."""
        await self._words.store(RELEASED, turn)
        await self.ring()

    async def break_up(self) -> None:
        """Break the barrier for good: the hosts do not meet any more."""
        await self._words.store(BROKEN, 1)
        await self.warn()

    async def ring_front(self) -> None:
        """Wake the courier, so that it looks whether it may leave."""
        await self._words.ring(FRONT)
