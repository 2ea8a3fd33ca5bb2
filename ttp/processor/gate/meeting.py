"""A barrier of the ranks of one host in shared memory. Decision 33 says why none leaves too early or sleeps too long.

Each rank has a word that only it writes: the number of the last meeting that it came to. All have come when all of
these say so, and then nothing can make it untrue: a rank that leaves by order and comes to later meetings only writes
higher numbers. One word more, the *bell*, is what everybody sleeps on. It is only ever added to, by the kernel, in one
step::

    come     write my word; add to the bell; read all words; if all have come, wake everybody, and go on
    wait     read the bell; read all words, the gate, the word for trouble; sleep unless the bell has changed
    ring     add to the bell, and wake everybody     (my gate was closed)
    warn     write the word for trouble; ring        (a neighbour died: everybody is to look at the signs of life)

Of two ranks the one that adds to the bell later sees the word of the other, so the last one sees them all.

Where other hosts take part (``wide``) nobody goes by the words of this host. They ring another bell, at the *front*,
for the courier: a thread of one rank, which waits for all words, meets the couriers of other hosts over the network,
and then writes the number into a word that only it writes, ``RELEASED``.

The protocol is written as coroutines over ``Words``. Those of memory never suspend; those of a model (in
``tests/processor/meeting_model.py``) do at every access, so all orders of them can be tried.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ttp.processor.liveness.futex import Mapping

T = TypeVar("T")

NET_S = 0.1
"""Whoever sleeps looks again after that. Every change that matters wakes it before; this is for the unforeseen."""

BELL, FRONT, RELEASED, BROKEN, TROUBLE, IDLE = 64, 128, 192, 256, 320, 384
_SLOTS, _LINE = 512, 64


def slot(place: int) -> int:
    """The index of a rank's word; ``place`` is its number among the ranks that meet here."""
    return _SLOTS + _LINE * place


def size_of(count: int) -> int:
    """Bytes that the words of ``count`` ranks need."""
    return slot(count)


def reached(word: int, turn: int) -> bool:
    """Whether a word that counts meetings has come to ``turn``; both are counted in 32 bits."""
    return (word - turn) & 0xFFFFFFFF < 1 << 31


class BrokenError(Exception):
    """The barrier was broken and will never be passed; the text says why."""


class Words(Protocol):
    """Memory that is accessed by words of 32 bits."""

    async def load(self, at: int) -> int:
        """The word there."""

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """Whether the words there, read one after the other, have ``reached`` that."""

    async def store(self, at: int, value: int) -> None:
        """Write a word that nobody else writes, or nobody writes anything else into."""

    async def add_one(self, at: int) -> None:
        """In one step; whoever sees the sum, or adds later, sees what was stored before."""

    async def wake(self, at: int) -> None:
        """Wake all who sleep on a word."""

    async def ring(self, at: int) -> None:
        """Both, one after the other."""

    async def sleep(self, at: int, expected: int) -> bool:
        """Until woken, ``NET_S`` at most; not at all when the word is another one than ``expected``.

        Returns:
            False when the time is over.
        """


class SharedWords:
    """``Words`` in a file that several processes have mapped."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    async def load(self, at: int) -> int:
        """See ``Words``."""
        return self._mapping.word(at)

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """See ``Words``."""
        return self._mapping.reached(places, turn)

    async def store(self, at: int, value: int) -> None:
        """See ``Words``."""
        self._mapping.set_word(at, value)

    async def add_one(self, at: int) -> None:
        """See ``Words``."""
        self._mapping.add_one(at, IDLE)

    async def wake(self, at: int) -> None:
        """See ``Words``."""
        self._mapping.wake(at)

    async def ring(self, at: int) -> None:
        """See ``Words``."""
        self._mapping.add_one_and_wake(at)

    async def sleep(self, at: int, expected: int) -> bool:
        """See ``Words``."""
        return self._mapping.wait(at, expected, NET_S)


class OwnWords:
    """``Words`` of the threads of one process."""

    def __init__(self) -> None:
        self._words: defaultdict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    async def load(self, at: int) -> int:
        """See ``Words``."""
        return self._words[at]

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        """See ``Words``."""
        return all(reached(self._words[at], turn) for at in places)

    async def store(self, at: int, value: int) -> None:
        """See ``Words``."""
        self._words[at] = value

    async def add_one(self, at: int) -> None:
        """See ``Words``."""
        with self._changed:
            self._words[at] += 1

    async def wake(self, at: int) -> None:
        """See ``Words``."""
        with self._changed:
            self._changed.notify_all()

    async def ring(self, at: int) -> None:
        """See ``Words``."""
        await self.add_one(at)
        await self.wake(at)

    async def sleep(self, at: int, expected: int) -> bool:
        """See ``Words``."""
        with self._changed:
            return self._words[at] != expected or self._changed.wait(NET_S)


def run(protocol: Coroutine[Any, Any, T]) -> T:
    """Carry out a protocol over words that never suspend."""
    try:
        protocol.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("memory does not wait for anybody")


class Meeting:
    """The barrier of the ranks of this host, as one of them sees it.

    Args:
        words: shared by them, all 0 before anybody comes.
        place: of this rank among them.
        count: of them.
        wide: ranks of other hosts take part; the one at place 0 has a courier.
        gone: whether the rank at a place has ended; asked while it is waited for.
    """

    def __init__(
        self, words: Words, place: int, count: int, *, wide: bool, gone: Callable[[int], Awaitable[bool]]
    ) -> None:
        self._words, self._place, self._wide, self._gone = words, place, wide, gone
        self._slots = tuple(map(slot, range(count)))
        self._heard = FRONT if wide else BELL  # by whom all words of this host are waited for

    async def come(self, turn: int) -> bool:
        """This rank has all that the others wait for.

        Args:
            turn: 1 more than in the meeting before.

        Returns:
            Whether that is the end of the meeting: ``wait`` is to be called only if not.
        """
        await self._words.store(self._slots[self._place], turn)
        await self._words.add_one(self._heard)
        if not await self._words.all_reached(self._slots, turn):
            return False
        await self._words.wake(self._heard)
        return not self._wide

    async def wait(self, turn: int, leave: Callable[[], Awaitable[bool]]) -> bool:
        """Return when all have come.

        Args:
            turn: of the meeting.
            leave: whether this rank is to go on without the others; asked after each ``ring``.

        Returns:
            False: it was told to leave.

        Raises:
            BrokenError: somebody will never come.
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
        """Sleep until the next ``ring``, unless ``over`` says that it came already. May return early for no reason."""
        heard = await self._words.load(BELL)
        if not over():
            await self._words.sleep(BELL, heard)

    async def over(self, turn: int) -> bool:
        """Whether all have come."""
        if self._wide:
            return reached(await self._words.load(RELEASED), turn)
        return await self._all_came(turn)

    async def ring(self) -> None:
        """Something has changed: who waits is to look at it."""
        await self._words.ring(BELL)

    async def warn(self) -> None:
        """Somebody has ended: who waits for that one is to find it out."""
        await self._words.store(TROUBLE, 1)
        await self.ring()

    async def _check(self, turn: int) -> None:
        if await self._words.load(BROKEN):
            raise BrokenError("the hosts cannot meet any more")
        for place, at in enumerate(self._slots):
            wanted = RELEASED if self._wide and place == 0 else at  # its courier is to meet those of the other hosts
            if place == self._place or reached(await self._words.load(wanted), turn) or not await self._gone(place):
                continue
            if not reached(await self._words.load(wanted), turn):  # else it did what is wanted of it, and ended then
                raise BrokenError(f"a rank of this host has ended, the one at place {place}")

    # ------------------------------------------------------------------------------------------------- of the courier

    async def all_here(self, turn: int, leave: Callable[[], Awaitable[bool]]) -> bool:
        """The courier waits for all ranks of this host. False: it was told to leave."""
        return await self._sleep_until(self._all_came, turn, FRONT, leave)

    async def _all_came(self, turn: int) -> bool:
        return await self._words.all_reached(self._slots, turn)

    async def release(self, turn: int) -> None:
        """All ranks of all hosts have come."""
        await self._words.store(RELEASED, turn)
        await self.ring()

    async def break_up(self) -> None:
        """The hosts do not meet any more."""
        await self._words.store(BROKEN, 1)
        await self.warn()

    async def ring_front(self) -> None:
        """The courier is to look whether it may leave."""
        await self._words.ring(FRONT)
