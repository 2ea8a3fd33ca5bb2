"""The script by which an outside manager decides about a job after a fault.

1. The controller reports the faulty ranks; the manager orders training to stop.
2. The controller reports that training has stopped, because the job is frozen. The manager reports the faults that it
   knows of.
3. The controller offers the possible strategies; the manager chooses one.
4. The controller carries out the strategy and reports the result. After a failure the manager may choose again.

Devices are stopped and cleaned by strategies that need it, not before: a save may need what is queued there.

The manager may send notices early or twice. If it detaches, fails to take a message, or does not answer for ``wait_s``,
the controller decides by itself, as it does without a manager.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.incident import Incident
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import Ending, Outcome, not_saved
from ttp.core.decide import Plan
from ttp.core.layout import Rank, Version
from ttp.mindio.protocol import manager_messages as mm
from ttp.mindio.protocol.in_process_repair import repair_in_process
from ttp.mindio.protocol.messages import Ailment
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.replacement import recover, see_clearly, why_not
from ttp.mindio.protocol.rounds import Pause, Result, Script, Step
from ttp.mindio.protocol.save_script import dump

NO_FAULTS = (Ailment.STOPPED, Ailment.PEER, Ailment.JOINED)
"""Ailments of ranks without a fault."""
RECOVER = ("recover", "recover-in-place")
"""Strategies that replace lost ranks, which are the same here: the controller does not choose the host."""
RESIZE = ("downgrade", "upgrade")
"""Strategies that save a checkpoint and restart the job with other hosts."""
FAULTS = {Ailment.NETWORK: mm.FaultOf.NETWORK, Ailment.FATAL: mm.FaultOf.PROCESS}
"""Kinds of faults for ailments that do not concern the device's memory."""

Hearing = Generator[Step, Result, mm.Notice | None]


class ManagerMailbox:
    """The state of the manager, its unread notices, and the calls to it.

    Args:
        outbox: takes the calls to the manager.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.present = False
        self.failed = False
        """Whether the manager could not take a call about the open incident."""
        self.wait_s = mm.WAIT_S
        self._outbox = outbox
        self._notices: dict[mm.NoticeKind, mm.Notice] = {}

    @property
    def decides(self) -> bool:
        """Whether a manager is attached and decides about the open incident."""
        return self.present and not self.failed

    def came(self, wait_s: float) -> None:
        """Record that a manager is attached. It has ``wait_s`` seconds for each answer; 0 means the default."""
        self.present, self.wait_s = True, wait_s or mm.WAIT_S

    def left(self) -> None:
        """Record that the manager has detached."""
        self.present = False

    def put(self, notice: mm.Notice) -> None:
        """Keep a notice until ``take``; it replaces an earlier one of its kind."""
        self._notices[notice.kind] = notice

    def take(self, kind: mm.NoticeKind) -> mm.Notice | None:
        """Remove and return the kept notice of this kind; None if there is none."""
        return self._notices.pop(kind, None)

    def clear(self) -> None:
        """Drop all notices, because their incident is over."""
        self._notices, self.failed = {}, False

    def tell(self, kind: mm.CallKind, faults: tuple[mm.RankFault, ...] = (), code: int = 0, text: str = "",
             strategies: tuple[str, ...] = (), strategy: str = "") -> None:  # fmt: skip
        """Send a call to the manager, if a manager decides."""
        if self.decides:
            call = mm.ManagerCall(kind, faults, code, text, strategies, strategy)
            self._outbox.record("told_manager", what=kind.value, code=code, text=text, strategy=strategy,
                                strategies=list(strategies), faults={f.rank: f.kind.name for f in faults})  # fmt: skip
            self._outbox.add(mm.CallManager(call))


class Handshake:
    """Runs the script, and reports its result after the next step.

    Args:
        state: the state of the ranks.
        mailbox: the notices of the manager, and the calls to it.
        alone: returns the script for an incident without a manager.
        accuse: adds the faults in a notice to those that are known.
    """

    def __init__(
        self,
        state: RepairState,
        mailbox: ManagerMailbox,
        alone: Callable[[Incident], Script],
        accuse: Callable[[mm.Notice], None],
    ) -> None:
        self._state, self._mailbox, self._alone, self._accuse = state, mailbox, alone, accuse
        self._owed: tuple[Version, str, str] | None = None

    def moved(self, version: Version) -> None:
        """Record that a rank has finished an update. A repair counts as a success after one more step."""
        if self._owed is not None and version > self._owed[0]:
            self._mailbox.tell(mm.CallKind.RESULT, code=mm.Code.OK, text=self._owed[1], strategy=self._owed[2])
            self._owed = None

    def lead(self, incident: Incident) -> Script:
        """Lead an incident from the fault to its end, by the manager's decisions."""
        state, mailbox, self._owed = self._state, self._mailbox, None
        yield from see_clearly(state, seats=False)
        if not (incident.faulty or state.job.broken or state.halted):
            return Ending(Outcome.RESUMED, Version(0), "nothing is broken after all")
        mailbox.tell(mm.CallKind.FAULT_RANKS, faults_of(state, incident))
        if (yield from self._hear(incident, mm.NoticeKind.STOP_TRAIN)) is None:
            return (yield from self._alone(incident))
        mailbox.tell(mm.CallKind.STOP_COMPLETE, faults_of(state, incident), mm.Code.OK, "training has stopped")
        known = yield from self._hear(incident, mm.NoticeKind.GLOBAL_RANK)
        if known is None:
            return (yield from self._alone(incident))
        self._accuse(known)
        mailbox.tell(mm.CallKind.FAULT_RANKS, faults_of(state, incident))
        mailbox.tell(mm.CallKind.STRATEGIES, faults_of(state, incident), strategies=self._offers(incident))
        return (yield from self.obey(incident, wait_s=known.seconds))

    def owe(self, ending: Ending, strategy: str) -> None:
        """Report this success to the manager after one more step."""
        self._owed = (ending.version, ending.text, strategy)

    def obey(self, incident: Incident, saved: Ending | None = None, wait_s: float = 0.0) -> Script:
        """Carry out the manager's choices, until one of them ends the incident.

        Args:
            incident: the open incident.
            saved: the checkpoint that this incident has saved; None if it has saved none.
            wait_s: least time for a choice, in seconds; see ``_hear``.
        """
        while (notice := (yield from self._hear(incident, mm.NoticeKind.STRATEGY, wait_s))) is not None:
            ending: Ending | None = None
            match notice.strategy:
                case "retry" if "retry" in self._offers(incident):
                    ending = yield from repair_in_process(self._state, incident)
                case "recover" | "recover-in-place" if "recover" in self._offers(incident):
                    ending = yield from recover(self._state, incident, alone=False)
                case "dump" if "dump" in self._offers(incident):
                    ending = yield from dump(self._state, incident)
                case "downgrade" | "upgrade" if notice.strategy in self._offers(incident):
                    ending = yield from self._resize(incident, notice.strategy)
                case "exit" if saved is not None:
                    return replace(saved, text=f"{saved.text}; the manager has chosen to exit")
                case "exit":
                    return not_saved("the manager has chosen to exit")
            if ending is not None and ending.outcome is Outcome.RESUMED:
                self.owe(ending, notice.strategy)
                return ending
            if ending is not None and ending.outcome is Outcome.SAVED and notice.strategy in RESIZE:
                return ending
            if ending is not None and ending.outcome is Outcome.SAVED and notice.strategy not in RECOVER:
                self._mailbox.tell(mm.CallKind.RESULT, code=mm.Code.OK, text=ending.text, strategy="dump")
                yield from self._hear(incident, mm.NoticeKind.STRATEGY)  # the manager sends exit, or nothing
                return ending
            saved = ending if ending is not None and ending.outcome is Outcome.SAVED else saved
            text = ending.text if ending else f"{notice.strategy or 'nothing'} is not possible here"
            self.refuse(incident, notice.strategy, text)
        return (yield from self._alone(incident))

    def _resize(self, incident: Incident, strategy: str) -> Script:
        """Save, so that the next launch has fewer ranks (``downgrade``, without faulty hosts) or more (``upgrade``)."""
        ending = yield from dump(self._state, incident)
        if ending.outcome is Outcome.SAVED:
            if strategy == "downgrade":
                self._state.drain(self._faulty_hosts(incident))
            self.owe(ending, strategy)
        return ending

    def _faulty_hosts(self, incident: Incident) -> frozenset[str]:
        members = self._state.job.members
        found = (fault.rank for fault in faults_of(self._state, incident))
        return frozenset(members[rank].hello.host for rank in found if rank in members)

    def _resizes(self, incident: Incident) -> str:
        """Return ``downgrade`` or ``upgrade`` if the next launch may have fewer or more ranks; empty if neither.

        ``upgrade`` if a launcher ended its ranks with SIGTERM to admit another host. ``downgrade`` if hosts are faulty,
        but not that of rank 0, which the job needs.
        """
        state, members = self._state, self._state.job.members
        if not all(rank in state.announced and state.announced[rank].elastic for rank in members):
            return ""
        if incident.evidence.kinds == {m.FaultKind.PREEMPTED}:
            return "upgrade"
        hosts = self._faulty_hosts(incident)
        return "downgrade" if hosts and members[Rank(0)].hello.host not in hosts else ""

    def refuse(self, incident: Incident, strategy: str, text: str) -> None:
        """Report that a strategy failed or is not possible, with a code for the best one that is still possible."""
        offers = self._offers(incident)
        code = mm.Code.MAY_DUMP if "dump" in offers else mm.Code.MAY_EXIT
        if "recover" in offers and strategy not in RECOVER:
            code = mm.Code.MAY_RECOVER
        self._mailbox.tell(mm.CallKind.RESULT, faults_of(self._state, incident), code, text, strategy=strategy)

    def _offers(self, incident: Incident) -> tuple[str, ...]:
        """Return the strategies that are possible now, best last."""
        state = self._state
        can_dump = bool(incident.saved) or (not state.must_load and isinstance(state.decide(incident), Plan))
        can_recover = not why_not(state, incident, alone=False)
        found = {"exit": True, "dump": can_dump, self._resizes(incident): can_dump, "recover": can_recover}
        found = {**found, "retry": state.repairable(incident), "": False}
        return tuple(strategy for strategy, possible in found.items() if possible)

    def _hear(self, incident: Incident, kind: mm.NoticeKind, wait_s: float = 0.0) -> Hearing:
        """Wait for a notice of this kind. The manager has its usual time, or ``wait_s`` if that is more."""
        until = self._state.now + min(max(self._mailbox.wait_s, wait_s), self._state.patience_s(incident))
        while self._mailbox.decides and self._state.now < until:
            notice = self._mailbox.take(kind)
            if notice is not None:
                return notice
            yield Pause(until)
        return None


def faults_of(state: RepairState, incident: Incident) -> tuple[mm.RankFault, ...]:
    """Return the faulty ranks, each with the kind of its fault."""
    found: dict[Rank, mm.RankFault] = {}
    for rank, ailing in state.ailing.items():
        if ailing.ailment not in NO_FAULTS:
            kind = FAULTS.get(ailing.ailment, mm.FaultOf.MEMORY)
            found[rank] = mm.RankFault(rank, kind, ailing.code)
    killing = [found for kind, found in incident.evidence.by_kind.items() if kind is not m.FaultKind.AILING]
    dead = {rank for found in killing for rank in found if rank >= 0}
    for rank in {*dead, *state.job.broken} - set(found):
        found[rank] = mm.RankFault(rank, mm.FaultOf.PROCESS)
    return tuple(found[rank] for rank in sorted(found))
