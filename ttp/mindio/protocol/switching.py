"""The script of a hot switch: live ranks are replaced by processes that were started on other hosts meanwhile.

The manager says which ranks are to move, and starts a process for each. These processes join as guests and make
themselves ready while all ranks train. Once all guests are ready the job stands still at the end of one step, which is
saved and renamed; then the manager is offered ``migration``. Until it chooses that, nothing is lost by going on as
before. So silence of the manager, a change of mind, a guest that goes, or a failed checkpoint end in going on. When it
chooses, all loops are left (``STEP FINISH``), the ranks that move are released, and the guests take their seats. What
follows is the repair that new processes get (``replacement``). A failure from there on ends as every failed replacement
does, with that checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Ending, Outcome
from ttp.core.layout import Rank, Version, compact_ranks
from ttp.errors import EXIT_TRAINED
from ttp.mindio.protocol.handshake import Handshake, ManagerMailbox
from ttp.mindio.protocol.in_process_repair import repair_in_process
from ttp.mindio.protocol.manager_messages import CallKind, Code, Notice, NoticeKind, RankFault
from ttp.mindio.protocol.messages import MIGRATION, Ailing, Ailment, RoundKind
from ttp.mindio.protocol.pause import Pausing
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.replica_lists import Replicas, sources
from ttp.mindio.protocol.rounds import Pause, Script
from ttp.mindio.protocol.save_script import dump

GONE = "a newcomer is gone again"


class Switching:
    """Runs hot switches, at most one at a time.

    Args:
        state: the ranks.
        mailbox: the manager.
        pausing: lets all ranks stand still.
        handshake: tells the manager of an incident, and what it may choose.
        blame: opens the incident.
        otherwise: makes the script for a fault without a switch.
    """

    def __init__(
        self,
        state: RepairState,
        mailbox: ManagerMailbox,
        pausing: Pausing,
        handshake: Handshake,
        blame: Callable[[Rank, m.FaultKind, str, float], None],
        otherwise: Callable[[Incident], Script],
    ) -> None:
        self.held = False
        """True while training threads may be standing still for the switch."""
        self.stands = False
        """True while all of them stand still and the open incident is about the switch."""
        self._state, self._mailbox, self._pausing, self._handshake = state, mailbox, pausing, handshake
        self._blame, self._otherwise = blame, otherwise
        self._faults: tuple[RankFault, ...] = ()

    @property
    def moving(self) -> set[Rank]:
        """Ranks that are to be replaced; empty: no switch was asked for."""
        return self._state.job.moving

    @property
    def ready(self) -> bool:
        """True if all new processes are there and can go on."""
        guests = self._state.job.guests
        return bool(self.moving) and all(rank in guests and _is_ready(guests[rank].said) for rank in self.moving)

    def prepare(self, notice: Notice, incident: bool) -> str:
        """Note that the manager starts processes for these ranks. Returns why that is not accepted, else empty."""
        ranks = {fault.rank for fault in notice.faults}
        if ranks and ranks == self.moving:
            return ""
        problem = "a rescue is going on" if incident or self._pausing.paused else self._why_not(ranks)
        if not problem:
            self._faults = tuple(sorted(notice.faults, key=lambda fault: fault.rank))
            self.moving.update(ranks)
            self._state.outbox.record("moves", ranks=sorted(ranks))
        return problem

    def _why_not(self, ranks: set[Rank]) -> str:
        state = self._state
        strangers = sorted(ranks - state.job.live)
        unable = [rank for rank in state.live if not state.recovers(rank)]
        others = state.job.live - ranks
        found = {
            "no rank was given": not ranks,
            f"no rank {compact_ranks(strangers)} trains here": bool(strangers),
            f"ranks {compact_ranks(self.moving)} are to be moved already: say stop switch first": bool(self.moving),
            f"ranks {compact_ranks(unable)} have no enable_arf, or no handlers to rebuild and repair": bool(unable),
        }
        if any(found.values()):
            return next(text for text, holds in found.items() if holds)
        if isinstance(state.replicas, str):
            return state.replicas
        return "" if self._is_held(ranks, others) else f"what ranks {compact_ranks(ranks)} hold is on no other rank"

    def _is_held(self, ranks: Collection[Rank], others: set[Rank]) -> bool:
        """Return whether all that these ranks hold is on others, too."""
        replicas = self._state.replicas
        return isinstance(replicas, Replicas) and sources(replicas, ranks, others) is not None

    def give_up(self, why: str) -> None:
        """Give the switch up and send guests away. Tells the manager ``why``; empty: the manager has chosen it."""
        if self.moving:
            if why:
                self._mailbox.tell(CallKind.RESULT, self._faults, Code.MAY_DUMP, why, strategy=MIGRATION)
            self._state.outbox.record("moves_not", text=why or "the manager has changed its mind")
            self._over()

    def reset(self) -> None:
        """Forget the switch: a new incarnation of the job begins, or another controller leads it."""
        self.held = self.stands = False
        self._faults = ()

    def _over(self) -> None:
        for rank, guest in sorted(self._state.job.guests.items()):
            self._let_go(rank, guest.connection, "the rank whose seat it was to take keeps it")
        self.moving.clear()
        self._state.job.guests.clear()
        self.stands, self._faults = False, ()

    def _let_go(self, rank: Rank, connection: ConnectionId | None, text: str) -> None:
        job, outbox = self._state.job, self._state.outbox
        if connection is not None:
            outbox.send(connection, m.Release(rank, job.term, outbox.incident, EXIT_TRAINED, text))

    # --------------------------------------------------------------------------------------------------------- scripts

    def stand_still(self) -> Script:
        """Have all ranks stand at the end of one step, and open the incident; all new processes are there."""
        self.held = True
        problem = yield from self._pausing.stand_still(0.0)
        if problem or not self.ready:
            self.give_up(problem or GONE)
            return (yield from self.go_on())
        self.stands = True
        text = f"the manager moves ranks {compact_ranks(self.moving)} to other hosts"
        for rank in sorted(self.moving):
            self._blame(rank, m.FaultKind.OUTSIDE, text, self._state.now)
        return Ending(Outcome.RESUMED, Version(0), text)

    def go_on(self, saved: Ending | None = None) -> Script:
        """End the standing still of all ranks."""
        result = yield self._state.everyone(RoundKind.CONTINUE, purpose=MIGRATION)
        self.held = False
        ending = saved or Ending(Outcome.RESUMED, Version(0), "")
        return replace(ending, outcome=Outcome.RESUMED, text=result.words or "all ranks go on where they were")

    def lead(self, incident: Incident) -> Script:
        """Save, ask the manager, and let the new processes take the seats; all ranks stand still."""
        state, moving = self._state, frozenset(self.moving)
        state.until = state.now + state.patience_s(incident)  # nothing is broken: a save that hangs may end nothing
        saved = yield from dump(state, incident)
        state.until = None
        if saved.outcome is not Outcome.SAVED:
            return (yield from self._stay(incident, f"nothing could be saved: {saved.text}", saved))
        if not self._is_held(moving, state.standing(incident, saved.version) - moving):
            return (yield from self._stay(incident, "what they hold is on no rank that could send it", saved))
        self._mailbox.tell(CallKind.STRATEGIES, self._faults, strategies=(MIGRATION,))
        until = state.now + min(self._mailbox.wait_s, state.patience_s(incident))
        while (notice := self._mailbox.take(NoticeKind.STRATEGY)) is None or notice.strategy != MIGRATION:
            if notice is not None and notice.strategy in ("dump", "exit"):
                self.give_up("")
                return replace(saved, text=f"{saved.text}; the manager has chosen to {notice.strategy}")
            reason = self._why_stay(incident, notice, until)
            if reason:
                return (yield from self._stay(incident, reason, saved))
            if notice is not None:
                text = f"{notice.strategy or 'nothing'} is not possible here"
                self._mailbox.tell(CallKind.RESULT, self._faults, Code.MAY_DUMP, text, strategy=notice.strategy)
            else:
                yield Pause(until)
        ending = yield from self._move(incident, moving)
        self._over()
        if ending.outcome is Outcome.RESUMED:
            self.held = False
            self._handshake.owe(ending, MIGRATION)
            return replace(ending, path=saved.path if saved.version == ending.version else "")
        state.tried.add(incident.id)
        state.outbox.record("not_moved", text=ending.text)
        self._handshake.refuse(incident, MIGRATION, ending.text)
        return (yield from self._handshake.obey(incident))

    def _why_stay(self, incident: Incident, notice: Notice | None, until: float) -> str:
        """Return why no rank is moved; empty: the manager may still choose that."""
        found = {
            "something has happened to a rank that was to stay": bool(incident.evidence.subjects - self.moving),
            GONE: not self.ready,
            "the manager has changed its mind": notice is not None and notice.strategy == "continue",
            "the manager says nothing": self._state.now >= until or not self._mailbox.decides,
        }
        return next((text for text, holds in found.items() if holds), "")

    def _stay(self, incident: Incident, why: str, saved: Ending) -> Script:
        """Have all ranks go on where they are; if one cannot any more it is a fault like any other."""
        job, moving = self._state.job, set(self.moving)

        def well() -> bool:
            all_there = not job.in_doubt and len(job.live) == len(job.members)
            return all_there and not (incident.evidence.subjects - moving or job.broken)

        self.give_up(why)
        if well():
            ending = yield from self.go_on(saved)
            if well():
                return ending
        for rank in moving & job.live - job.broken:
            incident.evidence.withdraw(rank, m.FaultKind.OUTSIDE)
        return (yield from self._otherwise(incident))

    def _move(self, incident: Incident, moving: frozenset[Rank]) -> Script:
        state, job = self._state, self._state.job
        everybody, staying = set(job.members), sorted(set(job.members) - moving)
        state.until = state.now + state.patience_s(incident)
        state.halted = state.cleaned = True  # all stand at the end of a step: there is nothing to clean
        try:
            stop = yield state.everyone(RoundKind.STOP, purpose=MIGRATION, together=True, ranks=staying)
            if not stop.ok or not self.ready:
                return _failed(stop.words or GONE)
            for rank in sorted(moving):
                text = "a process on another host has taken the seat of this one"
                self._let_go(rank, job.members[rank].connection, text)
                incident.forget(rank)
            job.seats.update(moving)
            state.outbox.record("seats_open", ranks=sorted(moving))
            while not moving <= set(state.newcomers):
                if everybody - job.seats - job.live or job.broken - job.seats or state.now >= state.until:
                    return _failed("a rank was lost meanwhile, or a newcomer takes too long")
                yield Pause(state.until)
            if job.broken or job.live != everybody:
                return _failed("a rank was lost meanwhile")
            return (yield from repair_in_process(state, incident))
        finally:
            state.until = None
            job.seats.clear()


def _is_ready(said: list[m.ProgramReport]) -> bool:
    return any(isinstance(report, Ailing) and report.ailment is Ailment.JOINED for report in said)


def _failed(text: str) -> Ending:
    return Ending(Outcome.NOT_SAVED, Version(0), text)
