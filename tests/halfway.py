"""A fault in the middle of the barrier before an update: some ranks make the update, and the others do not."""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from ttp.processor.gate.meeting import BrokenError, Meeting


class Halfway(abc.ABC):
    """The ranks ``out`` make the update, then ``dead`` are killed; all others do not make the update.

    This happens when a barrier ends on some ranks only. For the other ranks the barrier never ends, or with ``broken``
    raises an error. In a job without a barrier they wait in a collective of their program before the update. Ranks that
    have made the update mark ``updated``, and ranks that are about to die mark ``dying``.
    """

    def __init__(self, rank: int, world: int, dead: Sequence[int], out: Sequence[int], *, broken: bool) -> None:
        self.rank, self.dead, self.out, self.broken = rank, dead, out, broken
        self.left = [each for each in range(world) if each not in (*dead, *out)]

    @abc.abstractmethod
    def mark(self, what: str) -> None:
        """Leave a mark that other ranks can see."""

    @abc.abstractmethod
    def marked(self, what: str, ranks: Iterable[int]) -> bool:
        """Whether these ranks have left the mark."""

    @abc.abstractmethod
    def die(self) -> None:
        """Kill this rank."""

    def come(self) -> None:
        """Note that this rank waits in the barrier and will not make the update."""
        if self.rank in self.left:
            self.mark("left")

    def over(self, over: bool) -> bool:
        """Return whether the barrier is over for this rank.

        Raises:
            BrokenError: the fault breaks the barrier for this rank.
        """
        if self.rank in self.out:
            return over
        if self.rank in self.dead:
            if over:
                self._die_last()
        elif self.broken and self.marked("dying", self.dead):
            raise BrokenError("as if a rank had ended")
        return False

    def without_barrier(self) -> None:
        """Carry out the fault after the gradient is reduced, in a job without a barrier."""
        if self.rank in self.dead:
            self._die_last()
        elif self.rank in self.left:
            self.mark("left")
            if self.broken:
                dist.recv(torch.zeros(1), src=self.dead[0])
            while True:
                time.sleep(3600)

    def _die_last(self) -> None:
        """Kill this rank when the other ranks are where the fault needs them."""
        while not (self.marked("updated", self.out) and self.marked("left", self.left)):
            time.sleep(0.001)
        self.die()


def divisions(dead: Sequence[int], world: int = 4) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield each way to choose ``out`` from the survivors, and whether the barrier of the others breaks or hangs.

    With two survivors both happen, else the two alternate.
    """
    left = [rank for rank in range(world) if rank not in dead]
    ways = (out for count in range(1, len(left)) for out in itertools.combinations(left, count))
    for number, out in enumerate(ways):
        for broken in [False, True] if len(left) == 2 else [number % 2 == 1]:
            yield out, broken


def watched_meeting(at: Callable[[str], object], now: Callable[[], Halfway | None]) -> type[Meeting]:
    """Return the barrier before the update with faults in it.

    Args:
        at: told of ``barrier``: this rank has come, and may or may not have released others.
        now: returns the fault that divides the ranks in the running step; None: there is none.
    """

    class WatchedMeeting(Meeting):
        fault: Halfway | None = None

        async def come(self, turn: int) -> bool:
            await super().come(turn)
            at("barrier")
            self.fault = now()
            if self.fault is not None:
                self.fault.come()
            return False  # ``over`` says when it is

        async def over(self, turn: int) -> bool:
            over = await super().over(turn)
            return over if self.fault is None else self.fault.over(over)

    return WatchedMeeting
