"""What happens to a rank, as its protocol (``ttp.core.rank.machine``) is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version


@dataclass(frozen=True, slots=True)
class StreamUp:
    """The stream is open; nothing was said yet."""


@dataclass(frozen=True, slots=True)
class StreamDown:
    """The stream could not be opened, or ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """The controller said something."""

    order: m.Order


@dataclass(frozen=True, slots=True)
class Quiet:
    """The state under the closed gate became stable, or changed what can be said of it."""

    version: Version
    phase: m.Phase
    parked: bool
    post_step_done: bool
    has_gradient: bool = False
    has_preimage: bool = False
    digests: tuple[m.ShardDigest, ...] = ()
    bad: tuple[str, ...] = ()
    kept: tuple[m.KeptCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class NotRedone:
    """The training thread does not stand at the gate: ``Redo`` cannot be done."""

    text: str


@dataclass(frozen=True, slots=True)
class PiecesWritten:
    """A save ended well: everything is durable."""

    incident: str
    generation: int
    pieces: tuple[m.Piece, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A save ended badly; ``may_pass``: it was the storage that refused, and later it may not."""

    incident: str
    generation: int
    text: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class CommitDone:
    """The checkpoint exists."""

    incident: str
    generation: int
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class CommitBroken:
    """The checkpoint could not be made to exist; ``may_pass`` as for ``WriteFailed``."""

    incident: str
    generation: int
    text: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Raised:
    """This rank cannot train on: an exception, a SIGTERM. ``wrong``: see ``Fault``."""

    kind: m.FaultKind
    text: str
    detail: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """train() has returned, or the user left it on purpose."""

    reason: m.GoodbyeReason


@dataclass(frozen=True, slots=True)
class RestoreWanted:
    """restore() was called."""

    candidates: tuple[m.Candidate, ...]
    skipped: tuple[str, ...]
    readings: tuple[m.Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Based:
    """The state was set to ``version``: nothing newer has been trained in this process."""

    version: Version


@dataclass(frozen=True, slots=True)
class Observed:
    """Time has passed; this is where the rank stands."""

    version: Version
    phase: m.Phase
    mark: int = 0
    activity: str = ""
    written: int = 0
    urgent: bool = False  # to be said at once


@dataclass(frozen=True, slots=True)
class ProgramEvent:
    """Base of events that only ``program`` understands."""


@dataclass(frozen=True, slots=True)
class NeighbourDied:
    """A process of this host has ended: seen here before anybody else can."""

    rank: Rank
    nonce: str
    text: str


@dataclass(frozen=True, slots=True)
class StackSeen:
    """The answer to ``TakeStack``."""

    incident: str
    subject: Rank
    text: str


@dataclass(frozen=True, slots=True)
class HostProbed:
    """The answer to ``ProbeHost``."""

    subject: Rank
    reachable: bool
    text: str


@dataclass(frozen=True, slots=True)
class StandbyStarted:
    """The answer to ``StartStandby``; an empty address: it could not be started."""

    address: str


@dataclass(frozen=True, slots=True)
class CopyMade:
    """The copy of ``version`` is whole here and at the buddy; or, with ``stored`` false, it came to nothing."""

    version: Version
    stored: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopySkipped:
    """It was the turn of ``version`` while it was not known yet what became of the one before."""

    version: Version


Event = (
    StreamUp
    | StreamDown
    | OrderReceived
    | Quiet
    | NotRedone
    | PiecesWritten
    | WriteFailed
    | CommitDone
    | CommitBroken
    | Raised
    | Returned
    | RestoreWanted
    | Based
    | Observed
    | NeighbourDied
    | StackSeen
    | HostProbed
    | StandbyStarted
    | CopyMade
    | CopySkipped
    | ProgramEvent
)
