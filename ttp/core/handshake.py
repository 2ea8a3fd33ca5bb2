"""The script by which an outside manager decides what is to become of a job after a fault.

The manager is told which ranks are faulty, says that training is to stop, is told when it has, says that no further
fault is known, is told what can be done, and chooses. What it chooses is done and reported, and if that fails it may
choose again. It may say things early or twice. A manager that goes away, cannot take what it is told, or says nothing
for its ``wait_s``, is not waited for: then the controller decides by itself, as it does where there is no manager.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from ttp.core import messages as m
from ttp.core.controller.events import CallManager
from ttp.core.controller.incident import Incident
from ttp.core.controller.outbox import Outbox
from ttp.core.curing import cure, halt
from ttp.core.decide import Plan
from ttp.core.dumping import dump
from ttp.core.layout import Rank, Version
from ttp.core.manager_messages import CallKind, Code, FaultOf, ManagerCall, Notice, NoticeKind, RankFault
from ttp.core.rounds import Ending, Outcome, Pause, Result, Script, Step
from ttp.core.rounds_messages import Ailment
from ttp.core.ward import RepairState

WAIT_S = 30.0
"""How long a manager may take to answer unless it says otherwise."""
FAULTS = {Ailment.NETWORK: FaultOf.NETWORK, Ailment.FATAL: FaultOf.PROCESS}
"""Of ailments that are not of the device's memory."""

Hearing = Generator[Step, Result, Notice | None]


class ManagerMailbox:
    """The manager, as far as it is known.

    Args:
        outbox: takes what it is told.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.present = False
        self.failed = False
        """It could not take what it was told about the open incident."""
        self.wait_s = WAIT_S
        self._outbox = outbox
        self._notices: dict[NoticeKind, Notice] = {}

    @property
    def decides(self) -> bool:
        """Whether there is somebody to ask."""
        return self.present and not self.failed

    def came(self, wait_s: float) -> None:
        """A manager is there."""
        self.present, self.wait_s = True, wait_s or WAIT_S

    def left(self) -> None:
        """It is not there any more."""
        self.present = False

    def put(self, notice: Notice) -> None:
        """What it says, to be taken when it is asked; the last word counts."""
        self._notices[notice.kind] = notice

    def take(self, kind: NoticeKind) -> Notice | None:
        """What it has said."""
        return self._notices.pop(kind, None)

    def clear(self) -> None:
        """An incident is over: what was said about it is of no interest."""
        self._notices, self.failed = {}, False

    def tell(self, kind: CallKind, faults: tuple[RankFault, ...] = (), code: int = 0, text: str = "",
             strategies: tuple[str, ...] = (), strategy: str = "") -> None:  # fmt: skip
        """Tell it, if it is there."""
        if self.decides:
            call = ManagerCall(kind, faults, code, text, strategies, strategy)
            self._outbox.record("told_manager", what=kind.value, code=code, text=text, strategy=strategy,
                                strategies=list(strategies), faults={f.rank: f.kind.name for f in faults})  # fmt: skip
            self._outbox.add(CallManager(call))


class Handshake:
    """The script, and what it leaves to be said later.

    Args:
        ward: the ranks.
        desk: the manager.
        alone: what is done without a manager.
    """

    def __init__(self, ward: RepairState, desk: ManagerMailbox, alone: Callable[[Incident], Script]) -> None:
        self._ward, self._desk, self._alone = ward, desk, alone
        self._owed: tuple[Version, str] | None = None

    def moved(self, version: Version) -> None:
        """A rank has finished an update. A job counts as cured when it has made one more step."""
        if self._owed is not None and version > self._owed[0]:
            self._desk.tell(CallKind.RESULT, code=Code.OK, text=self._owed[1], strategy="retry")
            self._owed = None

    def lead(self, incident: Incident) -> Script:
        """From the fault to its end, as the manager says."""
        ward, desk, self._owed = self._ward, self._desk, None
        while ward.job.in_doubt and desk.decides:
            yield Pause(ward.now + 1.0)  # who was lost may be back in a moment
        if not (incident.faulty or ward.job.broken or ward.halted):
            return Ending(Outcome.RESUMED, Version(0), "nothing is broken after all")
        desk.tell(CallKind.FAULT_RANKS, faults_of(ward, incident))
        if (yield from self._hear(incident, NoticeKind.STOP_TRAIN)) is None:
            return (yield from self._alone(incident))
        problem = yield from halt(ward, incident)
        code = Code.ERROR if problem else Code.OK
        desk.tell(CallKind.STOP_COMPLETE, faults_of(ward, incident), code, problem or "training has stopped")
        if (yield from self._hear(incident, NoticeKind.GLOBAL_RANK)) is None:
            return (yield from self._alone(incident))
        desk.tell(CallKind.FAULT_RANKS, faults_of(ward, incident))
        desk.tell(CallKind.STRATEGIES, faults_of(ward, incident), strategies=self._offers(incident))
        return (yield from self._obey(incident))

    def _obey(self, incident: Incident) -> Script:
        while (notice := (yield from self._hear(incident, NoticeKind.STRATEGY))) is not None:
            ending: Ending | None = None
            match notice.strategy:
                case "retry" if "retry" in self._offers(incident):
                    ending = yield from cure(self._ward, incident)
                case "dump" if "dump" in self._offers(incident):
                    ending = yield from dump(self._ward, incident)
                case "exit":
                    return Ending(Outcome.NOT_SAVED, Version(0), "the manager has chosen to exit")
            if ending is not None and ending.outcome is Outcome.RESUMED:
                self._owed = (ending.version, ending.text)
                return ending
            if ending is not None and ending.outcome is Outcome.SAVED:
                self._desk.tell(CallKind.RESULT, code=Code.OK, text=ending.text, strategy="dump")
                yield from self._hear(incident, NoticeKind.STRATEGY)  # it says exit, or nothing
                return ending
            text = ending.text if ending else f"{notice.strategy or 'nothing'} is not possible here"
            self.refuse(incident, notice.strategy, text)
        return (yield from self._alone(incident))

    def refuse(self, incident: Incident, strategy: str, text: str) -> None:
        """A strategy failed or cannot be had: what can still be done?"""
        code = Code.MAY_DUMP if "dump" in self._offers(incident) else Code.MAY_EXIT
        self._desk.tell(CallKind.RESULT, faults_of(self._ward, incident), code, text, strategy=strategy)

    def _offers(self, incident: Incident) -> tuple[str, ...]:
        """What can be done now, the best last."""
        ward = self._ward
        can_dump = not ward.must_load and isinstance(ward.decide(incident), Plan)
        return ("exit", *(["dump"] if can_dump else []), *(["retry"] if ward.curable(incident) else []))

    def _hear(self, incident: Incident, kind: NoticeKind) -> Hearing:
        until = self._ward.now + min(self._desk.wait_s, self._ward.patience_s(incident))
        while self._desk.decides and self._ward.now < until:
            notice = self._desk.take(kind)
            if notice is not None:
                return notice
            yield Pause(until)
        return None


def faults_of(ward: RepairState, incident: Incident) -> tuple[RankFault, ...]:
    """Which ranks are faulty, and how."""
    found: dict[Rank, RankFault] = {}
    for rank, ailing in ward.ailing.items():
        if ailing.ailment is not Ailment.STOPPED:
            kind = FAULTS.get(ailing.ailment, FaultOf.MEMORY)
            found[rank] = RankFault(rank, kind, ailing.code)
    killing = [found for kind, found in incident.evidence.items() if kind is not m.FaultKind.AILING]
    dead = {rank for found in killing for rank in found if rank >= 0}
    for rank in {*dead, *ward.job.broken} - set(found):
        found[rank] = RankFault(rank, FaultOf.PROCESS)
    return tuple(found[rank] for rank in sorted(found))
