"""The events that the controller's machine takes, the actions that it returns, and its timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """After a takeover: ranks that have not said hello are lost once no other rank has said hello for this time.

    After two thirds of that time a minority is sent to another controller.
    """
    silent_s: float = 3.0
    """A rank that was silent for longer before its stream ended may be cut off, with its host, instead of dead."""
    partition_s: float = 10.0
    """Time that a rank has to come back if a rank on a third host still reaches its host."""
    stall_s: float = 60.0
    """Time for which a save or commit may write no byte before it counts as failed."""
    second_look_s: float = 5.0
    """Time that ranks suspected of a hang have to reach the gate, while all ranks are frozen."""
    hope_s: float = 2.0
    """Time that running ranks have to supply what a newer consistent checkpoint lacks."""
    whole_s: float = 30.0
    """Time that running ranks without a whole copy have to get one again, if too few others have one."""
    quiet_s: float | None = 1.25
    """Silence of all ranks of a host after which the host is looked at: more than a heartbeat. None: never look."""
    doubt_s: float = 2.0
    """Silence of a host, its kernel included, after which it is in doubt: all other hosts are frozen and saved."""
    doubt_max_s: float = 15.0
    """Longest doubt about a host; the streams of a dead host end before that."""
    meanwhile_s: float = 0.75
    """While a controller is silent: a standby waits this long after each rank that came, before it saves."""
    hang_s: float | None = None
    """Seconds without progress that never count as a hang, however fast the job is; None: hangs are not detected."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a rank."""
    standbys: int = 2
    """Number of standby controllers on other hosts."""
    exit_s: float = 10.0
    """After a release: time that ranks have to exit."""
    abandoned_s: float = 120.0
    """Time for which the controller goes on without any rank."""
    forming_s: float = 120.0
    """After a takeover: time to wait for ranks of a job that never trained; they may not have started yet."""
    linger_s: float = 2.0
    """After the last goodbye: time for which the controller still answers questions."""


TIMER_LATE_S = 0.5
"""Seconds by which a timer may be late; a longer delay shows that the controller did not run."""
LATE_MAX = 3
"""Graces in a row that begin again for lost ranks because this timer was late. Between two of them the controller reads
what has come, so a rank that is not back after the third is lost: the controller is slow then, and was not stopped.
"""
QUEUE_FROM, QUEUE_S = 100, 0.001
"""Each rank beyond the first ``QUEUE_FROM`` adds ``QUEUE_S`` seconds to a timeout; see ``in_queue``."""


def in_queue(seconds: float, ranks: int) -> float:
    """Return the timeout ``seconds``, extended for a controller of many ranks: it serves them one after the other."""
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
    """Several ranks have sent the same heartbeat or answer to a freeze; its rank is ``SEVERAL``."""

    who: Who
    report: m.Heartbeat | m.Frozen


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """A stream has ended, for whatever reason."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    """A checkpoint was requested; ``again``: all ranks then go on from it as after a death, as a trial of that."""

    request: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Accused(Event):
    """Evidence against some ranks from outside of the job.

    ``pids`` are the processes of the ranks, 0 where unknown; ``pages`` are the pages that dead ranks left behind.
    """

    ranks: tuple[Rank, ...]
    kind: m.FaultKind
    reason: str
    pids: tuple[int, ...] = ()
    pages: tuple[Mirror, ...] = ()
    seat: str = ""
    """``ready`` if the launcher of these ranks can start them alone; else why it cannot; empty if that is unknown."""


@dataclass(frozen=True, slots=True)
class LauncherSaid(Event):
    """A launcher starts ranks (``starts``), or is about to exit and would do so with ``code``."""

    host: str
    starts: bool
    code: int


@dataclass(frozen=True, slots=True)
class HostsDrained(Event):
    """The launchers of these hosts must not start ranks again, because other hosts take over their ranks."""

    hosts: frozenset[str]
    drained: bool = True
    """False: the hosts are no longer drained."""


@dataclass(frozen=True, slots=True)
class RankWasWrong(Event):
    """A rank has exited with 64, or will: its configuration or its program is wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Remembered(Event):
    """What earlier launches, and controllers that led this launch before, have recorded on disk.

    Args:
        fruitless: how many launches before this one brought no new version.
        progress: this launch has brought one.
        saved: version and path of the last checkpoint of this launch; None: there is none.
        wrong: why a rank has exited with 64; empty: none has.
        drained: hosts whose launchers must not start ranks again.
        hosts: the host of each rank, as far as it is recorded.
        stood_s: the longest wait, in seconds, that was recorded lately (``stood_still``); 0: none was.
        present: whether there is a record of this launch, i.e. of the controllers that led it before.
    """

    fruitless: int
    progress: bool
    saved: tuple[Version, str] | None = None
    wrong: str = ""
    drained: frozenset[str] = frozenset()
    hosts: Mapping[Rank, str] = field(default_factory=dict)
    stood_s: float = 0.0
    present: bool = False


@dataclass(frozen=True, slots=True)
class LedElsewhere(Event):
    """Ranks of this host have written down that a controller of this term leads their job."""

    run_id: str
    incarnation: int
    term: int


@dataclass(frozen=True, slots=True)
class ProgramEvent(Event):
    """Base of events that only ``program_recovery`` understands."""


@dataclass(frozen=True, slots=True)
class LookedAt(Event):
    """The answer to ``LookAt``: seconds since the kernel received anything from a host; None: unknown."""

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
    """Send the same order on several streams; its rank is ``SEVERAL``."""

    who: Who
    order: m.Order


@dataclass(frozen=True, slots=True)
class Record(Action):
    """Write a line to the incident's file, and send it to everybody who watches."""

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
    """Base of actions of ``program_recovery``, carried out by the part that makes ``ProgramEvent``."""


@dataclass(frozen=True, slots=True)
class LookAt(Action):
    """Ask the kernel how long the streams of a host have received nothing; the answer is ``LookedAt``."""

    host: str
    connections: tuple[ConnectionId, ...]


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """Stop the controller, because it is no longer needed."""

    reason: str
