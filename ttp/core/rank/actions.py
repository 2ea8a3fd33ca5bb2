"""Actions that a rank's machine (``ttp.core.rank.machine``) returns; ``ttp.processor.processor`` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.core.restore_messages import RestoreDecision

Service = m.TakeStack | m.Probe | m.StandBy | Keep | CopyTo | MirrorTo
"""Orders that serve other ranks or hosts."""


@dataclass(frozen=True, slots=True)
class Action:
    """Base of actions, which are matched by their class."""


@dataclass(frozen=True, slots=True)
class LinkAction(Action):
    """Base of actions on the streams of this rank."""


@dataclass(frozen=True, slots=True)
class Connect(LinkAction):
    """Open a stream; ``StreamUp`` or ``StreamDown`` follows."""

    start_controller: bool  # whether to start a controller, if none answers and one may run on this host
    address: str = ""  # address of a standby controller (host:port); empty: the job's own address
    within_s: float | None = None  # time limit in seconds, after which the next controller is tried; None: no limit


@dataclass(frozen=True, slots=True)
class Send(LinkAction):
    """Send a report on the stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class LookAtController(LinkAction):
    """Ask the kernel how long the stream has received nothing from the controller's host; the answer is ``Looked``."""


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
    """Close the second stream; ignore everything that still arrives on it."""


@dataclass(frozen=True, slots=True)
class CloseGate(Action):
    """Ask the launcher not to stop this process (a lease), close the gate and report the state behind it (``Quiet``).

    Args:
        until: the time at which the lease ends.
        hurry: there is a fault, so do not wait for an accelerator that makes no progress: it may hang.
    """

    until: float
    hurry: bool


@dataclass(frozen=True, slots=True)
class OpenGate(Action):
    """Open the gate, as training goes on, and give the lease back: the launcher may stop this process."""


@dataclass(frozen=True, slots=True)
class Redo(Action):
    """Let the training thread, which stands at the gate with the reduced gradient, make exactly one update."""

    version: Version  # the version after the update


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
class Joined(Action):
    """The controller has welcomed this rank.

    Args:
        incarnation: the incarnation of the job.
        first: this is the first welcome of this process.
        controller: the version of ttp that the controller has.
        joins: the process replaces a dead rank in a job that goes on.
        guest: the process waits to replace a living rank.
    """

    incarnation: int
    first: bool
    controller: str
    joins: bool = False
    guest: bool = False


@dataclass(frozen=True, slots=True)
class Rejected(Action):
    """The controller has refused this process, which was never part of the job; with ``BUSY`` only for now."""

    code: m.RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Decided(Action):
    """The answer to ``RestoreWanted``."""

    decision: RestoreDecision


@dataclass(frozen=True, slots=True)
class LetGo(Action):
    """Let train() return; not ``rescued``: no controller answered in time, so a broken rank raises its own error."""

    rescued: bool


@dataclass(frozen=True, slots=True)
class Exit(Action):
    """Exit the process now."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class GoOn(Action):
    """Stay in the process: train() is called again, as a rank of the next incarnation."""

    text: str


@dataclass(frozen=True, slots=True)
class Serve(Action):
    """Carry out an order that serves other ranks or hosts."""

    order: Service


@dataclass(frozen=True, slots=True)
class NoteRing(Action):
    """Write the addresses of the controllers to this host, for programs outside of the job that call a controller.

    Args:
        term: the term of the leading controller.
        address: its address (host:port); ``failover.HOME``: the address that the job was started with.
        standbys: addresses of the standby controllers.
    """

    term: int
    address: str
    standbys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettleCopy(Action):
    """Drop the copy that is no longer needed, as in ``Settled``."""

    version: Version
    whole: bool


@dataclass(frozen=True, slots=True)
class ProgramAction(Action):
    """Base of actions of ``program``, carried out by the part that makes ``ProgramEvent``."""


def name_of(action: Action) -> str:
    """Return what a log line calls an action."""
    return type(action.order if isinstance(action, Serve) else action).__name__


def not_done(action: Action, text: str) -> ev.Event | None:
    """Return the event that tells the machine of a failed action, so that it or another rank tries again.

    Args:
        action: the action that failed, for example because no thread could be started.
        text: the reason.

    Returns:
        The event; None if the machine need not know.
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
            event = ev.Worked(m.SaveFailed(order.rank, order.incident, order.generation, text))
        case Redo():
            event = ev.NotRedone(f"the update cannot be made: {text}")
        case StartCommit(order):
            event = ev.Worked(m.CommitFailed(order.rank, order.incident, order.generation, text))
        case Serve(m.StandBy()):
            event = ev.StandbyStarted("")
        case Serve(m.Probe() as order):
            event = ev.Tell(m.Probed(order.rank, order.subject, False, text))
    return event
