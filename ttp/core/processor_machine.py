"""A rank's side of the protocol: events in, actions out. No I/O, no clock, no threads.

Theory of operation
-------------------
The processor keeps one stream to the controller. Losing the stream changes nothing for the training: it is re-opened,
and the first message repeats everything a new controller has to know. Orders of an older term are ignored.

A freeze closes the gate; the answer goes out at once if the state is quiet, else when the running update ends. While
frozen the processor saves and commits what it is told to. A freeze ends by a thaw or by the release, which ends the
process. Two rules keep a healthy job healthy without a controller: a freeze for a mere snapshot is thawed as soon as
the stream is lost, and a rank that was frozen for a fault but is never released leaves with code 70 after the patience
of the job (``TTP_OT``), as it could not train on anyway.

An order that comes twice, because the stream broke after it, is carried out once; its result is said again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.errors import EXIT_NOT_SAVED

# -------------------------------------------------------------------------------------------------------------- events


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
    settled: bool


@dataclass(frozen=True, slots=True)
class PiecesWritten:
    """A save ended well: everything is durable."""

    incident: str
    generation: int
    pieces: tuple[m.Piece, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A save ended badly."""

    incident: str
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class CommitDone:
    """The checkpoint exists."""

    incident: str
    generation: int
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class CommitBroken:
    """The checkpoint could not be made to exist."""

    incident: str
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Raised:
    """This rank cannot train on: an exception, a SIGTERM."""

    kind: m.FaultKind
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Returned:
    """train() has returned, or the user left it on purpose."""

    reason: m.GoodbyeReason


@dataclass(frozen=True, slots=True)
class RestoreWanted:
    """restore() was called."""

    candidates: tuple[m.Candidate, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """The state was set to ``version``: nothing newer has been trained in this process."""

    version: Version


@dataclass(frozen=True, slots=True)
class Observed:
    """Time has passed; this is where the gate stands."""

    version: Version
    phase: m.Phase


Event = (
    StreamUp
    | StreamDown
    | OrderReceived
    | Quiet
    | PiecesWritten
    | WriteFailed
    | CommitDone
    | CommitBroken
    | Raised
    | Returned
    | RestoreWanted
    | Based
    | Observed
)

# ------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream; ``StreamUp`` or ``StreamDown`` follows."""

    start_controller: bool  # nobody answers: start one if it may run here


@dataclass(frozen=True, slots=True)
class Send:
    """Put a report on the stream."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Close the gate and say how the state is (``Quiet``)."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Let the training go on."""


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
    """The controller does not want this process."""

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


Action = (
    Connect
    | Send
    | CloseGate
    | OpenGate
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
)


@dataclass(frozen=True, slots=True)
class Manners:
    """Waits of a processor, in seconds."""

    heartbeat_s: float = 1.0
    rescue_s: float = 360.0
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    alone_s: float = 20.0
    """A rank that is broken or done waits so long for a controller that cannot be reached."""
    start_controller_after: int = 2
    """Failed attempts after which a controller is started, if it may run on this host."""


class ProcessorMachine:
    """The protocol of one rank. ``on_event`` is the only way in; ``deadline`` says when ``Observed`` is due.

    Args:
        hello: who this rank is; version, phase and the like are filled in whenever it is sent.
        manners: see ``Manners``.
        now: the time at which the machine starts.
    """

    def __init__(self, hello: m.Hello, manners: Manners, now: float) -> None:
        self.manners = manners
        self.term = 0
        self.incarnation = 0
        self.incident = ""
        self.generation = 0
        self.gone = False
        self._hello = hello
        self._snapshot = False
        self._welcomed = False
        self._attempts = 0
        self._connect_at: float | None = now
        self._beat_at = now
        self._down_since: float | None = now
        self._frozen_since = 0.0
        self._over: set[tuple[int, str]] = set()
        self._order: m.Save | m.Commit | None = None
        self._results: dict[tuple[type[m.Save | m.Commit], int], m.Report] = {}
        self._broken: Raised | None = None
        self._returned: Returned | None = None
        self._view: m.RestoreView | None = None
        self._undecided = False
        self._version = hello.version
        self._phase = hello.phase
        self._actions: list[Action] = []

    # ------------------------------------------------------------------------------------------------------- entrance

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Take one event, return what has to be done, in order."""
        self._actions = []
        if self.gone:
            return []
        match event:
            case StreamUp():
                self._do(Send(self._greeting()))
            case StreamDown():
                self._stream_down(now)
            case OrderReceived(order):
                self._ordered(order, now)
            case Quiet():
                self._quiet(event)
            case PiecesWritten() | WriteFailed() | CommitDone() | CommitBroken():
                self._worked(event)
            case Raised():
                self._raised(event)
            case Returned():
                self._left(event)
            case RestoreWanted(candidates, skipped):
                self._view, self._undecided = m.RestoreView(self._hello.rank, candidates, skipped), True
                self._report(self._view)
            case Based(version):
                self._hello = replace(self._hello, base_version=version)
                self._version = version
            case Observed(version, phase):
                self._version, self._phase = version, phase
        if not self.gone:
            self._on_time(now)
        return self._actions

    def deadline(self) -> float | None:
        """When ``on_event(Observed(...), ...)`` should be called at the latest."""
        return None if self.gone else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        if self._connect_at is not None:
            yield self._connect_at
        if self._welcomed:
            yield self._beat_at
        if self.incident and not self._snapshot:
            yield self._frozen_since + self.manners.rescue_s
        if self._down_since is not None and not self.incident and (self._broken or self._returned):
            yield self._down_since + self.manners.alone_s

    def _on_time(self, now: float) -> None:
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            self._do(Connect(start_controller=self._attempts >= self.manners.start_controller_after))
        if self._welcomed and now >= self._beat_at:
            self._beat_at = now + self.manners.heartbeat_s
            self._report(m.Heartbeat(self._hello.rank, self._version, self._phase))
        if self.incident and not self._snapshot and now >= self._frozen_since + self.manners.rescue_s:
            self._exit(EXIT_NOT_SAVED, f"frozen for {self.manners.rescue_s:g} s (TTP_OT) without being released")
        alone = self._down_since is not None and now >= self._down_since + self.manners.alone_s
        if alone and not self.incident and (self._broken or self._returned):
            self._do(LetGo(rescued=False))
            self.gone = True

    # --------------------------------------------------------------------------------------------------------- stream

    def _greeting(self) -> m.Hello:
        return replace(
            self._hello,
            incarnation=self.incarnation,
            version=self._version,
            phase=m.Phase.DONE if self._returned else self._phase,
            term_seen=self.term,
            incident=self.incident,
            resume=self.incarnation > 0,
            broken=self._broken.text if self._broken else "",
        )

    def _stream_down(self, now: float) -> None:
        self._welcomed = False
        if self._down_since is None:
            self._down_since = now
        m_ = self.manners
        self._connect_at = now + min(m_.retry_max_s, m_.retry_min_s * 2 ** min(self._attempts, 10))
        self._attempts += 1
        if self.incident and self._snapshot:
            self._thaw()

    def _ordered(self, order: m.Order, now: float) -> None:
        match order:
            case m.Welcome():
                self._welcome(order, now)
                return
            case m.Refused(_, code, text):
                self._refused(code, text, now)
                return
        if order.term < self.term or not self._welcomed:
            return  # of a controller that was replaced, or left over from the last stream
        self.term = order.term
        match order:
            case m.Freeze(_, term, incident, _) if (term, incident) not in self._over:
                self._freeze(order, now)
            case m.Thaw(_, term, incident, _) if incident == self.incident:
                self._over.add((term, incident))
                self._thaw()
            case m.Save() | m.Commit() if order.incident == self.incident and order.generation >= self.generation:
                self._start(order)
            case m.Release(_, _, _, exit_code, text):
                self._report(m.Goodbye(self._hello.rank, m.GoodbyeReason.RELEASED, self._version))
                self._exit(exit_code, text)
            case m.RestoreDecision() if self._undecided:
                self._undecided = False
                self._do(Decided(order))
            case m.Finished():
                self._do(LetGo(rescued=True))
                self.gone = True
            case _:
                pass  # late: of an incident or a generation that is over

    def _welcome(self, order: m.Welcome, now: float) -> None:
        if order.term < self.term:
            return  # a controller that does not know it was replaced
        first = self.incarnation == 0
        self.term, self.incarnation = order.term, order.incarnation
        self._welcomed, self._attempts, self._down_since = True, 0, None
        self._beat_at = now + self.manners.heartbeat_s
        self._do(Joined(order.incarnation, first))
        if self._view is not None and (self._undecided or self._version <= self._hello.base_version):
            self._report(self._view)  # others may still wait for the decision, and this controller may be new
        if self._broken is not None:
            self._report_broken(self._broken)
        if self._returned is not None:
            self._report(m.Goodbye(self._hello.rank, self._returned.reason, self._version))

    def _refused(self, code: m.RefusalCode, text: str, now: float) -> None:
        if code is m.RefusalCode.BUSY:
            return  # the stream ends; the next attempt asks again
        self.gone = True
        self._do(Rejected(code, text))

    # ------------------------------------------------------------------------------------------------------ incidents

    def _freeze(self, order: m.Freeze, now: float) -> None:
        if order.incident != self.incident:
            self._cancel()
            self._results = {}
            self.generation = 0
            self._frozen_since = now
        self.incident, self._snapshot = order.incident, order.snapshot
        self._do(HoldLease(self._frozen_since + self.manners.rescue_s))
        self._do(CloseGate())

    def _quiet(self, quiet: Quiet) -> None:
        self._version, self._phase = quiet.version, quiet.phase
        if not self.incident:
            return
        self._report(
            m.Frozen(
                rank=self._hello.rank,
                incident=self.incident,
                version=quiet.version,
                phase=quiet.phase,
                final=quiet.phase is not m.Phase.UPDATING,
                stuck=not (quiet.parked or self._broken or self._returned),
                settled=quiet.settled,
            )
        )

    def _start(self, order: m.Save | m.Commit) -> None:
        key, running = (type(order), order.generation), self._order
        if key in self._results:
            self._report(self._results[key])
            return
        if running is not None and key == (type(running), running.generation):
            return
        self._cancel()
        self._order, self.generation = order, order.generation
        if isinstance(order, m.Commit):
            self._do(StartCommit(order))
        elif order.order.shards and (order.version != self._version or self._phase in (m.Phase.TORN, m.Phase.UPDATING)):
            text = f"asked for version {order.version}, holds {self._version} ({self._phase.value})"
            self._finish(order, m.SaveFailed(self._hello.rank, self.incident, order.generation, text))
        else:
            self._do(StartSave(order))  # pages alone can be collected by anybody

    def _cancel(self) -> None:
        """Forget the order that is being carried out; a save is given up, a commit is harmless."""
        if isinstance(self._order, m.Save):
            self._do(CancelSave())
        self._order = None

    def _worked(self, event: PiecesWritten | WriteFailed | CommitDone | CommitBroken) -> None:
        kind = m.Save if isinstance(event, (PiecesWritten, WriteFailed)) else m.Commit
        order = self._order
        if not isinstance(order, kind) or (event.incident, event.generation) != (order.incident, order.generation):
            return
        rank, incident, generation = self._hello.rank, event.incident, event.generation
        match event:
            case PiecesWritten(_, _, pieces):
                self._finish(order, m.Saved(rank, incident, generation, pieces))
            case WriteFailed(_, _, text):
                self._finish(order, m.SaveFailed(rank, incident, generation, text))
            case CommitDone(_, _, path, size):
                self._finish(order, m.Committed(rank, incident, generation, path, size))
            case CommitBroken(_, _, text):
                self._finish(order, m.CommitFailed(rank, incident, generation, text))

    def _finish(self, order: m.Save | m.Commit, result: m.Report) -> None:
        self._order, self._results[type(order), order.generation] = None, result
        self._report(result)

    def _thaw(self) -> None:
        self._cancel()
        self.incident, self._snapshot = "", False
        self._do(OpenGate())
        self._do(DropLease())

    # ------------------------------------------------------------------------------------------------------- training

    def _raised(self, event: Raised) -> None:
        self._broken = self._broken or event
        self._report_broken(event)

    def _report_broken(self, event: Raised) -> None:
        rank = self._hello.rank
        self._report(m.Fault(rank, rank, event.kind, event.text, event.detail, self._hello.nonce))

    def _left(self, event: Returned) -> None:
        self._returned = event
        self._phase = m.Phase.DONE
        self._report(m.Goodbye(self._hello.rank, event.reason, self._version))
        if event.reason is m.GoodbyeReason.LEFT:
            self._do(LetGo(rescued=True))  # the user is not kept waiting for the others
            self.gone = True

    # --------------------------------------------------------------------------------------------------------- output

    def _exit(self, code: int, text: str) -> None:
        self.gone = True
        self._do(Exit(code, text))

    def _report(self, report: m.Report) -> None:
        if self._welcomed:
            self._do(Send(report))

    def _do(self, action: Action) -> None:
        self._actions.append(action)
