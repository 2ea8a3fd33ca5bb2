"""The controller's part for jobs whose own handlers save and repair the state: lead their incidents.

Theory of operation
-------------------
Faults are detected, the job is frozen, and the newest whole version is computed exactly as in every other job. From
there on the handlers of the ranks have to act, together and in order. So the rest is not a set of independent tasks as
in ``controller.saving`` but a *script* of rounds (``rounds``). ``in_process_repair`` repairs the state and lets the
ranks enter their loops again, ``save_script`` saves, ``handshake`` asks an outside manager, and ``pause`` pauses
training without an incident. Without a manager, faults that can be repaired are repaired, and after all others the
state is saved.

A script is given up when its incident ends. Another controller that takes over does not resume it, but freezes the job
again and begins a new script. Ranks that were stopped report that to every controller, so they do not stay stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from ttp.core import messages as m
from ttp.core.controller.events import ProgramEvent
from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Ending, Outcome, ProgramRecovery, RescueContext
from ttp.core.layout import Layout, Rank, Version
from ttp.mindio.protocol import manager_messages as mm
from ttp.mindio.protocol import replacement
from ttp.mindio.protocol.handshake import Handshake, ManagerMailbox
from ttp.mindio.protocol.in_process_repair import repair_in_process
from ttp.mindio.protocol.messages import Acted, Ailing, Ailment, Handlers
from ttp.mindio.protocol.pause import Pausing
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.rounds import Pause, RoundRunner, Script
from ttp.mindio.protocol.save_script import dump
from ttp.mindio.protocol.switching import Switching

AILMENTS = {mm.FaultOf.MEMORY: Ailment.MEMORY, mm.FaultOf.NETWORK: Ailment.NETWORK}
WORDS = {
    Ailment.STOPPED: "its training loop was stopped",
    Ailment.RETRY: "its numerical results are wrong",
    Ailment.MEMORY: "its device has lost memory",
    Ailment.MEMORY_CORRUPT: "its device has lost memory that was being written",
    Ailment.NETWORK: "a collective failed",
    Ailment.FATAL: "it cannot continue",
    Ailment.PEER: "a collective has failed because another rank died",
    Ailment.JOINED: "it is a new process that replaces a lost rank",
}


class HandlerRecovery(ProgramRecovery):
    """Runs the scripts of a job, and passes reports and notices on to them.

    Args:
        context: the controller's knowledge of the job, and its outbox for orders and records.
    """

    def __init__(self, context: RescueContext) -> None:
        self._job, self._outbox, self._blame = context.job, context.outbox, context.blame
        self._state = RepairState(context)
        self._mailbox = ManagerMailbox(context.outbox)
        self._runner = RoundRunner(context.outbox)
        self._handshake = Handshake(self._state, self._mailbox, self._alone, self._accuse)
        self._pausing = Pausing(self._state, self._mailbox, self._end_paused_job)
        self._switching = Switching(
            self._state, self._mailbox, self._pausing, self._handshake, context.blame, self._script
        )

    # ----------------------------------------------------------------------------------------------------------- facts

    @property
    def leads(self) -> bool:
        """Whether the program's handlers save the state of this job."""
        return self._state.leads

    @property
    def layout(self) -> Layout | None:
        """The layout, from the replica sets that the ranks have declared; None while it is not known."""
        return self._state.layout

    @property
    def halted(self) -> bool:
        """Whether training threads are out of their loops, so that a thaw alone does not continue training."""
        return self._state.halted

    @property
    def may_repair(self) -> bool:
        """Whether a rank can be repaired, so that a version that is not whole may become whole."""
        return bool(self._state.ailing)

    def invalid(self, rank: Rank) -> bool:
        """Return whether the rank's copy is not of any version."""
        return rank in self._state.invalid

    # --------------------------------------------------------------------------------------------------------- reports

    def at(self, now: float) -> None:
        """Set the time of all events that follow, in seconds."""
        self._state.now = now

    def reported(self, report: m.ProgramReport) -> None:
        """Take a report about handlers from a rank."""
        match report:
            case Handlers():
                self._state.handlers(report)
                if report.halted and not (self._state.halted or self._state.paused or self._switching.held):
                    self.ails(Ailing(report.rank, Ailment.STOPPED, "", WORDS[Ailment.STOPPED]))
            case Ailing():
                self.ails(report)
            case Acted():
                self._runner.acted(report, self._state.now)

    def ails(self, report: Ailing) -> None:
        """Take the report that the training thread of a rank has left its loop and can enter it again."""
        known = self._state.ailing.get(report.rank)
        if report.ailment is Ailment.STOPPED and (self._state.halted or known is not None):
            return
        self._state.ails(report)
        words = f"rank {report.rank}: {report.text or WORDS[report.ailment]}"
        self._outbox.record("ailing", rank=report.rank, ailment=report.ailment.value, code=report.code, text=words)
        self._blame(report.rank, m.FaultKind.AILING, words, self._state.now)

    def lost(self, rank: Rank) -> None:
        """Record that the rank cannot be reached any more."""
        self._runner.lost(rank, self._state.now)

    def came_back(self, rank: Rank, *, frozen: bool) -> None:
        """Record that the rank has connected again.

        Args:
            rank: the rank.
            frozen: whether it stayed frozen meanwhile; if not, it counts as lost for the current round.
        """
        if frozen:
            self._runner.again(rank)
        else:
            self._runner.lost(rank, self._state.now)

    def moved(self, version: Version) -> None:
        """Record that a rank has finished an update."""
        if not self._job.ended:  # else this is the last report of a rank that leaves the job
            self._handshake.moved(version)

    # --------------------------------------------------------------------------------------------------------- manager

    def happened(self, event: ProgramEvent, *, incident: bool) -> None:
        """Take an event about a manager: it attaches, detaches, offers a host, or sends a notice."""
        match event:
            case mm.ManagerCame(wait_s):
                self._mailbox.came(wait_s)
                self._outbox.record("manager_came")
            case mm.ManagerLeft():
                self._mailbox.left()
                self._outbox.record("manager_left")
            case mm.PlaceOffered(host, store):
                self._outbox.add(mm.TakePlace(self._switching.offered(host, store)))
            case mm.Noticed(notice):
                self._outbox.add(mm.AnswerNotice(self._notice(notice, incident)))

    def _notice(self, notice: mm.Notice, incident: bool) -> str:
        """Take a notice of the manager, and return why it is not accepted; empty if it is. A repeat has no effect."""
        if not self.leads or not self._job.complete or self._job.ended:
            return "no job with handlers is training here"
        match notice.kind:
            case mm.NoticeKind.FAILED:
                self._mailbox.failed = incident or self._state.paused
            case mm.NoticeKind.PAUSE_TRAIN:
                return self._wants_pause(notice, incident)
            case mm.NoticeKind.HOT_SWITCH | mm.NoticeKind.MOVE:
                return self._switching.wanted(notice, incident)
            case mm.NoticeKind.STOP_SWITCH if self._switching.stands:
                self._mailbox.put(mm.Notice(mm.NoticeKind.STRATEGY, strategy="continue"))
            case mm.NoticeKind.STOP_SWITCH:
                self._switching.give_up("")
            case mm.NoticeKind.STOP_TRAIN:
                if not (incident or any(fault.rank in self._job.members for fault in notice.faults)):
                    return "no fault is known, and the notice names no rank of this job"
                self._mailbox.put(notice)
                self._accuse(notice)
            case mm.NoticeKind.GLOBAL_RANK | mm.NoticeKind.STRATEGY:
                if not (incident or self._state.paused):
                    return "there is nothing to decide"
                self._mailbox.put(notice)
        return ""

    def _accuse(self, notice: mm.Notice) -> None:
        """Add the faults that the manager reports to those that are known."""
        for fault in notice.faults:
            rank = fault.rank
            if rank not in self._job.members or rank in self._state.ailing or rank in self._job.broken:
                continue
            ailment = AILMENTS.get(fault.kind)
            if ailment is not None:
                self.ails(Ailing(rank, ailment, fault.code, f"the manager says that {WORDS[ailment]}"))
            else:
                text = f"the manager says that rank {rank} is broken"
                self._job.mark_failed(rank, text)
                self._blame(rank, m.FaultKind.OUTSIDE, text, self._state.now)

    def _wants_pause(self, notice: mm.Notice, incident: bool) -> str:
        if incident:
            return "a rescue is going on"
        if self._switching.held:  # its script would be given up, and nobody would end it
            return "all ranks stand still for a hot switch"
        if not self._state.paused:
            self._mailbox.take(mm.NoticeKind.STRATEGY)
            self._runner.begin(self._pausing.pause(notice), self._job.term, self._state.now)
        return ""

    def _end_paused_job(self, notice: mm.Notice) -> None:
        """End a paused job by an incident, in which the manager's choice is already known."""
        for kind in (mm.NoticeKind.STOP_TRAIN, mm.NoticeKind.GLOBAL_RANK):
            self._mailbox.put(mm.Notice(kind))
        self._mailbox.put(notice)
        text = f"the manager has chosen to {notice.strategy} the paused job"
        self._blame(Rank(-1), m.FaultKind.OUTSIDE, text, self._state.now)

    # -------------------------------------------------------------------------------------------------------- incident

    def begin(self, incident: Incident) -> None:
        """Begin the script of an incident; the job is frozen."""
        self._runner.begin(self._script(incident), self._job.term, self._state.now)

    def advance(self) -> Ending | None:
        """Continue the script as far as possible, and return how the recovery ended, or None if it has not."""
        if self._runner.running:
            self._runner.advance(self._state.now)
        elif self._switching.ready and not (self._outbox.incident or self._state.paused):
            self._runner.begin(self._switching.stand_still(), self._job.term, self._state.now)
        self._switching.expire()
        return self._runner.ending

    def over(self, *, resumed: bool) -> None:
        """Record that the incident is over. ``resumed``: whether training continues; otherwise the job has ended."""
        self._runner.give_up()
        if self._switching.stands or not resumed:
            self._switching.give_up("the incident has ended in another way")
        if not (resumed and self._state.paused):  # else the manager may have ended the pause during a checkpoint
            self._mailbox.clear()
        if resumed:
            if not self._state.halted:
                self._state.recovered()
            if self._state.paused or self._switching.held:
                script = self._pausing.go_on() if self._state.paused else self._switching.go_on()
                self._runner.begin(script, self._job.term, self._state.now)

    def reset(self) -> None:
        """Forget everything: a new incarnation of the job begins, or another controller leads it."""
        self._runner.give_up()
        self._mailbox.clear()
        self._state.reset()
        self._switching.reset()

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``advance`` has to be called."""
        yield from self._runner.deadlines()
        yield from self._switching.deadlines()

    def _script(self, incident: Incident) -> Script:
        if incident.snapshot:
            ending = yield from dump(self._state, incident)
            if incident.snapshot:
                return ending
        if self._switching.stands:
            return (yield from self._switching.lead(incident))
        self._switching.give_up("a rescue is going on")
        if self._mailbox.decides:
            return (yield from self._handshake.lead(incident))
        return (yield from self._alone(incident))

    def _alone(self, incident: Incident) -> Script:
        """Repair what can be repaired, else save what can be saved, without a manager."""
        state = self._state
        if incident.id in state.tried:
            return (yield from dump(state, incident))
        if replacement.wanted(state, incident):
            ending = yield from replacement.recover(state, incident, alone=not self._mailbox.present)
            if ending.outcome is Outcome.RESUMED or not state.repairable(incident):
                return ending  # else no rank was lost, but another rank has a fault that can be repaired
        while state.ailing and state.job.in_doubt:
            yield Pause(state.now + 1.0)  # a lost rank may connect again
        if state.repairable(incident):
            ending = yield from repair_in_process(state, incident)
            if ending.outcome is Outcome.RESUMED:
                return ending
            self._outbox.record("not_cured", text=ending.text)
        elif state.ailing:
            self._outbox.record("not_curable", evidence=sorted(kind.value for kind in incident.evidence.kinds))
        return (yield from dump(state, incident))
