"""What the protocol of a rank (``ttp.core.rank.machine``) wants done; ``ttp.processor.processor`` does it."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.core.rank import events as ev


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream; ``StreamUp`` or ``StreamDown`` follows."""

    start_controller: bool  # nobody answers: start one if it may run here
    address: str = ""  # of a standby controller (host:port); empty: where the job says
    within_s: float | None = None  # seconds after which somebody else is asked; None: nobody else could be


@dataclass(frozen=True, slots=True)
class Send:
    """Put a report on the stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Close the gate and say how the state is (``Quiet``).

    ``hurry``: something broke, so that an accelerator that stands still may well hang; it is not waited for.
    """

    hurry: bool = True


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Let the training go on."""


@dataclass(frozen=True, slots=True)
class Redo:
    """Let the training thread, which stands at the gate with the reduced gradient, make exactly one update."""

    version: Version  # what that makes


@dataclass(frozen=True, slots=True)
class StartSave:
    """Write pieces on the saver thread."""

    order: m.Save


@dataclass(frozen=True, slots=True)
class CancelSave:
    """Give up what the saver thread is doing."""


@dataclass(frozen=True, slots=True)
class StartCommit:
    """Commit on the saver thread."""

    order: m.Commit


@dataclass(frozen=True, slots=True)
class HoldLease:
    """Ask the launcher not to stop this process before ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class DropLease:
    """Nothing has to be held back any more."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The controller knows this rank."""

    incarnation: int
    first: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The controller does not want this process, which was never part of the job."""

    code: m.RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The answer to ``RestoreWanted``."""

    decision: m.RestoreDecision


@dataclass(frozen=True, slots=True)
class LetGo:
    """train() may return; ``rescued`` is false when a broken rank waits in vain and should raise its own error."""

    rescued: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """Leave the process now."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """Leave the job, not the process: train() is called again, as a rank of the next incarnation."""

    text: str


@dataclass(frozen=True, slots=True)
class TakeStack:
    """Find out where the threads of a process of this host are."""

    order: m.TakeStack


@dataclass(frozen=True, slots=True)
class ProbeHost:
    """Find out whether another host answers."""

    order: m.Probe


@dataclass(frozen=True, slots=True)
class StartStandby:
    """Start a controller on this host that stands by."""


@dataclass(frozen=True, slots=True)
class NoteRing:
    """Leave word on this host of which controller reigns, and which stand by, for those who speak to it from outside.

    Args:
        term: of the controller that reigns.
        address: where it listens (host:port); ``route.HOME``: where the job was started with.
        standbys: where others do.
    """

    term: int
    address: str
    standbys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeepPage:
    """Keep the page of a rank of another host."""

    order: m.Keep


@dataclass(frozen=True, slots=True)
class NameBuddy:
    """Copies of this rank's shards go there from now on."""

    order: m.CopyTo


@dataclass(frozen=True, slots=True)
class NameKeeper:
    """Copies of this rank's page go there from now on."""

    order: m.MirrorTo


@dataclass(frozen=True, slots=True)
class SettleCopy:
    """Whether the copies of ``version`` are whole everywhere: what is not needed any more goes."""

    version: Version
    whole: bool


@dataclass(frozen=True, slots=True)
class ProgramAction:
    """Base of actions of ``program``; whoever tells it of ``ProgramEvent`` carries them out."""


Action = (
    Connect
    | Send
    | CloseGate
    | OpenGate
    | Redo
    | StartSave
    | CancelSave
    | StartCommit
    | HoldLease
    | DropLease
    | Joined
    | Rejected
    | Decided
    | LetGo
    | Exit
    | GoOn
    | TakeStack
    | ProbeHost
    | StartStandby
    | NoteRing
    | KeepPage
    | NameBuddy
    | NameKeeper
    | SettleCopy
    | ProgramAction
)


def not_done(action: Action, text: str) -> ev.Event | None:
    """What to tell the machine of an action that failed, so that it is tried again, or somebody else does it.

    Args:
        action: which one, for example because no thread could be started.
        text: why.
    """
    event: ev.Event | None = None
    match action:
        case Connect():
            event = ev.StreamDown(text)
        case StartSave(order):
            event = ev.WriteFailed(order.incident, order.generation, text)
        case Redo():
            event = ev.NotRedone(f"the update cannot be made: {text}")
        case StartCommit(order):
            event = ev.CommitBroken(order.incident, order.generation, text)
        case StartStandby():
            event = ev.StandbyStarted("")
        case ProbeHost(order):
            event = ev.HostProbed(order.subject, False, text)
    return event
