"""The relay of a simulated host: the real machines of ``ttp.core.relay`` between the streams of ranks and controllers.

A rank's stream ends at the relay of its host; the relay has one stream to each controller that its ranks speak to. If
the relay dies, all these streams break at once, and the ranks connect to controllers directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.layout import Rank
from ttp.core.relay import LineId, Lines, Relay, RelayEnd, folded, slot_s
from ttp.testing.clock import Alarm, Process
from ttp.testing.network import RankEnd, Stream

if TYPE_CHECKING:
    from ttp.testing.sim_controller import SimController
    from ttp.testing.simulation import Simulation

LOOPBACK_S = 0.0001
"""Delay of messages on one host, in seconds."""
CUT_SHORT = 0.2
"""Share of the orders that end a message, so that the next order is in a message of its own."""


class SimRelay(Process):
    """The relay of one host.

    Args:
        world: the simulation.
        host: name of the host where the relay runs.
    """

    def __init__(self, world: Simulation, host: str) -> None:
        super().__init__(world, f"relay of {host}")
        self.world, self.host = world, host
        self._uplinks: dict[SimController, Uplink] = {}

    def attach(self, rank: RankEnd, controller: SimController) -> Stream:
        """Open a rank's stream to a controller."""
        uplink = self._uplinks.get(controller)
        if uplink is None or not uplink.up.open:
            uplink = self._uplinks[controller] = Uplink(self, controller)
        return uplink.attach(rank)

    def crossing(self, host: str) -> list[Stream]:
        """Return the relay's streams that run between ``host`` and another host."""
        return [u.up for c, u in self._uplinks.items() if (self.host == host) != (c.host == host)]

    def kill(self, controller_learns_s: float) -> None:
        """Kill the relay, by SIGKILL or with its host.

        Args:
            controller_learns_s: seconds until controllers learn of the broken stream.
        """
        if self.alive:
            self.end()
            self.world.trace(self.name, "is killed")
            for uplink in self._uplinks.values():
                uplink.break_off(controller_learns_s)


class Uplink:
    """The streams of a host's ranks to one controller, and the relay's stream that carries them.

    It is the ``ControllerEnd`` of the ranks' streams and the ``RankEnd`` of the relay's stream.

    Args:
        relay: the relay that holds the streams.
        controller: the controller at the other end.
    """

    def __init__(self, relay: SimRelay, controller: SimController) -> None:
        self.host, self.to, self.machine = relay.host, controller, controller.machine
        self._relay, self._world = relay, relay.world
        heartbeat_s = relay.world.timeouts.heartbeat_s
        self._said = Relay(heartbeat_s, slot_s(self.host, heartbeat_s))
        self._ranks: dict[LineId, Stream] = {}
        self._lines = 0
        world, port = relay.world, _Port(relay.world, controller)
        delay_s = world.scenario.delay_s
        connection = world.roads.next_connection()
        self.up = port.up = Stream(world, world.rng, self, port, connection, delay_s=delay_s, repeats=0)
        self._alarm = Alarm(relay, lambda: self._said.deadline() if self.up.open else None, self._take)
        controller.carries(self.up)

    def attach(self, rank: RankEnd) -> Stream:
        """Open a rank's stream."""
        self._lines += 1
        world, line = self._world, ConnectionId(self._lines)
        stream = Stream(world, world.rng, rank, self, line, delay_s=LOOPBACK_S, repeats=0)
        self._ranks[LineId(line)] = stream
        return stream

    def break_off(self, controller_learns_s: float) -> None:
        """Cut all streams, because the relay is gone."""
        self.up.cut(rank_learns_s=0.0, controller_learns_s=controller_learns_s)
        for stream in self._ranks.values():
            stream.cut(rank_learns_s=self._world.rng.choice((0.0, 0.001, 0.05)), controller_learns_s=0.0)

    # ----------------------------------------------------------------------------------------------- towards the ranks

    def on_event(self, event: Received | StreamEnded) -> None:
        """Take a rank's report, or the end of its stream."""
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
        self._alarm.plan()

    # ------------------------------------------------------------------------------------------ towards the controller

    def on_order(self, _: Stream, orders: list[tuple[Lines, m.Order | None]]) -> None:
        """Deliver orders from the controller to the lines that they name."""
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
        """End the ranks' streams, because the stream to the controller has ended."""
        if self._relay.alive:
            for attached in self._ranks.values():
                attached.end()


class _Port:
    """The controller's end of an uplink; a ``ControllerEnd``."""

    up: Stream

    def __init__(self, world: Simulation, controller: SimController) -> None:
        self.machine = controller.machine
        self._world, self._controller = world, controller
        self._end = RelayEnd(self._open, lambda line: controller.on_event(StreamEnded(line.id)))
        self._orders: list[tuple[LineId, m.Order | None]] = []

    def on_event(self, event: Received | StreamEnded) -> None:
        """Handle a frame of the relay, or the end of its stream."""
        if isinstance(event, StreamEnded):
            self._end.close()
            self._controller.carries_no_more(self.up)
            return
        for each in self._end.events(cast(Any, event.report)):
            self._controller.on_event(each, more=True)
        self._controller.settle()

    def _open(self, number: LineId, rank: Rank) -> Line:
        line = Line(self, self._world.roads.next_connection(), number, rank)
        self._controller.adopt(line)
        return line

    def put(self, line: LineId, order: m.Order | None) -> None:
        """Queue an order. Orders queued at one time share a message, or several: the controller may die in between."""
        self._orders.append((line, order))
        if self._world.rng.random() < CUT_SHORT:
            self._send()
        elif len(self._orders) == 1:
            self._world.after(0.0, self._send)

    def end(self, line: Line) -> None:
        """End a line after the orders queued for it."""
        self.put(line.line, None)
        self._world.after(0.0, self._end.over, line)

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            self.up.order(folded(orders))


class Line:
    """The line of one rank behind a relay, which the controller uses as it uses a ``Stream``.

    Args:
        port: the controller's end of the uplink that carries the line.
        id: the line's connection number at the controller.
        number: the line's number at the relay.
        rank: the rank that opened the line.
    """

    def __init__(self, port: _Port, id: ConnectionId, number: LineId, rank: Rank) -> None:
        self.id, self.line, self.rank, self.closing = id, number, rank, False
        self._port = port

    def order(self, order: m.Order) -> None:
        """Send an order to the rank."""
        if not self.closing:
            self._port.put(self.line, order)

    def end(self) -> None:
        """End the line after the orders sent before."""
        if not self.closing:
            self.closing = True
            self._port.end(self)

    def cut(self, *, rank_learns_s: float, controller_learns_s: float) -> None:
        """Break the stream that carries this line, and so all lines on it."""
        self._port.up.cut(rank_learns_s=rank_learns_s, controller_learns_s=controller_learns_s)
