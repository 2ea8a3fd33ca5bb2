"""The parts of a state of the model check; see ``model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.core.machines import GONE
from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.rank.machine import ProcessorMachine

PATIENCE = ControllerTimeouts(
    answer_s=5,
    freeze_s=30,
    grace_s=1,
    rescue_s=360,
    gather_s=5,
    exit_s=10,
    abandoned_s=1e6,
    forming_s=1e6,
    linger_s=1,
    standbys=0,
    quiet_s=None,
)
RANK_TIMEOUTS = RankTimeouts(
    heartbeat_s=1e9,
    rescue_s=400,
    alone_s=1e8,
    start_controller_after=10**9,
    retry_min_s=0,
    retry_max_s=0,
    failover_s=0,
)
LOOK_S = 0.5
"""Seconds between two looks of a controller that waits two seconds for a newer version.

In a job it looks more often, and loses no time. Here nothing happens in between: time passes when nothing else can.
"""
BASE = Version(1)
END = "end"
RIVAL = "rival"
"""Address and host of the second controller."""


class Broken(AssertionError):  # noqa: N818 - it is what it says
    """An invariant does not hold; the text ends with the moves that led to the state."""


class Gate(NamedTuple):
    """The gate of one rank. An update can begin if the rank has left the barrier."""

    version: Version = BASE
    base: Version = BASE
    updating: bool = False
    closed: bool = False
    acked: bool = False
    parked: bool = False
    admitted: bool = False
    away: bool = False  # it has left the closed gate, and does not come again

    @property
    def phase(self) -> m.Phase:
        return m.Phase.UPDATING if self.updating else m.Phase.IDLE

    def seen(self, kept: tuple[m.KeptCopy, ...], *, preimages: bool) -> ev.Quiet:
        """Return what the gate's owner sees while the gate is closed."""
        back = preimages and self.version > self.base and not self.updating
        return ev.Quiet(
            self.version, self.phase, self.parked, True, has_gradient=self.parked, has_preimage=back, kept=kept
        )


class Process(NamedTuple):
    """The process of one rank in jobs whose survivors go on; see ``model_keep``."""

    launch: int = 0
    until: float | None = None  # it has nothing to lose, and may take so long
    restored: bool = False
    reported: bool = False  # its end, by its launcher


class _Fields(NamedTuple):
    controllers: tuple[int, ...]  # numbers of machines
    ranks: tuple[int, ...]
    exits: tuple[int | None, ...]
    streams: tuple[int, ...]  # 0: none, its rank wants to connect; else its remainder says to which controller
    up: tuple[tuple[tuple[int, Any], ...], ...]  # (stream, what is said on it)
    down: tuple[tuple[Any, ...], ...]
    gates: tuple[Gate, ...]
    jobs: tuple[tuple[Any, ...], ...]
    durable: frozenset[tuple[str, str, Version]]  # file, shard, version of its content
    committed: tuple[Version, ...]
    kills: int
    breaks: int
    takeovers: int
    repeats: int
    opened: tuple[int, ...]  # streams so far, of each rank
    now: float
    processes: tuple[Process, ...] = ()  # these four: see ``model_keep``
    launchers: tuple[str, ...] = ()  # of each host: what it has done for the next launch
    quits: tuple[int, int, int] = (0, 0, 0)  # that may still give up; launchers, and slanders
    stuck: bool = False  # who died in the new launch had not given its gradient
    asides: tuple[int, ...] = ()  # these three: see ``model_aside``. Second streams; 0: none
    aside_down: tuple[tuple[Any, ...], ...] = ()
    silent: tuple[bool, ...] = ()
    held: frozenset[Version] = frozenset()  # these three: see ``model_shadow``. Committed, to memory only as yet
    in_memory: frozenset[str] = frozenset()  # files that were written there
    refusals: int = 0  # that memory, or the storage, may still give
    leaves: int = 0  # ranks that may still leave the gate


_PLACES = {name: place for place, name in enumerate(_Fields._fields)}


class State(_Fields):
    """A state of the whole world; see ``model``."""

    __slots__ = ()

    def _replace(self, **changes: Any) -> State:
        """Do what a named tuple does, in half the time: it happens for every part of every move."""
        values = list(self)
        for name, value in changes.items():
            values[_PLACES[name]] = value
        return tuple.__new__(State, values)

    def at_gate(self, r: int, **changes: Any) -> State:
        return self._replace(gates=put(self.gates, r, self.gates[r]._replace(**changes)))

    def of(self, r: int, **changes: Any) -> State:
        """Return the state with changes to the process of a rank."""
        return self._replace(processes=put(self.processes, r, self.processes[r]._replace(**changes)))

    def told(self, stream: int, order: Any) -> State:
        """Return the state after a controller sends on a stream. The message is lost if the stream has ended."""
        if stream in self.streams:
            r = self.streams.index(stream)
            return self._replace(down=put(self.down, r, (*self.down[r], order)))
        if stream in self.asides:
            r = self.asides.index(stream)
            return self._replace(aside_down=put(self.aside_down, r, (*self.aside_down[r], order)))
        return self

    def cut(self, r: int, *, keep: bool) -> State:
        """Return the state after the stream of a rank ends. With ``keep`` reports that were sent on it arrive."""
        stream = self.streams[r]
        said = tuple(s for s in self.up[r] if keep or s[0] != stream)
        end = ((stream, END),) if stream else ()
        return self._replace(
            streams=put(self.streams, r, 0), up=put(self.up, r, (*said, *end)), down=put(self.down, r, ())
        )

    def gone(self, r: int, code: int | None, *, keep: bool) -> State:
        """Return the state after a rank ends with ``code``; None: it was killed.

        What is not read of a rank that has ended is forgotten, because states that differ only in that go on alike.
        """
        state = (
            self.cut(r, keep=keep)
            .without_gate(r)
            ._replace(
                ranks=put(self.ranks, r, GONE),
                exits=put(self.exits, r, -9 if code is None else code),
                jobs=put(self.jobs, r, ()),
            )
        )
        if state.silent:
            state = state._replace(silent=put(state.silent, r, False))
        return state.of(r, until=None) if state.processes else state

    def without_gate(self, r: int) -> State:
        """Return the state after a rank leaves its loop. Only what it has made in a later launch is read still."""
        gate = self.gates[r]
        again = bool(self.processes and self.processes[r].launch)
        gone = Gate(gate.version, gate.base, gate.updating) if again else Gate()
        return self._replace(gates=put(self.gates, r, gone))

    def new_stream(self, r: int, place: int) -> tuple[State, int]:
        """Return the state with a further stream of a rank, and its number.

        The number does not tell which of two ranks was earlier, because controllers compare only streams of one rank.
        """
        count = self.opened[r] + 1
        number = 2 * (1 + r + count * len(self.ranks)) + place
        return self._replace(opened=put(self.opened, r, count)), number


@dataclass(frozen=True)
class Names:
    """Names of incidents, unique among controllers."""

    controller: int

    def __call__(self, number: int) -> str:
        return f"i{self.controller}.{number}"


def deadline_of(machine: Any) -> float | None:
    due: float | None = machine.deadline()
    return due


def address_of(machine: ProcessorMachine) -> str:
    return machine._route.address


def incident_of(machine: ProcessorMachine) -> str:
    return machine.incident


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def story(path: Any) -> str:
    steps: list[str] = []
    while path:
        path, name = path
        steps.append(name)
    return "after: " + ", ".join(reversed(steps))
