"""Events that the controller's machine is fed, and actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

from ttp.core import messages as m
from ttp.core.copy_messages import Mirror
from ttp.core.layout import Rank, Version

ConnectionId = NewType("ConnectionId", int)
Who = tuple[tuple[ConnectionId, Rank], ...]
"""Streams, and the rank of each."""


@dataclass(frozen=True, slots=True)
class ControllerTimeouts:
    """The controller's timeouts, in seconds. See ``ttp.config.Config`` for the reasons."""

    answer_s: float = 5.0
    freeze_s: float = 30.0
    grace_s: float = 1.0
    rescue_s: float = 360.0
    gather_s: float = 3.0
    """After a takeover: a rank that has not said hello is lost once no other rank has come for so long. After two
    thirds of that time a minority is sent to another controller.
    """
    silent_s: float = 3.0
    """Silence before the end of its stream after which a rank counts as on a host that may be cut off, not as dead."""
    partition_s: float = 10.0
    """Time that a rank has to come back if a second witness still reaches its host."""
    stall_s: float = 60.0
    """Time for which a save or commit may write no byte before it counts as failed."""
    second_look_s: float = 5.0
    """Time that ranks suspected to hang have to show that they do not, while no rank trains."""
    hope_s: float = 2.0
    """Time that ranks have to bring what a consistent checkpoint lacks, before it is given up."""
    quiet_s: float | None = 1.25
    """Silence of all ranks of a host after which the host is looked at: more than a heartbeat. None: no host is."""
    doubt_s: float = 2.0
    """Silence of a host, even of its kernel, after which it is in doubt: all other hosts are frozen and saved."""
    doubt_max_s: float = 15.0
    """Longest doubt about a host; the streams of a dead host end before that."""
    meanwhile_s: float = 0.75
    """While a controller is silent: time that ranks have to come to a standby, from the last one that came."""
    hang_s: float | None = None
    """Seconds without progress that are never a hang, however fast the job is; None: hangs are not looked for."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a rank."""
    standbys: int = 2
    """Number of standby controllers on other hosts."""
    exit_s: float = 10.0
    """After a release: time that ranks have to leave."""
    abandoned_s: float = 120.0
    """Time for which the controller goes on without any rank."""
    forming_s: float = 120.0
    """After a takeover: time to wait for ranks of a job that never trained; they may not have started yet."""
    linger_s: float = 2.0
    """After the last goodbye: time for which the controller still answers questions."""


QUEUE_FROM, QUEUE_S = 100, 0.001
"""Ranks that speak at once beyond ``QUEUE_FROM`` each add ``QUEUE_S`` seconds to the time that they are given."""


def in_queue(seconds: float, ranks: int) -> float:
    """Return ``seconds``, extended for many ranks of one controller: one of ten thousand waits behind the others."""
    return seconds + QUEUE_S * max(0, ranks - QUEUE_FROM)


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Base of events, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A rank's report has arrived on a stream."""

    connection: ConnectionId
    report: m.Report


@dataclass(frozen=True, slots=True)
class ReceivedAlike(Event):
    """A heartbeat, or an answer to a freeze, that several ranks have sent alike; it names ``SEVERAL``."""

    who: Who
    report: m.Heartbeat | m.Frozen


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """A stream has ended, for whatever reason."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    """A checkpoint is requested now; ``again``: all ranks shall then go on from it as after a death, for a trial."""

    request: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Accused(Event):
    """Evidence from outside of the job against some ranks; ``pages`` are those that dead ranks left behind."""

    ranks: tuple[Rank, ...]
    kind: m.FaultKind
    reason: str
    pids: tuple[int, ...] = ()
    pages: tuple[Mirror, ...] = ()
    seat: str = ""
    """``ready`` if their launcher can start these ranks alone; else why it cannot; empty if that is not known."""


@dataclass(frozen=True, slots=True)
class LauncherSaid(Event):
    """A launcher starts ranks, or is at its end and would leave with ``code``."""

    host: str
    starts: bool
    code: int


@dataclass(frozen=True, slots=True)
class HostsDrained(Event):
    """The launchers of these hosts must not start ranks again: other hosts take their places."""

    hosts: frozenset[str]
    drained: bool = True
    """False: the hosts are no longer drained."""


@dataclass(frozen=True, slots=True)
class RankWasWrong(Event):
    """A rank has left with 64, or will: its configuration or its program is wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Remembered(Event):
    """The recorded results of earlier launches: see ``JobVerdict.remember``."""

    fruitless: int
    progress: bool


@dataclass(frozen=True, slots=True)
class ProgramEvent(Event):
    """Base of events that only ``program_recovery`` understands."""


@dataclass(frozen=True, slots=True)
class LookedAt(Event):
    """The seconds since anything came from a host, seen from outside of its processes; None: that cannot be told."""

    host: str
    silent_s: float | None


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


# ------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Action:
    """Base of actions, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Send an order on a stream."""

    connection: ConnectionId
    order: m.Order


@dataclass(frozen=True, slots=True)
class SendAlike(Action):
    """Send the same order on several streams; it names ``SEVERAL``."""

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
    """Base of actions of ``program_recovery``; the part that feeds ``ProgramEvent`` carries them out."""


@dataclass(frozen=True, slots=True)
class LookAt(Action):
    """Find out for how long nothing has come from a host, by its streams; the answer is ``LookedAt``."""

    host: str
    connections: tuple[ConnectionId, ...]


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """Stop the controller, which is not needed any more."""

    reason: str
