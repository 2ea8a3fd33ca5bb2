"""The network of a simulated job: controllers, the streams to them, and faults of the network.

A controller listens at an address: the home address, on the host of rank 0, where ranks of that host start another
controller if none answers; or the address of a host with a standby controller. Hosts can be cut off, ranks can be
blocked, and the network can split, so that some ranks reach only the leading controller and the others only the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ttp.core.controller.events import ConnectionId, ControllerTimeouts
from ttp.core.layout import Rank
from ttp.core.rank import actions as act
from ttp.core.rank.failover import HOME
from ttp.testing.network import RankEnd, Stream
from ttp.testing.sim_controller import SimController
from ttp.testing.sim_relay import SimRelay, Uplink

if TYPE_CHECKING:
    from ttp.testing.sim_aside import SimAside
    from ttp.testing.sim_rank import SimRank
    from ttp.testing.simulation import Simulation

LEARNS_S = (0.0, 0.001, 0.01, 0.1)
"""Possible seconds until an end of a stream learns that the stream is broken."""
NEVER = float("inf")
NO_ANSWER_S = 1.5
"""Seconds after which a rank gives up an attempt to connect that no controller answers."""
KNOCK_S = 0.05
"""Seconds between two tries of such an attempt."""
GIVES_UP_S = 2.5
"""Seconds after which gRPC considers a silent stream dead; in ``ttp.wire.channel`` they are 10."""
RETRANSMIT_S = 0.2
"""Seconds after which TCP first repeats data that were not acknowledged."""
NO_STANDBY = 0.1
"""Share of the standby controllers that cannot be started."""


def _said_again(lasts_s: float) -> float:
    """Return the seconds from the start of a silence of ``lasts_s`` to TCP's first repetition after it.

    TCP doubles the wait before each repetition.
    """
    again_s = RETRANSMIT_S
    while again_s < lasts_s < NEVER:
        again_s = 2 * again_s + RETRANSMIT_S
    return again_s if lasts_s < NEVER else NEVER


class Roads:
    """The network of one simulation and the controllers on it.

    Args:
        world: the simulation.
        timeouts: the timeouts of every controller.
    """

    def __init__(self, world: Simulation, timeouts: ControllerTimeouts) -> None:
        self._world, self._timeouts = world, timeouts
        self._home = world.scenario.hosts[0]
        self._at: dict[str, SimController] = {}
        self._relays: dict[str, SimRelay] = {}
        self._connections = 0
        self._controllers = 0
        self._blocked_until: dict[Rank, float] = {}
        self._cut_off_until: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}
        self.gives_up_s = GIVES_UP_S
        self._split_until = 0.0
        self._split_from: SimController | None = None
        self._beyond: set[Rank] = set()

    def new_incarnation(self) -> None:
        """End the network faults of the last incarnation."""
        self._blocked_until.clear()
        self._cut_off_until.clear()
        self._silent_since.clear()
        self._relays.clear()
        self._split_until = 0.0

    # ----------------------------------------------------------------------------------------------------- controllers

    @property
    def controller(self) -> SimController | None:
        """The controller that events from outside reach: of those that run, the one with the most live ranks."""
        alive = [c for c in self._at.values() if c.alive and not c.stopped]
        return max(alive, key=lambda c: len(c.machine.job.live), default=None)

    def nobody_to_ask(self, rank: SimRank) -> bool:
        """Return whether no controller that this rank knows runs, and no rank on the home host could start one.

        The rank may have been cut off when standby controllers were announced; then its launcher has to end it.
        """
        known = (self._at.get(address) for address in (HOME, *rank.machine._route.standbys))
        if any(controller is not None and controller.alive and not controller.stopped for controller in known):
            return False
        return not any(r.alive and not r.stopped and r.host == self._home for r in self._world.ranks.values())

    def start_standby(self, host: str) -> str:
        """Start a standby controller on ``host``. Return its address; empty if it could not be started."""
        if self._world.rng.random() < NO_STANDBY:
            return ""
        address = f"{host}:1"
        if address not in self._at or not self._at[address].alive:
            self._start(host, address)
        return address

    def _start(self, host: str, address: str) -> SimController:
        self._controllers += 1
        controller = SimController(self._world, self._timeouts, host, f"controller {self._controllers}")
        self._at[address] = controller
        self._world.trace(controller.name, f"starts on {host}")
        return controller

    def controller_died(self, dead: SimController) -> None:
        """Start a successor of a dead controller, if its ``restarts`` are not used up."""
        if dead.restarts:
            address = next(a for a, c in self._at.items() if c is dead)
            self._world.after(self._world.rng.random() * 0.02, self._restart, dead, address)

    def _restart(self, dead: SimController, address: str) -> None:
        if self._at.get(address) is not dead or not dead.restarts:
            return  # a rank started a controller at this address first, or the host has died since
        successor, rng = self._start(dead.host, address), self._world.rng
        successor.restarts = dead.restarts - 1
        if successor.restarts:
            successor.kill_in(events=rng.randint(1, 40), actions=rng.randint(0, 4))

    def host_died(self, host: str) -> None:
        """Kill the controllers on a host that has died."""
        for controller in list(self._at.values()):
            if controller.host == host:
                controller.restarts = 0
                controller.kill()

    # ---------------------------------------------------------------------------------------------------------- streams

    def connect(self, rank: SimRank, wanted: act.Connect) -> None:
        """Open a rank's stream to an address; at the home address the rank may start a controller if none listens."""
        self._world.after(self._world.delay(), self._connect, rank, wanted)

    def _connect(self, rank: SimRank, wanted: act.Connect) -> None:
        if not rank.alive:
            return
        there = self._at.get(wanted.address)
        if there is None or not there.alive:
            if not (wanted.start_controller and wanted.address == HOME and rank.host == self._home):
                refuses_s = 0.0 if there is None or not self._silent(there.host) else wanted.within_s or NO_ANSWER_S
                self._world.after(refuses_s, rank.on_down, None)
                return
            self._start(rank.host, HOME)
        patience_s = NO_ANSWER_S if wanted.within_s is None else wanted.within_s
        self._knock(rank, rank, 0, wanted.address, self._world.now + patience_s)

    def connect_aside(self, rank: SimRank, wanted: act.ConnectAside, attempt: int) -> None:
        """Open a rank's second stream."""
        until = self._world.now + wanted.within_s
        self._world.after(self._world.delay(), self._knock, rank, rank.aside, attempt, wanted.address, until)

    def _knock(self, rank: SimRank, end: SimRank | SimAside, attempt: int, address: str, until: float) -> None:
        """Try again and again to open a stream of ``rank``, whose end is ``end``, until a controller accepts it."""
        if not end.wanted(attempt):
            return
        there, now = self._at.get(address), self._world.now
        if there is None or not there.alive or now >= until or self._blocked_until.get(rank.rank, 0.0) > now:
            end.attached(None, attempt)
        elif there.stopped or not self._road(rank, there):
            self._world.after(KNOCK_S, self._knock, rank, end, attempt, address, until)
        else:
            stream = self._accept(rank.host, end, there)
            self._world.after(self._world.delay(), end.attached, stream, attempt)

    def next_connection(self) -> ConnectionId:
        """Return a new number for a stream."""
        self._connections += 1
        return ConnectionId(self._connections)

    def _accept(self, host: str, end: RankEnd, there: SimController) -> Stream:
        """Open a stream from an end on ``host`` to a controller: through the relay of the host, if one is alive."""
        if self._world.scenario.relays:
            relay = self._relays.setdefault(host, SimRelay(self._world, host))
            if relay.alive:
                return relay.attach(end, there)
        return there.accept(end, self.next_connection())

    def relay_dies(self, host: str) -> None:
        """Kill a host's relay. If the host has lost power, its streams end only when peers give them up."""
        if host in self._relays:
            self._relays[host].kill(self.gives_up_s if self._silent(host) else self._world.rng.choice(LEARNS_S))

    def given_up_after(self, host: str) -> float:
        """Return the seconds until other hosts learn that a process on ``host`` has ended."""
        return self.gives_up_s if self._silent(host) else 0.0

    def _silent(self, host: str) -> bool:
        return host in self._silent_since and self._cut_off_until[host] > self._world.now

    def _road(self, rank: SimRank, controller: SimController) -> bool:
        if self._world.now < self._split_until and (rank.rank in self._beyond) == (controller is self._split_from):
            return False
        return self.hosts_speak(rank.host, controller.host)

    def hosts_speak(self, one: str, other: str) -> bool:
        """Return whether messages pass between two hosts now; a host that is cut off reaches only itself."""
        if not self._cut_off_until or one == other:
            return True
        return all(self._cut_off_until.get(host, 0.0) <= self._world.now for host in (one, other))

    def reaches(self, rank: SimRank, host: str) -> bool:
        """Return whether ``host`` answers a probe by a rank. A host that is cut off may still answer other ranks."""
        there = any(r.alive for r in self._world.ranks.values() if r.host == host)
        return there and (self.hosts_speak(rank.host, host) or self._world.rng.random() < 0.5)

    # --------------------------------------------------------------------------------------------------------- cut off

    def block(self, rank: SimRank, lasts_s: float) -> None:
        """Break the streams of a rank, which cannot open another one for ``lasts_s`` seconds."""
        self._blocked_until[rank.rank] = self._world.now + lasts_s
        self._world.trace(rank.name, f"cannot be reached for {lasts_s} s")
        for stream in rank.streams:
            self._cut(stream)

    def cut_off(self, host: str, lasts_s: float) -> None:
        """Cut ``host`` off from all other hosts for ``lasts_s`` seconds, and break its streams to them."""
        self._cut_off_until[host] = self._world.now + lasts_s
        self._world.trace(host, f"is cut off for {lasts_s} s")
        for stream in self._crossing(host):
            self._cut(stream)

    def _crossing(self, host: str) -> Iterator[Stream]:
        """Yield the streams between a host and others."""
        for rank in self._world.ranks.values():
            for stream in rank.streams:
                other = stream.controller
                if isinstance(other, SimController) and (rank.host == host) != (other.host == host):
                    yield stream
        for relay in self._relays.values():
            if relay.alive:
                yield from relay.crossing(host)

    def fall_silent(self, host: str, lasts_s: float) -> None:
        """Cut ``host`` off without breaking its streams: they are silent for ``lasts_s`` or until given up."""
        world = self._world
        self._cut_off_until[host], self._silent_since[host] = world.now + lasts_s, world.now
        world.trace(host, f"falls silent for {lasts_s} s")
        for stream in self._crossing(host):
            self._hold(stream, lasts_s)

    def _hold(self, stream: Stream, lasts_s: float) -> None:
        again_s = _said_again(lasts_s)
        stream.hold(self._world.now + again_s)
        if again_s >= self.gives_up_s:
            self._world.after(self.gives_up_s, self._give_up, stream)

    def _give_up(self, stream: Stream) -> None:
        if stream.open:
            stream.cut(rank_learns_s=self._world.rng.random() * 0.2, controller_learns_s=self._world.rng.random() * 0.2)

    def lose_power(self, host: str) -> None:
        """Mark a host as without power, so that its streams fall silent instead of ending."""
        self._silent_since[host], self._cut_off_until[host] = self._world.now, NEVER

    def learns_late(self, rank: SimRank) -> float:
        """Return the seconds until the controller learns that a dead rank's stream has ended; 0 unless its host lost
        power or is silent and the controller is on another host.
        """
        elsewhere = rank.stream is not None and getattr(rank.stream.controller, "host", "") != rank.host
        return self.gives_up_s if self._silent(rank.host) and elsewhere else 0.0

    def silent_s(self, controller: SimController, host: str) -> float:
        """Return the seconds since a controller received data or an acknowledgement from the kernel of ``host``."""
        now, ends = self._world.now, (host, controller.host)
        since = [self._silent_since[h] for h in ends if h in self._silent_since and self._passes_at(h) > now]
        if controller.host == host or not since:
            return 0.0
        seen = (mb.last_seen for mb in controller.machine.job.members.values() if mb.hello.host == host)
        return now - min(*since, max(seen, default=now))

    def unheard_s(self, rank: SimRank) -> float | None:
        """Return the seconds since a rank, or its relay, received data or an acknowledgement from the kernel of its
        controller's host; None if the rank has no controller.
        """
        there = rank.stream.controller if rank.stream is not None else None
        if isinstance(there, Uplink):
            there = there.to
        if not isinstance(there, SimController):
            return None
        now = self._world.now
        since = [
            at for h, at in self._silent_since.items() if h in (rank.host, there.host) and self._passes_at(h) > now
        ]
        if there.host == rank.host or not since:
            return 0.0
        beat_s = self._world.timeouts.heartbeat_s  # the last acknowledgement came at a different time on each rank
        return now - min(since) + (rank.rank * 0.37) % 1 * beat_s

    def _passes_at(self, host: str) -> float:
        since = self._silent_since[host]
        return since + _said_again(self._cut_off_until[host] - since)

    def split(self, lasts_s: float) -> None:
        """Split the network for ``lasts_s`` seconds.

        A random part of the ranks reaches every controller but the leading one; the rest reaches only the leading one.
        """
        leader = self.controller
        if leader is None:
            return
        ranks, rng = self._world.ranks, self._world.rng
        self._split_until, self._split_from = self._world.now + lasts_s, leader
        if self._world.scenario.relays:  # all ranks of a host are on one side
            apart = {host for host in dict.fromkeys(self._world.scenario.hosts) if rng.random() < 0.5}
            self._beyond = {rank for rank in ranks if ranks[rank].host in apart}
        else:
            self._beyond = {rank for rank in ranks if rng.random() < 0.5}
        self._world.trace("network", f"splits ranks {sorted(self._beyond)} from the others for {lasts_s} s")
        for rank in ranks.values():
            for stream in rank.streams:
                if (rank.rank in self._beyond) == (stream.controller.machine is leader.machine):
                    self._cut(stream)

    def _cut(self, stream: Stream) -> None:
        learns, rng = LEARNS_S, self._world.rng
        stream.cut(rank_learns_s=rng.choice(learns), controller_learns_s=rng.choice(learns))
