"""A simulated controller: the real machine on simulated streams. It may be killed between any two of its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ttp.core import messages as m
from ttp.core.controller import events as ce
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Rank
from ttp.testing.clock import Alarm, Process
from ttp.testing.network import RankEnd, Stream
from ttp.testing.sim_relay import Line

if TYPE_CHECKING:
    from ttp.testing.simulation import Simulation

KEEPALIVE_S = 1.0
"""Seconds without an answer (a stopped process gives none) after which gRPC considers a stream dead."""

READ_S = 0.05
"""Longest time, in seconds, in which a controller reads the history of launches."""


class SimController(Process):
    """One controller process.

    Args:
        world: the simulation.
        timeouts: the machine's timeouts.
        host: name of the host where the process runs.
        name: name in the trace and in the ids of its incidents.
    """

    def __init__(self, world: Simulation, timeouts: ce.ControllerTimeouts, host: str, name: str) -> None:
        super().__init__(world, name)
        self.host = host
        self.restarts = 0
        """How often a dead controller is restarted at once; the successor gets this number less one."""
        self.machine = ControllerMachine(timeouts, lambda n: f"{name}-i{n}", world.now, host)
        self._world = world
        self._streams: dict[ce.ConnectionId, Stream | Line] = {}
        self._events_left: int | None = None
        self._actions_left = 0
        self._alarm = Alarm(self, self.machine.deadline, lambda: self.on_event(ce.Tick()))
        self._alarm.plan()

    def accept(self, rank: RankEnd, connection: ce.ConnectionId) -> Stream:
        """Accept a stream of a rank."""
        stream = self._world.stream(rank, self, connection)
        self._streams[connection] = stream
        return stream

    def adopt(self, line: Line) -> None:
        """Accept a rank's line through the relay of its host."""
        self._streams[line.id] = line

    def carries(self, uplink: Stream) -> None:
        """Accept a relay's stream."""
        self._streams[uplink.connection] = uplink

    def carries_no_more(self, uplink: Stream) -> None:
        """Forget a relay's stream, which has ended."""
        self._streams.pop(uplink.connection, None)

    def kill(self) -> None:
        """Kill the process."""
        if self.alive:
            self.end()
            self._world.trace(self.name, "is killed")
            late_s = self._world.roads.given_up_after(self.host)
            for stream in self._streams.values():
                learns_s = late_s + self._world.rng.choice((0.0, 0.001, 0.05))
                stream.cut(rank_learns_s=learns_s, controller_learns_s=0.0)
            self._world.roads.controller_died(self)

    def stop(self, lasts_s: float) -> None:
        """See ``Process.stop``. Ranks give up streams that are not kept alive."""
        if self.alive and not self.stopped:
            super().stop(lasts_s)
            if lasts_s > self._world.keepalive_s:
                self._world.after(self._world.keepalive_s, self._not_kept_alive)

    def _not_kept_alive(self) -> None:
        if self.stopped:
            for stream in list(self._streams.values()):
                stream.cut(rank_learns_s=self._world.rng.random() * self._world.keepalive_s, controller_learns_s=0.0)

    def kill_in(self, events: int, actions: int) -> None:
        """Kill the process at its ``events``-th event from now, after ``actions`` of that event's actions."""
        self._events_left, self._actions_left = events, actions

    def on_event(self, event: ce.Event, *, more: bool = False) -> None:
        """Give an event to the machine; see ``ControllerEnd``. The event may be the repeat of a report.

        Args:
            event: the event.
            more: whether other reports of the same frame, and then ``settle``, follow.
        """
        self.run(self._take, event, more)

    def _take(self, event: ce.Event, more: bool) -> None:
        if isinstance(event, ce.StreamEnded):
            self._streams.pop(event.connection, None)
        actions = self.machine.on_event(event, self._world.now, more=more)
        self._world.trace(self.name, _describe(event))
        self._act(actions)

    def settle(self) -> None:
        """Let the machine decide, after all reports of a frame were given to it."""
        self.run(self._settle)

    def _settle(self) -> None:
        self._act(self.machine.settle(self._world.now))

    def _act(self, actions: list[ce.Action]) -> None:
        if actions:
            self._world.judge.controller_acted(self.machine, actions)
        self._perform(actions)
        self._alarm.plan()

    def _perform(self, actions: list[ce.Action]) -> None:
        dies = False
        if self._events_left is not None:
            self._events_left -= 1
            dies = self._events_left <= 0
        for index, action in enumerate(_apart(actions)):
            if dies and index >= self._actions_left:
                break
            self._do(action)
        if dies:
            self.kill()

    def _do(self, action: ce.Action) -> None:
        match action:
            case ce.Send(connection, order):
                self._send(connection, order.rank, order)
            case ce.SendAlike(who, order):
                for connection, rank in who:
                    self._send(connection, rank, order)
            case ce.Record(kind, incident, facts):
                self._world.trace(self.name, f"[{incident}] {kind} {facts}")
                self._note(kind, facts)
            case ce.LookAt(host):
                looked = ce.LookedAt(host, self._world.roads.silent_s(self, host))
                self._world.after(0.0, self.on_event, looked)
            case ce.Stop():
                self.end()
                for stream in list(self._streams.values()):
                    stream.end()

    def _note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Keep the history of launches on disk, and read there what the controller before this one has recorded."""
        history, incarnation = self._world.history, self.machine.job.incarnation
        if kind == "committed":
            history[incarnation] = facts["version"], facts["path"]
        elif kind == "incarnation" and facts["resumed"]:
            saved = history.get(facts["incarnation"])
            read = ce.Remembered(0, saved is not None, saved, present=True)
            self._world.after(self._world.rng.random() * READ_S, self.on_event, read)

    def _send(self, connection: ce.ConnectionId, rank: Rank, order: m.Order) -> None:
        self._world.trace(self.name, f"> {type(order).__name__} {rank}")
        stream = self._streams.get(connection)
        if stream is not None:
            stream.order(order)
            if isinstance(order, m.Refused):
                stream.end()


def _apart(actions: list[ce.Action]) -> Iterator[ce.Action]:
    """Split orders for several ranks, because the controller may die when only some ranks have received theirs."""
    for action in actions:
        if isinstance(action, ce.SendAlike):
            yield from (ce.SendAlike((one,), action.order) for one in action.who)
        else:
            yield action


def _describe(event: ce.Event) -> str:  # noqa: PLR0911 - one line for each event
    match event:
        case ce.Received(connection, report):
            return f"< {type(report).__name__} {report.rank} on {connection}"
        case ce.ReceivedAlike(who, report):
            return f"< {type(report).__name__} {', '.join(f'{rank} on {connection}' for connection, rank in who)}"
        case ce.StreamEnded(connection):
            return f"< stream {connection} ended"
        case ce.Accused(ranks):
            return f"< accused {ranks}"
        case ce.LookedAt(host, silent_s):
            return f"< looked at {host}: {silent_s}"
        case ce.SaveRequested():
            return "< save requested"
        case ce.Remembered(_, _, saved):
            return f"< remembered {saved}"
    return "tick"
