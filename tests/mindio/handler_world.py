"""Ranks with handlers, as a controller's machine sees them: each obeys, unless a test says otherwise."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.core.talk import PATIENCE, Talk
from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY
from ttp.core.controller.events import Accused, ConnectionId, Event, Received, Send
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Rank, Version
from ttp.mindio.protocol import messages as rm
from ttp.mindio.protocol.handler_recovery import HandlerRecovery
from ttp.mindio.protocol.manager_messages import (
    AnswerNotice,
    CallManager,
    FaultOf,
    ManagerCall,
    ManagerCame,
    Notice,
    Noticed,
    NoticeKind,
    RankFault,
)
from ttp.testing.toy import hello

Kind = rm.RoundKind
Trouble = dict[tuple[Kind, int], str]
"""What a rank does instead of a round: ``fail``, ``die``, ``hang``, or what its handler returns; or after it: ``again``
(it loses memory), ``raise``."""

SEAT = 100
"""Added to a rank in ``Trouble`` of ``MAKE_WAY``: it is of the new process. ``hang``: it does not come."""
FOUR = [[([0, 1, 2, 3], 2)]]
"""Two pieces: one on 0 and 2, the other on 1 and 3."""
CURE = ["stop", "clean", "repair", "rollback", "resume"]
"""The calls of a repair that succeeds."""
REPLACED = ["save", "rename", "stop", "clean", "make_way", "rebuild", "repair", "rollback", "resume"]
"""The rounds by which lost ranks are replaced."""


@dataclass
class FakeRank:
    """The true state of one rank, whether the controller knows it or not."""

    version: int = 7
    whole: bool = True
    updating: bool = False
    parked: bool = True
    dead: bool = False
    out: bool = False
    released: int | None = None
    life: int = 0
    last: tuple[rm.Act, rm.Acted] | None = None


@dataclass
class Saved:
    """What save handlers have written in one round."""

    version: int
    lists: dict[int, tuple[rm.TypeRanks, ...]] = field(default_factory=dict)


class HandlerWorld(Talk):
    """A world of ``FakeRank``s. ``settle`` lets everything happen until the incident is over.

    Args:
        sets: for every type its sets: ``[([0, 1, 2, 3], 2)]`` is one set of four ranks with two copies.
        trouble: see ``Trouble``; each happens once.
        hosts: a letter for the host of each rank; empty: all are on one.
        handlers: fields of ``Handlers`` that differ from the usual ones.
    """

    def __init__(
        self,
        sets: list[list[tuple[list[int], int]]],
        trouble: Trouble | None = None,
        hosts: str = "",
        **handlers: Any,
    ) -> None:
        size = 1 + max(rank for group in sets[0] for rank in group[0])
        self.ranks = [FakeRank() for _ in range(size)]
        self.trouble = dict(trouble or {})
        self.acts: list[rm.Act] = []
        self.calls: list[ManagerCall] = []
        self.answer = ""
        """To the last thing that the manager has said: why it is not accepted."""
        self.saves: dict[int, Saved] = {}
        self.named: list[int] = []
        self.sent: dict[int, set[tuple[int, int]]] = {}
        self._orders: deque[Send] = deque()
        self._obeying = False
        self.guests: dict[int, tuple[int, FakeRank]] = {}
        """New processes of ranks that live, and their streams."""
        self.starts = True
        """Somebody starts new processes where seats are open; ``start`` does it."""
        super().__init__(Layout.data_parallel(size), joined=0, program=HandlerRecovery)
        for rank in range(size):
            self.hello(rank, framework=rm.HANDLERS, **({"host": hosts[rank]} if hosts else {}))
        plain: dict[str, Any] = {"retry": True, "load_repair": False, "halt_before_dump": False, "halted": False}
        self._facts = {**plain, **handlers}
        self._sets = sets
        for rank in range(size):
            self.report(rank, self.handlers(rank))

    def handlers(self, rank: int, **more: Any) -> rm.Handlers:
        """Return a rank's report on its handlers."""
        mine = tuple(
            rm.ReplicaSet(tuple(Rank(r) for r in ranks), copies)
            for kind in self._sets
            for ranks, copies in kind
            if rank in ranks
        )
        return rm.Handlers(Rank(rank), mine, **{"action_ms": 180_000, "save_ms": 300_000, **self._facts, **more})

    # --------------------------------------------------------------------------------------------------- what happens

    def ails(self, rank: int, ailment: rm.Ailment = rm.Ailment.MEMORY, code: str = "", *, needed: bool = True) -> None:
        """Let the training thread of a rank leave its loop; ``needed``: the lost memory held state."""
        one = self.ranks[rank]
        one.out, one.parked = True, False
        one.whole = one.whole and not (ailment is rm.Ailment.MEMORY and needed)
        self.report(rank, rm.Ailing(Rank(rank), ailment, code, "it hurts"))

    def kill(self, rank: int) -> None:
        """End the process of a rank."""
        self.ranks[rank].dead = True
        self.lost(rank)

    def dies(self, *ranks: int, seat: str = SEAT_READY) -> None:
        """End processes. Their launcher reports it, and whether it can start them alone."""
        for rank in ranks:
            self.ranks[rank].dead = True
        pids = tuple(self.machine.job.members[Rank(rank)].hello.pid for rank in ranks)
        self.event(Accused(tuple(map(Rank, ranks)), m.FaultKind.EXITED, "killed", pids, (), seat))

    def start(self, rank: int) -> str:
        """Let a new process join in the seat of ``rank``."""
        what = self.trouble.pop((Kind.MAKE_WAY, rank + SEAT), "")
        if what == "hang":
            return ""
        said = self.sit(rank, f"new{rank}", pid=1000 + rank)
        if what == "die":
            self.dies(rank)
        elif Rank(rank) in self.machine.job.live:
            self.report(rank, self.handlers(rank))
            self.report(rank, rm.Ailing(Rank(rank), rm.Ailment.JOINED, "", "here I am"))
        return said

    def sit(self, rank: int, nonce: str = "new", **more: Any) -> str:
        """Let a new process say hello in the seat of ``rank``, and no more."""
        self.streams[rank] += 1000
        self.ranks[rank] = FakeRank(version=0, parked=False, out=True)
        return self.hello(rank, framework=rm.HANDLERS, nonce=nonce, launch=1, **more)

    def knock(self, rank: int, *, ready: bool = True, **more: Any) -> str:
        """Let a new process on another host ask for the seat of a live rank; ``ready``: its model is made."""
        stream = self.streams[rank] + 5000
        self.guests[rank] = stream, FakeRank(version=0, parked=False, out=True)
        facts = {"framework": rm.HANDLERS, "nonce": f"moved{rank}", "pid": 2000 + rank, "host": "other", **more}
        said = self.event(Received(ConnectionId(stream), hello(rank, self.layout, **facts)))
        for report in self._newcomer(rank) if ready else ():
            self.event(Received(ConnectionId(stream), report))
        return said

    def _newcomer(self, rank: int) -> list[m.Report]:
        return [self.handlers(rank), rm.Ailing(Rank(rank), rm.Ailment.JOINED, "", "here I am")]

    def _guest_hears(self, order: m.Order) -> list[m.Report]:
        stream, guest = self.guests[order.rank]
        match order:
            case m.Welcome(guest=False):
                del self.guests[order.rank]
                self.ranks[order.rank], self.streams[order.rank] = guest, stream
                return self._newcomer(order.rank)
            case m.Release():
                del self.guests[order.rank]
        return []

    def say(
        self, kind: NoticeKind, faults: dict[int, int] | None = None, strategy: str = "", seconds: float = 0.0
    ) -> None:
        """Deliver a notice of the manager."""
        known = tuple(RankFault(Rank(rank), FaultOf(what)) for rank, what in (faults or {}).items())
        self.event(Noticed(Notice(kind, known, seconds, strategy)))

    def stopped(self, faults: dict[int, int] | None = None, strategy: str | None = None) -> None:
        """Deliver what a manager says of a fault up to the offer of strategies; then ``strategy``, if it is given."""
        self.say(NoticeKind.STOP_TRAIN, faults)
        self.say(NoticeKind.GLOBAL_RANK, faults)
        if strategy is not None:
            self.say(NoticeKind.STRATEGY, strategy=strategy)

    def attend(self, wait_s: float = 30.0) -> None:
        """Attach a manager."""
        self.event(ManagerCame(wait_s))

    def settle(self, seconds: float = 2000.0) -> None:
        """Let time pass until the incident is over."""
        end = self.now + seconds
        while self.machine.incident is not None and self.now < end:
            due = self.machine.deadline()
            for rank in sorted(self.machine.job.seats) if self.starts else ():
                self.start(rank)
            assert due is not None, f"nothing is waited for in {self.machine.stage}"
            self.after(max(0.001, due - self.now))
        assert self.machine.incident is None, f"still {self.machine.stage} after {seconds} s: {self.story()}"

    # ------------------------------------------------------------------------------------------------------ the ranks

    def event(self, event: Event, *, together: bool = False) -> str:
        """Deliver an event, and let ranks carry out the orders that it leads to, and report."""
        line = super().event(event, together=together)
        said = self.said
        self.calls += [a.call for a in said if isinstance(a, CallManager)]
        self.answer = next((a.problem for a in said if isinstance(a, AnswerNotice)), self.answer)
        self._orders.extend(a for a in said if isinstance(a, Send))
        if not self._obeying:
            self._obey_all()
            self.said = said
        return line

    def _obey_all(self) -> None:
        self._obeying = True
        while self._orders:
            self._carry_out(self._orders.popleft())
        self._obeying = False

    def taken_over(self, ailments: dict[int, rm.Ailment]) -> None:
        """Let another controller take the place of this one. Ranks say how they stand before they obey."""
        old, incident = self.machine.job, self.incident.id if self.machine.incident else ""
        self.acts.clear()
        self.machine = ControllerMachine(PATIENCE, lambda n: f"j{n}", self.now, host="h", program=HandlerRecovery)
        for rank, one in enumerate(self.ranks):
            if one.dead:
                continue
            self.streams[rank] += 1000
            known = {"nonce": old.members[Rank(rank)].hello.nonce, "term_seen": old.term, "incident": incident}
            ailment = ailments.get(rank)
            self._obeying = True
            self.hello(rank, framework=rm.HANDLERS, incarnation=1, resume=True, version=one.version, **known)
            self.report(rank, self.handlers(rank, halted=ailment is not rm.Ailment.JOINED))
            if ailment is not None:
                self.report(rank, rm.Ailing(Rank(rank), ailment, "", "still here"))
            self._obey_all()

    def _carry_out(self, sent: Send) -> None:
        order, guest = sent.order, self.guests.get(sent.order.rank)
        at_door = guest is not None and guest[0] == sent.connection
        for report in self._guest_hears(order) if at_door else self._obey(order):
            if self.ranks[order.rank].dead:
                self.lost(order.rank)
            else:
                self.report(order.rank, report)

    def _obey(self, order: m.Order) -> list[m.Report]:
        one = self.ranks[order.rank] if order.rank >= 0 else FakeRank(dead=True)
        if one.dead or one.released is not None:
            return []
        match order:
            case m.Freeze():
                phase = m.Phase.UPDATING if one.updating else m.Phase.IDLE if one.whole else m.Phase.TORN
                return [self.standing(order.rank, phase, order.incident)]
            case m.Release(_, _, _, exit_code, _):
                one.released = exit_code
                return [m.Goodbye(order.rank, m.GoodbyeReason.RELEASED, Version(one.version))]
            case rm.Act():
                return self._act(order)
        return []

    def standing(self, rank: int, phase: m.Phase, incident: str) -> m.Frozen:
        """Return the answer of a rank to a freeze: its last one, unless it is in an update."""
        one, final = self.ranks[rank], phase is not m.Phase.UPDATING
        has_gradient = final and one.parked and not one.out
        return m.Frozen(Rank(rank), incident, Version(one.version), phase, final, has_gradient=has_gradient)

    def _act(self, act: rm.Act) -> list[m.Report]:
        one = self.ranks[act.rank]
        if one.last is not None and one.last[0] == act:
            return [one.last[1]]
        self.acts.append(act)
        what = self.trouble.pop((act.kind, int(act.rank)), "")
        if what == "die":
            one.dead = True
            return [m.Heartbeat(act.rank, Version(one.version), m.Phase.IDLE)]
        if what == "hang":
            return []
        ok, result = what != "fail", int(what) if what.isdigit() else 0
        if ok:
            result = self._done(act, one, result)
        answer = rm.Acted(act.rank, act.serial, ok, result, Version(one.version), not one.whole, "" if ok else "no")
        one.last = (act, answer)
        if what == "again":
            one.out, one.parked, one.whole = True, False, False
            return [answer, rm.Ailing(act.rank, rm.Ailment.MEMORY, "", "it hurts")]
        if what == "raise":
            return [answer, m.Fault(act.rank, act.rank, m.FaultKind.EXCEPTION, "out of luck", "", f"n{act.rank}")]
        return [answer]

    def _done(self, act: rm.Act, one: FakeRank, result: int) -> int:
        match act.kind:
            case Kind.STOP:
                one.out, one.parked = True, False
            case Kind.CATCH_UP:
                one.version += 1
            case Kind.SAVE:
                saved = self.saves.setdefault(act.serial, Saved(one.version if one.whole else -1))
                assert saved.version == one.version == act.version and one.whole, "a copy of another version is saved"
                saved.lists[act.rank] = act.lists
            case Kind.RENAME:
                self.named.append(act.version)
            case Kind.REPAIR:
                self._repair(act, one)
            case Kind.ROLLBACK | Kind.RESUME:
                one.version = act.version
                if act.kind is Kind.RESUME:
                    one.out, one.life, one.parked = False, one.life + 1, True
            case Kind.HOLD:
                return one.version + 1
        return result

    def _repair(self, act: rm.Act, one: FakeRank) -> None:
        for transfer in act.transfers:
            source = self.ranks[transfer.src]
            if act.rank == transfer.src:
                assert source.whole and source.version == act.version, "a copy of another version is sent"
            else:
                one.whole, one.version = True, act.version

    # ---------------------------------------------------------------------------------------------- what is the case

    def heard(self) -> list[tuple[str, int, str]]:
        """Return the calls of the manager: what it was told, the code, and strategies."""
        return [(call.kind.value, call.code, call.strategy or ",".join(call.strategies)) for call in self.calls]

    def kinds(self) -> list[str]:
        """Return the kinds of the rounds so far, in order."""
        rounds = {act.serial: act.kind.value for act in self.acts}
        return [rounds[serial] for serial in sorted(rounds)]

    def acted(self, kind: Kind) -> dict[int, rm.Act]:
        """Return the last act of a kind of every rank."""
        return {int(act.rank): act for act in self.acts if act.kind is kind}

    @property
    def released(self) -> set[int]:
        """Return the exit codes of released ranks."""
        return {one.released for one in self.ranks if one.released is not None}

    def story(self) -> str:
        """Return the story for a failed test."""
        return f"{self.kinds()} {self.ranks} {self.machine.stage}"
