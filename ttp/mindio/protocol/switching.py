"""The script of a hot switch: live ranks are replaced by processes that were started on other hosts meanwhile.

The manager names the ranks to move, and starts a process for each. These processes join as guests and prepare while all
ranks train. Once all guests are ready, the job is paused at the end of one step, which is saved and renamed; then the
manager is offered ``migration``. Until it chooses that, the job can continue as before without a loss, and does so if
the manager does not answer or withdraws, a guest ends, or the checkpoint fails. When it chooses ``migration``, all
training threads leave their loops (``STEP FINISH``), the ranks to move are released, and the guests replace them. The
rest is the repair of a replacement (``replacement``). A failure from there on ends with that checkpoint, as every
failed replacement does.

Without a manager, an operator may drain a host while a standby launcher offers its own host (``offered``). Then that
launcher starts the processes, and ``migration`` needs no choice. If the ranks cannot be moved, the job is restarted
without the drained host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.controller.fault_targets import fault_targets
from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Guest
from ttp.core.controller.program_recovery import Ending, Outcome, not_saved
from ttp.core.layout import Rank, Version, compact_ranks, ranks_text
from ttp.errors import EXIT_TRAINED
from ttp.mindio.protocol.handshake import Handshake, ManagerMailbox
from ttp.mindio.protocol.in_process_repair import repair_in_process
from ttp.mindio.protocol.manager_messages import CallKind, Code, FaultOf, Notice, NoticeKind, RankFault
from ttp.mindio.protocol.messages import MIGRATION, Ailing, Ailment, RoundKind
from ttp.mindio.protocol.pause import Pausing
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.replica_lists import Replicas, sources
from ttp.mindio.protocol.rounds import Pause, Result, Script, Step
from ttp.mindio.protocol.save_script import dump

GONE = "a new process has ended"
OFFER_S = 5.0
"""Seconds for which a launcher's offer of its host holds; the launcher repeats the offer each second."""
START_S = 120.0
"""Seconds in which the new processes for the ranks of a drained host have to be ready, while all ranks train."""


class Switching:
    """Runs hot switches, at most one at a time.

    Args:
        state: the state of the ranks.
        mailbox: the notices of the manager, and the calls to it.
        pausing: pauses all ranks.
        handshake: reports results to the manager, and carries out its choices.
        blame: function that opens an incident.
        otherwise: returns the script for an incident without a switch.
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
        """Whether training threads may be paused for the switch."""
        self.stands = False
        """Whether all of them are paused and the open incident is about the switch."""
        self._state, self._mailbox, self._pausing, self._handshake = state, mailbox, pausing, handshake
        self._blame, self._otherwise = blame, otherwise
        self._faults: tuple[RankFault, ...] = ()
        self._offers: dict[str, tuple[float, str]] = {}  # by host: when the offer ends, and the address of its store
        self._drains = ""
        """Host that an operator drains; empty if none, or if a manager moves ranks."""
        self._place, self._until = "", 0.0
        self._owed = ""
        """Drained host whose ranks could not be moved, and were not yet reported as faulty."""

    @property
    def moving(self) -> set[Rank]:
        """The ranks to move; empty if no switch was requested."""
        return self._state.job.moving

    @property
    def ready(self) -> bool:
        """Whether all new processes have joined and are ready."""
        guests = self._state.job.guests
        return bool(self.moving) and all(rank in guests and _is_ready(guests[rank]) for rank in self.moving)

    def wanted(self, notice: Notice, incident: bool) -> str:
        """Begin to move ranks, for a manager or an operator who drains a host.

        Returns:
            Why the request is not accepted; empty if it is.
        """
        move = notice.kind is NoticeKind.MOVE
        return self._drain(notice.params, incident) if move else self._prepare(notice, incident)

    def _prepare(self, notice: Notice, incident: bool) -> str:
        ranks = {fault.rank for fault in notice.faults}
        if ranks and ranks == self.moving:
            return ""
        problem = "training is paused" if self._state.paused else self._why_not(ranks)
        problem = "a rescue is going on" if incident else problem
        if not problem:
            self._faults = tuple(sorted(notice.faults, key=lambda fault: fault.rank))
            self.moving.update(ranks)
            self._state.outbox.record("moves", ranks=sorted(ranks))
        return problem

    def offered(self, host: str, store: str) -> tuple[Rank, ...]:
        """Take a launcher's offer of its ``host``, and return the ranks that it has to start there now."""
        now = self._state.now
        self._offers = {name: offer for name, offer in self._offers.items() if offer[0] > now}
        if host not in self._offers:
            self._state.outbox.record("offered", host=host)
        self._offers[host] = now + OFFER_S, store
        return tuple(sorted(self.moving)) if self._drains and host == self._place else ()

    def _drain(self, host: str, incident: bool) -> str:
        job, now = self._state.job, self._state.now
        places = sorted(name for name, (until, _) in self._offers.items() if until > now)
        ranks = fault_targets(job, (), host).ranks
        problems = {
            "a manager decides for this job": self._mailbox.present,
            "no standby host has offered to take its ranks": not places,
            "rank 0 runs there, and the other ranks need its host": Rank(0) in ranks,
        }
        if problem := next((text for text, holds in problems.items() if holds), ""):
            return problem
        if self._drains and self.moving == set(ranks):
            return ""
        faults = tuple(RankFault(rank, FaultOf.PROCESS) for rank in ranks)
        problem = self._prepare(Notice(NoticeKind.HOT_SWITCH, faults), incident)
        if not problem:
            self._drains, self._place, self._until = job.members[ranks[0]].hello.host, places[0], now + START_S
            self._state.drain(frozenset({self._drains}))
        return problem

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``expire`` has to be called."""
        if self._drains and not self.held:
            yield self._until

    def expire(self) -> None:
        """Report the ranks of a drained host that could not be moved as faulty, so that the job restarts without it."""
        if self._drains and not self.held and self._state.now >= self._until:
            self.give_up(f"no new processes were ready within {START_S:g} s")
        if self._owed and not (self.held or self._state.outbox.incident):
            host, self._owed = self._owed, ""
            text = f"{host} is drained, and its ranks could not be moved"
            for rank in self._state.job.hosts().get(host, ()):
                self._state.job.mark_failed(rank, text)
                self._blame(rank, m.FaultKind.OUTSIDE, text, self._state.now)

    def _why_not(self, ranks: set[Rank]) -> str:
        state = self._state
        strangers = sorted(ranks - state.job.live)
        unable = [rank for rank in state.live if not state.recovers(rank)]
        others = state.job.live - ranks
        found = {
            "no rank was given": not ranks,
            f"no rank {compact_ranks(strangers)} trains here": bool(strangers),
            f"the move of {ranks_text(self.moving)} has begun already: send stop switch first": bool(self.moving),
            f"no enable_arf, or no handlers to rebuild and repair, on {ranks_text(unable)}": bool(unable),
        }
        if any(found.values()):
            return next(text for text, holds in found.items() if holds)
        if isinstance(state.replicas, str):
            return state.replicas
        return "" if self._is_held(ranks, others) else f"the state of {ranks_text(ranks)} is on no other rank"

    def _is_held(self, ranks: Collection[Rank], others: set[Rank]) -> bool:
        """Return whether the ranks ``others`` hold copies of the whole state of ``ranks``."""
        replicas = self._state.replicas
        return isinstance(replicas, Replicas) and sources(replicas, ranks, others) is not None

    def give_up(self, why: str) -> None:
        """Give up the switch and release the guests.

        Args:
            why: the reason, for the manager; empty if the manager has chosen this.
        """
        if self.moving:
            self._owed = self._drains
            if why:
                self._mailbox.tell(CallKind.RESULT, self._faults, Code.MAY_DUMP, why, strategy=MIGRATION)
            self._state.outbox.record("moves_not", text=why or "the manager has withdrawn the switch")
            self._over()

    def reset(self) -> None:
        """Forget the switch, because a new incarnation of the job begins or another controller leads it."""
        self.held = self.stands = False
        self._faults, self._drains, self._owed = (), "", ""

    def _over(self) -> None:
        for rank, guest in sorted(self._state.job.guests.items()):
            self._let_go(rank, guest.connection, "the rank that this process should replace is not moved")
        self.moving.clear()
        self._state.job.guests.clear()
        self.stands, self._faults, self._drains = False, (), ""

    def _let_go(self, rank: Rank, connection: ConnectionId | None, text: str) -> None:
        job, outbox = self._state.job, self._state.outbox
        if connection is not None:
            outbox.send(connection, m.Release(rank, job.term, outbox.incident, EXIT_TRAINED, text))

    # --------------------------------------------------------------------------------------------------------- scripts

    def stand_still(self) -> Script:
        """Pause all ranks at the end of one step, and open the incident. Runs when all new processes are ready."""
        self.held = True
        problem = yield from self._pausing.stand_still()
        if problem or not self.ready:
            self.give_up(problem or GONE)
            return (yield from self.go_on())
        self.stands = True
        ranks = ranks_text(self.moving)
        text = f"the manager moves {ranks} to other hosts"
        if self._drains:
            text = f"{self._drains} is drained, which moves {ranks} to {self._place}"
        for rank in sorted(self.moving):
            self._blame(rank, m.FaultKind.OUTSIDE, text, self._state.now)
        return Ending(Outcome.RESUMED, Version(0), text)

    def go_on(self, saved: Ending | None = None) -> Script:
        """Let all paused ranks continue."""
        result = yield self._state.everyone(RoundKind.CONTINUE, purpose=MIGRATION)
        self.held = False
        ending = saved or Ending(Outcome.RESUMED, Version(0), "")
        return replace(ending, outcome=Outcome.RESUMED, text=result.words or "all ranks continue where they were")

    def lead(self, incident: Incident) -> Script:
        """Save, ask the manager, and replace ranks by the new processes; all ranks are paused."""
        state, moving = self._state, frozenset(self.moving)
        state.until = state.now + state.patience_s(incident)  # a save that hangs must not end a healthy job
        saved = yield from dump(state, incident, halts=False)  # training may continue in the same loops
        state.until = None
        if saved.outcome is not Outcome.SAVED:
            return (yield from self._stay(incident, f"nothing could be saved: {saved.text}", saved))
        if not self._is_held(moving, state.standing(incident, saved.version) - moving):
            return (yield from self._stay(incident, "no rank that stays holds the state of the ranks to move", saved))
        ending = yield from self._ask(incident, saved)
        if ending is not None:
            return ending
        ending = yield from self._move(incident, moving)
        self._over()
        if ending.outcome is Outcome.RESUMED:
            self.held = False
            self._handshake.owe(ending, MIGRATION)
            return replace(ending, path=saved.path if saved.version == ending.version else "")
        state.tried.add(incident.id)
        state.outbox.record("not_moved", text=ending.text)
        self._handshake.refuse(incident, MIGRATION, ending.text)
        return (yield from self._handshake.obey(incident, saved))

    def _ask(self, incident: Incident, saved: Ending) -> Generator[Step, Result, Ending | None]:
        """Wait for the manager's choice. Return how the incident ends; None if the ranks are to be moved."""
        state = self._state
        if self._drains:
            reason = self._why_stay(incident, None, state.now)
            return (yield from self._stay(incident, reason, saved)) if reason else None
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
        return None

    def _why_stay(self, incident: Incident, notice: Notice | None, until: float) -> str:
        """Return why no rank is moved; empty if the manager may still choose to move them."""
        found = {
            "a rank that was not to be moved has a fault": bool(incident.evidence.subjects - self.moving),
            GONE: not self.ready,
            "the manager has withdrawn the switch": notice is not None and notice.strategy == "continue",
            "the manager does not answer": not self._drains and (self._state.now >= until or not self._mailbox.decides),
        }
        return next((text for text, holds in found.items() if holds), "")

    def _stay(self, incident: Incident, why: str, saved: Ending) -> Script:
        """Let all ranks continue where they are. If one of them cannot, handle the fault without a switch."""
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
        state.store = self._offers[self._place][1] if self._drains and self._place in self._offers else ""
        state.halted = state.cleaned = True  # all ranks are paused at the end of a step: no device has to be cleaned
        try:
            stop = yield state.everyone(RoundKind.STOP, purpose=MIGRATION, together=True, ranks=staying)
            if not stop.ok or not self.ready:
                return not_saved(stop.words or GONE)
            for rank in sorted(moving):
                text = "a process on another host replaces this one"
                self._let_go(rank, job.members[rank].connection, text)
                incident.ranks.forget(rank)
            job.seats.update(moving)
            state.outbox.record("seats_open", ranks=sorted(moving))
            while not moving <= set(state.newcomers):
                if everybody - job.seats - job.live or job.broken - job.seats or state.now >= state.until:
                    return not_saved("a rank was lost meanwhile, or a new process takes too long")
                yield Pause(state.until)
            if job.broken or job.live != everybody:
                return not_saved("a rank was lost meanwhile")
            return (yield from repair_in_process(state, incident))
        finally:
            state.until, state.store = None, ""
            job.seats.clear()


def _is_ready(guest: Guest) -> bool:
    said = guest.said.get(Ailing)
    return isinstance(said, Ailing) and said.ailment is Ailment.JOINED
