"""Actions that a rank's machine (``ttp.core.rank.machine``) returns; ``ttp.processor.processor`` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.core.restore_messages import RestoreDecision


@dataclass(frozen=True, slots=True)
class Action:
    """Base of actions, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class LinkAction(Action):
    """Base of actions on the streams of this rank."""


@dataclass(frozen=True, slots=True)
class Connect(LinkAction):
    """Open a stream; ``StreamUp`` or ``StreamDown`` follows."""

    start_controller: bool  # if nobody answers, start a controller if it may run here
    address: str = ""  # of a standby controller (host:port); empty: the job's own address
    within_s: float | None = None  # seconds after which another controller is asked; None: there is no other


@dataclass(frozen=True, slots=True)
class Send(LinkAction):
    """Send a report on the stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class LookAtController(LinkAction):
    """Find out for how long nothing has come from the controller's host on the stream; ``Looked`` is the answer."""


@dataclass(frozen=True, slots=True)
class ConnectAside(LinkAction):
    """Open a second stream, to a standby controller; ``AsideUp`` or ``AsideDown`` follows."""

    address: str
    within_s: float


@dataclass(frozen=True, slots=True)
class SendAside(LinkAction):
    """Send a report on the second stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class CloseAside(LinkAction):
    """Close the second stream; nothing that arrives on it matters any more."""


@dataclass(frozen=True, slots=True)
class CloseGate(Action):
    """Close the gate and report the state behind it (``Quiet``).

    ``hurry``: something broke, so an accelerator that does not move may well hang and is not waited for.
    """

    hurry: bool = True


@dataclass(frozen=True, slots=True)
class OpenGate(Action):
    """Open the gate: training goes on."""


@dataclass(frozen=True, slots=True)
class Redo(Action):
    """Let the training thread, which stands at the gate with the reduced gradient, make exactly one update."""

    version: Version  # the version that the update makes


@dataclass(frozen=True, slots=True)
class StartSave(Action):
    """Write pieces on the saver thread."""

    order: m.Save


@dataclass(frozen=True, slots=True)
class CancelSave(Action):
    """Cancel the save that the saver thread is making."""


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
    """Withdraw the request to the launcher: it may stop this process."""


@dataclass(frozen=True, slots=True)
class Joined(Action):
    """The controller has welcomed this rank; ``joins``: into the seat of a dead rank, in a job that goes on."""

    incarnation: int
    first: bool
    joins: bool = False
    guest: bool = False


@dataclass(frozen=True, slots=True)
class Rejected(Action):
    """The controller has refused this process, which was never part of the job."""

    code: m.RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Decided(Action):
    """The answer to ``RestoreWanted``."""

    decision: RestoreDecision


@dataclass(frozen=True, slots=True)
class LetGo(Action):
    """Let train() return; if not ``rescued``, a broken rank has waited in vain and should raise its own error."""

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
    """Take the stacks of the threads of a process of this host."""

    order: m.TakeStack


@dataclass(frozen=True, slots=True)
class ProbeHost(Action):
    """Find out whether another host answers."""

    order: m.Probe


@dataclass(frozen=True, slots=True)
class StartStandby(Action):
    """Start a standby controller on this host."""


@dataclass(frozen=True, slots=True)
class NoteRing(Action):
    """Record on this host which controller leads and which stand by, for programs that call it from outside the job.

    Args:
        term: of the controller that leads.
        address: where it listens (host:port); ``route.HOME``: the address that the job was started with.
        standbys: addresses of the standby controllers.
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
    """Send copies of this rank's shards to the named buddy from now on."""

    order: CopyTo


@dataclass(frozen=True, slots=True)
class NameKeeper(Action):
    """Send copies of this rank's page to the named keeper from now on."""

    order: MirrorTo


@dataclass(frozen=True, slots=True)
class SettleCopy(Action):
    """Note whether the copies of ``version`` are whole everywhere, and drop the copy that is not needed any more."""

    version: Version
    whole: bool


@dataclass(frozen=True, slots=True)
class ProgramAction(Action):
    """Base of actions of ``program``; the part that feeds ``ProgramEvent`` carries them out."""


def not_done(action: Action, text: str) -> ev.Event | None:
    """Return the event that tells the machine of a failed action, so that it is tried again or done by another rank.

    Args:
        action: the action that failed, for example because no thread could be started.
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
