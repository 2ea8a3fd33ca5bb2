"""Events that a rank's machine (``ttp.core.rank.machine``) is fed."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.core.restore_messages import Candidate, Reading


@dataclass(frozen=True, slots=True)
class Event:
    """Base of events, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class StreamUp(Event):
    """The stream is open; nothing was said yet."""


@dataclass(frozen=True, slots=True)
class StreamDown(Event):
    """The stream could not be opened, or ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class OrderReceived(Event):
    """An order of the controller has arrived."""

    order: m.Order


@dataclass(frozen=True, slots=True)
class AsideEvent(Event):
    """Base of events of the second stream, and of what leads to one; see ``ttp.core.rank.stand_in``."""


@dataclass(frozen=True, slots=True)
class Looked(AsideEvent):
    """The seconds since anything came from the controller's host; None if this stream cannot tell."""

    silent_s: float | None


@dataclass(frozen=True, slots=True)
class AsideUp(AsideEvent):
    """The second stream is open; nothing was said yet."""


@dataclass(frozen=True, slots=True)
class AsideDown(AsideEvent):
    """The second stream could not be opened, or ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class AsideOrder(AsideEvent):
    """An order of the controller that stands in has arrived."""

    order: m.Order


@dataclass(frozen=True, slots=True)
class Quiet(Event):
    """The state behind the closed gate has become stable, or what can be reported of it has changed."""

    version: Version
    phase: m.Phase
    parked: bool
    post_step_done: bool
    has_gradient: bool = False
    has_preimage: bool = False
    digests: tuple[m.ShardDigest, ...] = ()
    bad: tuple[str, ...] = ()
    kept: tuple[m.KeptCopy, ...] = ()
    hold_dir: str = ""
    held: Version = Version(0)  # noqa: RUF009 - a number


@dataclass(frozen=True, slots=True)
class NotRedone(Event):
    """The training thread does not stand at the gate, so ``Redo`` cannot be done."""

    text: str


@dataclass(frozen=True, slots=True)
class PiecesWritten(Event):
    """A save has succeeded: all pieces are durable."""

    incident: str
    generation: int
    pieces: tuple[m.Piece, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed(Event):
    """A save has failed; ``may_pass``: the storage refused, and may accept later."""

    incident: str
    generation: int
    text: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class CommitDone(Event):
    """A commit has succeeded: the checkpoint exists."""

    incident: str
    generation: int
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class CommitBroken(Event):
    """A commit has failed; ``may_pass`` as for ``WriteFailed``."""

    incident: str
    generation: int
    text: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Raised(Event):
    """This rank cannot train on: an exception, a SIGTERM. ``wrong``: see ``Fault``."""

    kind: m.FaultKind
    text: str
    detail: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """train() has returned, or the user left it on purpose."""

    reason: m.GoodbyeReason


@dataclass(frozen=True, slots=True)
class RestoreWanted(Event):
    """restore() was called."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[str, ...]
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Based(Event):
    """The state was set to ``version``, from ``size`` bytes: nothing newer has been trained in this process."""

    version: Version
    size: int = 0


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """Time has passed; this is the rank's present version and progress."""

    version: Version
    phase: m.Phase
    mark: int = 0
    activity: str = ""
    written: int = 0
    urgent: bool = False  # send the heartbeat at once


@dataclass(frozen=True, slots=True)
class ProgramEvent(Event):
    """Base of events that only ``program`` understands."""


@dataclass(frozen=True, slots=True)
class NeighbourDied(Event):
    """A process of this host has ended. The rank sees it before anybody else can."""

    rank: Rank
    nonce: str
    text: str


@dataclass(frozen=True, slots=True)
class StackSeen(Event):
    """The answer to ``TakeStack``."""

    incident: str
    subject: Rank
    text: str


@dataclass(frozen=True, slots=True)
class HostProbed(Event):
    """The answer to ``ProbeHost``."""

    subject: Rank
    reachable: bool
    text: str


@dataclass(frozen=True, slots=True)
class StandbyStarted(Event):
    """The answer to ``StartStandby``; an empty address: the controller could not be started."""

    address: str


@dataclass(frozen=True, slots=True)
class CopyMade(Event):
    """The copy of ``version`` is whole here and at the buddy; or, with ``stored`` false, it has failed."""

    version: Version
    stored: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopySkipped(Event):
    """The turn of ``version`` came while the copy before it was not settled yet."""

    version: Version
