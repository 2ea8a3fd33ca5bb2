"""The second stream of a simulated rank, to a controller that stands in; see ``ttp.core.rank.stand_in``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.testing.network import Stream

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank


class SimAside:
    """The rank's end of its second stream; a ``RankEnd``.

    Args:
        rank: the rank that owns the stream.
    """

    __slots__ = ("_attempt", "rank", "stream")

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.stream: Stream | None = None
        self._attempt = 0

    def perform(self, action: act.LookAtController | act.ConnectAside | act.SendAside | act.CloseAside) -> None:
        """Carry out an action of the machine on the second stream: check the controller, open, send or close."""
        world = self.rank.world
        match action:
            case act.LookAtController():
                world.after(0.0, self.rank.run, self.rank.put, ev.Looked(world.roads.unheard_s(self.rank)))
            case act.SendAside(report):
                self.rank.said(report, self.stream)
            case act.ConnectAside():
                self._attempt += 1
                world.roads.connect_aside(self.rank, action, self._attempt)
            case act.CloseAside():
                self._attempt += 1
                stream, self.stream = self.stream, None
                if stream is not None:
                    stream.end()

    def wanted(self, attempt: int) -> bool:
        """Return whether ``attempt`` is the latest attempt to connect and the rank lives."""
        return self.rank.alive and attempt == self._attempt

    def attached(self, stream: Stream | None, attempt: int) -> None:
        """Take the result of an attempt to connect: a stream, or None if no controller answered."""
        if not self.wanted(attempt):
            if stream is not None:
                stream.end()
            return
        self.stream = stream if stream is not None and stream.open else None
        event = ev.AsideUp() if self.stream is not None else ev.AsideDown("nobody answers")
        self.rank.run(self.rank.put, event)

    def died(self, controller_learns_s: float) -> None:
        """Cut the stream, because the process has ended."""
        self._attempt += 1
        if self.stream is not None:
            self.stream.cut(rank_learns_s=0.0, controller_learns_s=controller_learns_s)

    def on_order(self, stream: Stream, order: Any) -> None:
        """See ``RankEnd``."""
        if stream is self.stream:
            self.rank.run(self.rank.put, ev.AsideOrder(order))

    def on_down(self, stream: Stream | None) -> None:
        """See ``RankEnd``."""
        if stream is not None and stream is self.stream:
            self.stream = None
            self.rank.run(self.rank.put, ev.AsideDown("broken"))
