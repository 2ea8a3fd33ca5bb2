"""What becomes of an incident in a job whose state is saved and repaired by the program's own handlers.

Theory of operation
-------------------
Faults are found, the world is frozen, and the newest whole version is decided on exactly as in every other job. From
there on the handlers of the ranks have to act, together and in order, so the rest is not a set of independent tasks as
in ``controller.saving`` but a *script* of rounds (``ttp.core.rounds``). ``curing`` gets loops going again in the same
processes, ``dumping`` saves, ``handshake`` asks an outside manager what to do, ``pausing`` needs no incident at all.
Without a manager the rule is: what can be cured is cured; what cannot, or could not, is saved.

A script is given up when its incident ends, and is not resumed by another controller: that one freezes the world again
and begins anew. Ranks that were stopped say so to every controller, so they are not forgotten in that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ttp.core import messages as m
from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.curing import cure
from ttp.core.dumping import dump
from ttp.core.handshake import Handshake, ManagerMailbox
from ttp.core.layout import Layout, Rank, Version
from ttp.core.manager_messages import FaultOf, Notice, NoticeKind
from ttp.core.pausing import Pausing
from ttp.core.rounds import Ending, Outcome, Pause, RoundRunner, Script
from ttp.core.rounds_messages import Acted, Ailing, Ailment, Handlers
from ttp.core.ward import Judge, RepairState

Blame = Callable[[Rank, m.FaultKind, str, float], None]
"""Evidence against a rank, or against nobody (-1), and when it came."""

AILMENTS = {FaultOf.MEMORY: Ailment.MEMORY, FaultOf.NETWORK: Ailment.NETWORK}
WORDS = {
    Ailment.STOPPED: "its training loop was stopped",
    Ailment.RETRY: "its numbers are wrong",
    Ailment.MEMORY: "its device has lost memory",
    Ailment.MEMORY_CORRUPT: "its device has lost memory that was being written",
    Ailment.NETWORK: "a collective failed",
    Ailment.FATAL: "it cannot go on",
}


class Mending:
    """Scripts and what they need to know.

    Args:
        job: the ranks.
        outbox: takes orders and records.
        judge: see ``Judge``.
        blame: takes evidence that comes from handlers or from the manager.
    """

    def __init__(self, job: Membership, outbox: Outbox, judge: Judge, blame: Blame) -> None:
        self._job, self._outbox, self._blame = job, outbox, blame
        self._ward = RepairState(job, outbox, judge)
        self._desk = ManagerMailbox(outbox)
        self._steering = RoundRunner(outbox)
        self._handshake = Handshake(self._ward, self._desk, self._alone)
        self._pausing = Pausing(self._ward, self._desk, self._end_paused_job)

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def leads(self) -> bool:
        """Whether it is for handlers to save."""
        return self._ward.leads

    @property
    def layout(self) -> Layout | None:
        """Which rank holds what, as far as handlers' ranks have said it."""
        return self._ward.layout

    @property
    def halted(self) -> bool:
        """Whether a thaw alone would not make training go on."""
        return self._ward.halted

    @property
    def ails_any(self) -> bool:
        """Whether a training loop has ended that can be entered again: that no version is whole may be mended."""
        return bool(self._ward.ailing)

    def spoilt(self, rank: Rank) -> bool:
        """Whether the rank's copy is of no version."""
        return rank in self._ward.spoilt

    # --------------------------------------------------------------------------------------------------------- reports

    def at(self, now: float) -> None:
        """The time at which everything happens that is told next."""
        self._ward.now = now

    def reported(self, report: Handlers | Ailing | Acted) -> None:
        """A rank says something that has to do with handlers."""
        match report:
            case Handlers():
                self._ward.handlers(report)
                if report.halted and not self._ward.halted:
                    self.ails(Ailing(report.rank, Ailment.STOPPED, "", WORDS[Ailment.STOPPED]))
            case Ailing():
                self.ails(report)
            case Acted():
                self._steering.acted(report, self._ward.now)

    def ails(self, report: Ailing) -> None:
        """A training loop has ended that can be entered again."""
        known = self._ward.ailing.get(report.rank)
        if report.ailment is Ailment.STOPPED and (self._ward.halted or known is not None):
            return
        self._ward.ails(report)
        words = f"rank {report.rank}: {report.text or WORDS[report.ailment]}"
        self._outbox.record("ailing", rank=report.rank, ailment=report.ailment.value, code=report.code, text=words)
        self._blame(report.rank, m.FaultKind.AILING, words, self._ward.now)

    def lost(self, rank: Rank) -> None:
        """The rank cannot be spoken to any more."""
        self._steering.lost(rank, self._ward.now)

    def came_back(self, rank: Rank, *, frozen: bool) -> None:
        """On another stream. One whose gate was open meanwhile has not done what it was told."""
        if frozen:
            self._steering.again(rank)
        else:
            self._steering.lost(rank, self._ward.now)

    def moved(self, version: Version) -> None:
        """A rank has finished an update."""
        self._handshake.moved(version)

    # --------------------------------------------------------------------------------------------------------- manager

    def manager_came(self, wait_s: float) -> None:
        """Somebody else decides from now on."""
        self._desk.came(wait_s)
        self._outbox.record("manager_came")

    def manager_left(self) -> None:
        """Nobody does any more."""
        self._desk.left()
        self._outbox.record("manager_left")

    def notice(self, notice: Notice, *, incident: bool) -> str:
        """The manager says something; why that is not accepted, else empty. What is said twice changes nothing."""
        if not self.leads or not self._job.complete or self._job.ended:
            return "no job with handlers is training here"
        match notice.kind:
            case NoticeKind.FAILED:
                self._desk.failed = incident
            case NoticeKind.PAUSE_TRAIN:
                return self._wants_pause(notice, incident)
            case NoticeKind.STOP_TRAIN:
                for fault in notice.faults:
                    self._accused(fault.rank, fault.kind, fault.code)
                if not (incident or notice.faults):
                    return "no fault is known, and none was given"
                self._desk.put(notice)
            case NoticeKind.GLOBAL_RANK | NoticeKind.STRATEGY:
                if not (incident or self._pausing.paused):
                    return "there is nothing to decide"
                self._desk.put(notice)
        return ""

    def _accused(self, rank: Rank, kind: FaultOf, code: str) -> None:
        if rank not in self._job.members or rank in self._ward.ailing or rank in self._job.broken:
            return
        if kind in AILMENTS:
            self.ails(Ailing(rank, AILMENTS[kind], code, f"the manager says that {WORDS[AILMENTS[kind]]}"))
        else:
            text = f"the manager says that rank {rank} is broken"
            self._job.condemn(rank, text)
            self._blame(rank, m.FaultKind.OUTSIDE, text, self._ward.now)

    def _wants_pause(self, notice: Notice, incident: bool) -> str:
        if incident:
            return "a rescue is going on"
        if not self._pausing.paused:
            self._desk.take(NoticeKind.STRATEGY)
            self._steering.begin(self._pausing.pause(notice), self._job.term, self._ward.now)
        return ""

    def _end_paused_job(self, notice: Notice) -> None:
        """The manager has decided already what is to be done."""
        for kind in (NoticeKind.STOP_TRAIN, NoticeKind.GLOBAL_RANK):
            self._desk.put(Notice(kind))
        self._desk.put(notice)
        text = f"the manager wants the paused job to {notice.strategy}"
        self._blame(Rank(-1), m.FaultKind.OUTSIDE, text, self._ward.now)

    # -------------------------------------------------------------------------------------------------------- incident

    def begin(self, incident: Incident) -> None:
        """The world stands still: see what can be done."""
        self._steering.begin(self._script(incident), self._job.term, self._ward.now)

    def advance(self) -> Ending | None:
        """Go on as far as what is known allows; how it ended, once it has."""
        if self._steering.running:
            self._steering.advance(self._ward.now)
        return self._steering.ending

    def over(self, *, resumed: bool) -> None:
        """The incident is over: the world trains on, or has ended."""
        self._steering.give_up()
        self._desk.clear()
        self._ward.saved = Version(0)
        if resumed:
            if not self._ward.halted:
                self._ward.recovered()
            if self._pausing.paused:
                self._steering.begin(self._pausing.go_on(), self._job.term, self._ward.now)

    def reset(self) -> None:
        """A new incarnation of the job, or another controller leads it."""
        self._steering.give_up()
        self._desk.clear()
        self._ward.reset()
        self._pausing.paused = False

    def deadlines(self) -> Iterator[float]:
        """When ``advance`` has something to do."""
        return self._steering.deadlines()

    def _script(self, incident: Incident) -> Script:
        if incident.snapshot:
            ending = yield from dump(self._ward, incident)
            if incident.snapshot:
                return ending
        if self._desk.decides:
            return (yield from self._handshake.lead(incident))
        return (yield from self._alone(incident))

    def _alone(self, incident: Incident) -> Script:
        """Without a manager: cure what can be cured, else save what can be saved."""
        ward = self._ward
        while ward.ailing and ward.job.in_doubt:
            yield Pause(ward.now + 1.0)  # who was lost may be back in a moment
        if ward.curable(incident):
            ending = yield from cure(ward, incident)
            if ending.outcome is Outcome.RESUMED:
                self._pausing.paused = False
                return ending
            self._outbox.record("not_cured", text=ending.text)
        elif ward.ailing:
            self._outbox.record("not_curable", evidence=sorted(kind.value for kind in incident.kinds))
        return (yield from dump(ward, incident))
