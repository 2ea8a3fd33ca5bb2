"""What the protocol of a rank (``ttp.core.rank.machine``) wants done; ``ttp.processor.processor`` does it."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.core.restore_messages import RestoreDecision


@dataclass(frozen=True, slots=True)
class Action:
    """Base of what is to be done: to be matched by its class."""


@dataclass(frozen=True, slots=True)
class LinkAction(Action):
    """Base of what is done with the streams of this rank."""


@dataclass(frozen=True, slots=True)
class Connect(LinkAction):
    """Open a stream; ``StreamUp`` or ``StreamDown`` follows."""

    start_controller: bool  # nobody answers: start one if it may run here
    address: str = ""  # of a standby controller (host:port); empty: where the job says
    within_s: float | None = None  # seconds after which somebody else is asked; None: nobody else could be


@dataclass(frozen=True, slots=True)
class Send(LinkAction):
    """Put a report on the stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class LookAtController(LinkAction):
    """Find out for how long nothing has come from the controller's host on the stream; ``Looked`` is the answer."""


@dataclass(frozen=True, slots=True)
class ConnectAside(LinkAction):
    """Open a second stream, to a controller that stands by; ``AsideUp`` or ``AsideDown`` follows."""

    address: str
    within_s: float


@dataclass(frozen=True, slots=True)
class SendAside(LinkAction):
    """Put a report on the second stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class CloseAside(LinkAction):
    """Close the second stream; nothing of it is of interest any more."""


@dataclass(frozen=True, slots=True)
class CloseGate(Action):
    """Close the gate and say how the state is (``Quiet``).

    ``hurry``: something broke, so that an accelerator that stands still may well hang; it is not waited for.
    """

    hurry: bool = True


@dataclass(frozen=True, slots=True)
class OpenGate(Action):
    """Let the training go on."""


@dataclass(frozen=True, slots=True)
class Redo(Action):
    """Let the training thread, which stands at the gate with the reduced gradient, make exactly one update."""

    version: Version  # what that makes


@dataclass(frozen=True, slots=True)
class StartSave(Action):
    """Write pieces on the saver thread."""

    order: m.Save


@dataclass(frozen=True, slots=True)
class CancelSave(Action):
    """Give up what the saver thread is doing."""


@dataclass(frozen=True, slots=True)
class StartCommit(Action):
    """Commit on the saver thread."""

    order: m.Commit


@dataclass(frozen=True, slots=True)
class HoldLease(Action):
    """Ask the launcher not to stop this process before ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class DropLease(Action):
    """Nothing has to be held back any more."""


@dataclass(frozen=True, slots=True)
class Joined(Action):
    """The controller knows this rank; ``joins``: in the seat of one that has died, in a job that goes on."""

    incarnation: int
    first: bool
    joins: bool = False
    guest: bool = False


@dataclass(frozen=True, slots=True)
class Rejected(Action):
    """The controller does not want this process, which was never part of the job."""

    code: m.RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Decided(Action):
    """The answer to ``RestoreWanted``."""

    decision: RestoreDecision


@dataclass(frozen=True, slots=True)
class LetGo(Action):
    """train() may return; ``rescued`` is false when a broken rank waits in vain and should raise its own error."""

    rescued: bool


@dataclass(frozen=True, slots=True)
class Exit(Action):
    """Leave the process now."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class GoOn(Action):
    """Leave the job, not the process: train() is called again, as a rank of the next incarnation."""

    text: str


@dataclass(frozen=True, slots=True)
class TakeStack(Action):
    """Find out where the threads of a process of this host are."""

    order: m.TakeStack


@dataclass(frozen=True, slots=True)
class ProbeHost(Action):
    """Find out whether another host answers."""

    order: m.Probe


@dataclass(frozen=True, slots=True)
class StartStandby(Action):
    """Start a controller on this host that stands by."""


@dataclass(frozen=True, slots=True)
class NoteRing(Action):
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
class KeepPage(Action):
    """Keep the page of a rank of another host."""

    order: Keep


@dataclass(frozen=True, slots=True)
class NameBuddy(Action):
    """Copies of this rank's shards go there from now on."""

    order: CopyTo


@dataclass(frozen=True, slots=True)
class NameKeeper(Action):
    """Copies of this rank's page go there from now on."""

    order: MirrorTo


@dataclass(frozen=True, slots=True)
class SettleCopy(Action):
    """Whether the copies of ``version`` are whole everywhere: what is not needed any more goes."""

    version: Version
    whole: bool


@dataclass(frozen=True, slots=True)
class ProgramAction(Action):
    """Base of actions of ``program``; whoever tells it of ``ProgramEvent`` carries them out."""


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
        case ConnectAside():
            event = ev.AsideDown(text)
        case LookAtController():
            event = ev.Looked(None)
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
