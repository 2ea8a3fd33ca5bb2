"""Events that the controller's machine is told, and actions that it wants done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

from ttp.core import messages as m
from ttp.core.copy_messages import Mirror
from ttp.core.layout import Rank, Version

ConnectionId = NewType("ConnectionId", int)
Who = tuple[tuple[ConnectionId, Rank], ...]
"""Streams, and the ranks that they are of."""


@dataclass(frozen=True, slots=True)
class ControllerTimeouts:
    """How long the controller waits for what, in seconds. See ``ttp.config.Config`` for the reasons."""

    answer_s: float = 5.0
    freeze_s: float = 30.0
    grace_s: float = 1.0
    rescue_s: float = 360.0
    gather_s: float = 3.0
    """After a takeover: who has not said hello when no other rank has for so long is lost. After two thirds of it a
    minority is sent on."""
    silent_s: float = 3.0
    """A rank that said nothing for so long before its stream ended is on a host that may be cut off, not dead."""
    partition_s: float = 10.0
    """How long a rank may take to come back whose host a second witness still reaches."""
    stall_s: float = 60.0
    """How long a save or commit may go without writing a byte."""
    second_look_s: float = 5.0
    """How long ranks that are suspected to hang have to show that they do not, while nobody trains."""
    hope_s: float = 2.0
    """How long ranks have to bring what is missing for a consistent checkpoint before it is given up."""
    quiet_s: float | None = 1.25
    """A host from which no rank was heard for so long is looked at: more than a heartbeat. None: none is."""
    doubt_s: float = 2.0
    """A host from which nothing at all came for so long is in doubt: all others are frozen and saved."""
    doubt_max_s: float = 15.0
    """A doubt for so long is none any more; streams end before that."""
    meanwhile_s: float = 0.75
    """While a controller is silent: how long after the last rank that came to a standby others may still come there."""
    hang_s: float | None = None
    """Seconds without progress that are never a hang, however fast the job is; None: hangs are not looked for."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a rank."""
    standbys: int = 2
    """Controllers that stand by on other hosts."""
    exit_s: float = 10.0
    """After a release: how long ranks have to leave."""
    abandoned_s: float = 120.0
    """How long it goes on without any rank."""
    forming_s: float = 120.0
    """After a takeover: how long ranks of a job that never trained are waited for; they may not have begun."""
    linger_s: float = 2.0
    """After the last goodbye: how long the controller still answers questions."""


QUEUE_FROM, QUEUE_S = 100, 0.001
"""From so many ranks on that speak at once, each adds so much to the time that they are given."""


def in_queue(seconds: float, ranks: int) -> float:
    """``seconds``, where one controller reads what so many ranks say: one of ten thousand waits behind the others."""
    return seconds + QUEUE_S * max(0, ranks - QUEUE_FROM)


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Base of what happens: to be matched by its class."""


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A rank's report came in on a stream."""

    connection: ConnectionId
    report: m.Report


@dataclass(frozen=True, slots=True)
class ReceivedAlike(Event):
    """A heartbeat, or an answer to a freeze, as each of these said it on its stream; it names ``SEVERAL``."""

    who: Who
    report: m.Heartbeat | m.Frozen


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """A stream ended, for whatever reason."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    """Somebody wants a checkpoint now; ``again``: and all ranks to go on from it as after a death, for a trial."""

    request: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Accused(Event):
    """Evidence from outside of the job against some ranks; ``pages`` are what is left of dead ones."""

    ranks: tuple[Rank, ...]
    kind: m.FaultKind
    reason: str
    pids: tuple[int, ...] = ()
    pages: tuple[Mirror, ...] = ()
    seat: str = ""
    """``ready``: their launcher can start these ranks alone; else why it cannot; empty: nobody has said."""


@dataclass(frozen=True, slots=True)
class LauncherSaid(Event):
    """A launcher starts ranks, or is at its end and would leave with ``code``."""

    host: str
    starts: bool
    code: int


@dataclass(frozen=True, slots=True)
class HostsDrained(Event):
    """The launchers of these hosts are not to start ranks again: other hosts take their places."""

    hosts: frozenset[str]
    drained: bool = True
    """False: that is taken back."""


@dataclass(frozen=True, slots=True)
class RankWasWrong(Event):
    """A rank has left with 64, or will: its configuration or its program is wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Remembered(Event):
    """What was written down of earlier launches: see ``JobVerdict.remember``."""

    fruitless: int
    progress: bool


@dataclass(frozen=True, slots=True)
class ProgramEvent(Event):
    """Base of events that only ``program_recovery`` understands."""


@dataclass(frozen=True, slots=True)
class LookedAt(Event):
    """For how long nothing has come from a host, seen from outside of its processes; None: nobody can tell."""

    host: str
    silent_s: float | None


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


# ------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Action:
    """Base of what is to be done: to be matched by its class."""


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Put an order on a stream."""

    connection: ConnectionId
    order: m.Order


@dataclass(frozen=True, slots=True)
class SendAlike(Action):
    """Put the same order on several streams; it names ``SEVERAL``."""

    who: Who
    order: m.Order


@dataclass(frozen=True, slots=True)
class Record(Action):
    """Write a line to the file of the incident, and to everybody who watches."""

    kind: str
    incident: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerSave(Action):
    """The answer to a ``SaveRequested``."""

    request: int
    saved: bool
    version: Version
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class ProgramAction(Action):
    """Base of actions of ``program_recovery``; whoever feeds ``ProgramEvent`` carries them out."""


@dataclass(frozen=True, slots=True)
class LookAt(Action):
    """Find out for how long nothing has come from a host, by its streams; the answer is ``LookedAt``."""

    host: str
    connections: tuple[ConnectionId, ...]


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """The controller is not needed any more."""

    reason: str
