"""The events that a rank's machine (``ttp.core.rank.machine``) takes, which ``ttp.processor`` makes; its timeouts."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.core.restore_messages import Candidate, Reading


@dataclass(frozen=True, slots=True)
class RankTimeouts:
    """Timeouts of a rank's machine, in seconds."""

    heartbeat_s: float = 1.0
    rescue_s: float = 360.0
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    alone_s: float = 20.0
    """How long a rank that is broken or has finished waits for a controller that cannot be reached."""
    start_controller_after: int = 2
    """Failed attempts after which a controller is started, if one may run on this host."""
    failover_s: float = 0.5
    """How long a lost controller is tried again before a standby controller is asked to take over."""
    connect_s: float = 1.0
    """How long a controller may take to answer if others could take over; doubled with each round of the ring."""
    doubt_s: float = 2.0
    """Silence of the controller's host after which a standby controller is asked to save meanwhile."""
    redo_s: float = 30.0
    """How long an update for a redo may take."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of events, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class StreamUp(Event):
    """The stream is open; no message was sent yet."""


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
    """Base of events of the second stream, and of ``Looked``, which may open it; see ``ttp.core.rank.stand_in``."""


@dataclass(frozen=True, slots=True)
class Looked(AsideEvent):
    """The answer to ``LookAtController``: seconds since anything came from the controller's host; None: unknown."""

    silent_s: float | None


@dataclass(frozen=True, slots=True)
class AsideUp(AsideEvent):
    """The second stream is open; no message was sent yet."""


@dataclass(frozen=True, slots=True)
class AsideDown(AsideEvent):
    """The second stream could not be opened, or ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class AsideOrder(AsideEvent):
    """An order of the stand-in has arrived on the second stream."""

    order: m.Order


@dataclass(frozen=True, slots=True)
class Quiet(Event):
    """The state behind the closed gate, sent when it is stable and whenever one of these facts changes.

    ``parked``: the training thread stands at the gate, or has left its loop with an error.
    """

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
    cannot_continue: str = ""


@dataclass(frozen=True, slots=True)
class NotRedone(Event):
    """``Redo`` cannot be done, because the training thread does not stand at the gate; ``text``: the reason.

    It answers the last ``Redo``: there is no other until this one is refused, or its update is over.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Worked(Event):
    """A save or a commit is over: all pieces are durable, the checkpoint exists, or it has failed."""

    result: m.Saved | m.SaveFailed | m.Committed | m.CommitFailed


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
    """restore() was called; the checkpoints found here, as in ``RestoreView``."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[str, ...]
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Based(Event):
    """The state was set to ``version``, read from ``size`` bytes; this process has made no update since."""

    version: Version
    size: int = 0


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """Time has passed; the rank's present version and progress, as in ``Heartbeat``."""

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
class Tell(Event):
    """A fact for the controller: the answer to ``TakeStack`` or ``Probe``, or the end of another process here."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class StandbyStarted(Event):
    """The answer to ``StandBy``; an empty address: the controller could not be started."""

    address: str


@dataclass(frozen=True, slots=True)
class CopyMade(Event):
    """The copy of ``version`` is complete here and at the buddy (``stored``), or has failed because of ``text``."""

    version: Version
    stored: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopySkipped(Event):
    """The copy of ``version`` was skipped, because the copy before it was not settled yet."""

    version: Version
