"""The relay of a simulated host: the real machines of ``ttp.core.relay`` between the streams of ranks and controllers.

A rank's stream ends at the relay of its host, which holds one stream to each controller that its ranks speak to. When
the relay dies all of them break at once, and ranks connect without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, ReceivedAlike, StreamEnded
from ttp.core.layout import Rank
from ttp.core.relay import ALIKE, LineId, Lines, Relay, Unfolded, folded, slot_s
from ttp.testing.network import RankEnd, Stream

if TYPE_CHECKING:
    from ttp.testing.sim_controller import SimController
    from ttp.testing.simulation import Simulation

LOOPBACK_S = 0.0001
"""Delay of messages on one host."""
CUT_SHORT = 0.2
"""Share of the orders that are not followed by another one in the same message."""


class SimRelay:
    """See the module.

    Args:
        world: the simulation.
        host: where it runs.
    """

    def __init__(self, world: Simulation, host: str) -> None:
        self.world, self.host = world, host
        self.alive = True
        self._uplinks: dict[SimController, Uplink] = {}

    def attach(self, rank: RankEnd, controller: SimController) -> Stream:
        """A rank opens a stream to a controller."""
        uplink = self._uplinks.get(controller)
        if uplink is None or not uplink.up.open:
            uplink = self._uplinks[controller] = Uplink(self, controller)
        return uplink.attach(rank)

    def crossing(self, host: str) -> list[Stream]:
        """Its streams between ``host`` and another one."""
        return [u.up for c, u in self._uplinks.items() if (self.host == host) != (c.host == host)]

    def kill(self, controller_learns_s: float) -> None:
        """SIGKILL, or its host dies; controllers elsewhere may learn of it late."""
        if self.alive:
            self.alive = False
            self.world.trace(f"relay of {self.host}", "is killed")
            for uplink in self._uplinks.values():
                uplink.break_off(controller_learns_s)


class Uplink:
    """The streams of ranks to one controller, and the one that carries them: ``ControllerEnd`` and ``RankEnd``.

    Args:
        relay: whose.
        controller: to whom.
    """

    def __init__(self, relay: SimRelay, controller: SimController) -> None:
        self.host, self.to, self.machine = relay.host, controller, controller.machine
        self._relay, self._world = relay, relay.world
        heartbeat_s = relay.world.timeouts.heartbeat_s
        self._said = Relay(heartbeat_s, slot_s(self.host, heartbeat_s))
        self._ranks: dict[LineId, Stream] = {}
        self._lines = 0
        self._due = float("inf")
        world, port = relay.world, _Port(relay.world, controller)
        delay_s = world.scenario.delay_s
        connection = world.roads.next_connection()
        self.up = port.up = Stream(world, world.rng, self, port, connection, delay_s=delay_s, repeats=0)
        controller.carries(self.up)

    def attach(self, rank: RankEnd) -> Stream:
        """A rank opens a stream."""
        self._lines += 1
        world, line = self._world, ConnectionId(self._lines)
        stream = Stream(world, world.rng, rank, self, line, delay_s=LOOPBACK_S, repeats=0)
        self._ranks[LineId(line)] = stream
        return stream

    def break_off(self, controller_learns_s: float) -> None:
        """The relay is gone."""
        self.up.cut(rank_learns_s=0.0, controller_learns_s=controller_learns_s)
        for stream in self._ranks.values():
            stream.cut(rank_learns_s=self._world.rng.choice((0.0, 0.001, 0.05)), controller_learns_s=0.0)

    # ----------------------------------------------------------------------------------------------- towards the ranks

    def on_event(self, event: Received | StreamEnded) -> None:
        """A rank has said something, or its stream has ended."""
        line, now = LineId(event.connection), self._world.now
        if not self._relay.alive or line not in self._ranks:
            return
        if isinstance(event, Received):
            self._said.reported(line, event.report, now)
        else:
            del self._ranks[line]
            self._said.ended(line, now)
        self._take()

    def _take(self) -> None:
        frame = self._said.take(self._world.now)
        if frame is not None:
            self.up.report(frame)
        if not self._ranks:
            self.up.end()
        due = self._said.deadline()
        if due is not None and due < self._due:
            self._due = max(due, self._world.now)
            self._world.at(self._due, self._time, self._due)

    def _time(self, planned: float) -> None:
        if planned == self._due and self._relay.alive and self.up.open:
            self._due = float("inf")
            self._take()

    # ------------------------------------------------------------------------------------------ towards the controller

    def on_order(self, _: Stream, orders: list[tuple[Lines, m.Order | None]]) -> None:
        """What comes down, to those for whom it is meant."""
        if not self._relay.alive:
            return
        for lines, order in orders:
            if isinstance(order, m.Freeze):
                self._said.told(lines, order)
            for line in lines:
                if order is None:
                    self._said.closed(line)
                if line in self._ranks:
                    if order is None:
                        self._ranks[line].end()
                    else:
                        self._ranks[line].order(order)

    def on_down(self, stream: Stream | None) -> None:
        """The controller, or the way to it, is gone."""
        if self._relay.alive:
            for attached in self._ranks.values():
                attached.end()


class _Port:
    """The end of an uplink in the controller: ``ControllerEnd``."""

    up: Stream

    def __init__(self, world: Simulation, controller: SimController) -> None:
        self.machine = controller.machine
        self._world, self._controller = world, controller
        self._unfolded = Unfolded()
        self._lines: dict[LineId, Line] = {}
        self._orders: list[tuple[LineId, m.Order | None]] = []

    def on_event(self, event: Received | StreamEnded) -> None:
        """A frame has arrived, or the stream has ended."""
        if isinstance(event, StreamEnded):
            for line in list(self._lines.values()):
                self._ended(line)
            self._controller.carries_no_more(self.up)
            return
        for numbers, report in self._unfolded.reports(cast(Any, event.report)):
            if isinstance(report, m.Hello) and numbers[0] not in self._lines:
                known = self._lines[numbers[0]] = Line(self, numbers[0], report.rank)
                known.connection = self._controller.adopt(known)
            lines = [self._lines[number] for number in numbers if number in self._lines]  # others it has ended
            who = tuple((line.connection, line.rank) for line in lines if line.open)
            if report is None:
                for line in lines:
                    self._ended(line)
            elif isinstance(report, ALIKE) and report.rank == m.SEVERAL:
                self._controller.on_event(ReceivedAlike(who, report), more=True)
            else:
                for connection, _ in who:
                    self._controller.on_event(Received(connection, report), more=True)
        self._controller.settle()

    def put(self, line: LineId, order: m.Order | None) -> None:
        """What is said within one moment goes down together, or in pieces: a controller may die in between."""
        self._orders.append((line, order))
        if self._world.rng.random() < CUT_SHORT:
            self._send()
        elif len(self._orders) == 1:
            self._world.after(0.0, self._send)

    def end(self, line: Line) -> None:
        """The controller has said its last word on this line."""
        self.put(line.number, None)
        self._world.after(0.0, self._ended, line)

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            self.up.order(folded(orders))

    def _ended(self, line: Line) -> None:
        if self._lines.pop(line.number, None) is line:
            line.open = False
            self._unfolded.closed(line.number)
            self._controller.on_event(StreamEnded(line.connection))


class Line:
    """One rank behind a relay, as its controller sees it; see ``Stream``.

    Args:
        port: carries it.
        number: at the relay.
        rank: that has opened it.
    """

    def __init__(self, port: _Port, number: LineId, rank: Rank) -> None:
        self.connection = ConnectionId(0)
        self.number, self.rank, self.open = number, rank, True
        self._port = port

    def order(self, order: m.Order) -> None:
        """The controller speaks."""
        if self.open:
            self._port.put(self.number, order)

    def end(self) -> None:
        """The controller has said its last word."""
        if self.open:
            self.open = False
            self._port.end(self)

    def cut(self, *, rank_learns_s: float, controller_learns_s: float) -> None:
        """The stream that carries it breaks."""
        self._port.up.cut(rank_learns_s=rank_learns_s, controller_learns_s=controller_learns_s)
