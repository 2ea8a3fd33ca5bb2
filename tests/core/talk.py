"""Short helpers for tests that exchange messages with one controller's machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.events import (
    Accused,
    Action,
    AnswerSave,
    ConnectionId,
    ControllerTimeouts,
    Event,
    Received,
    Record,
    SaveRequested,
    Send,
    SendAlike,
    Stop,
    StreamEnded,
    Tick,
)
from ttp.core.controller.incident import Incident
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.program_recovery import MakeRecovery, no_recovery
from ttp.core.copy_messages import Mirror
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import LayoutPart, TellLayout, in_parts
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

PATIENCE = ControllerTimeouts(
    answer_s=5, freeze_s=30, grace_s=1, rescue_s=360, gather_s=5, exit_s=10, abandoned_s=120, linger_s=2, stall_s=1000
)


def apart(actions: Iterable[Action]) -> list[Action]:
    """Replace each ``SendAlike``, an order for several ranks, by one ``Send`` per rank."""
    found: list[Action] = []
    for action in actions:
        if isinstance(action, SendAlike):
            found += (Send(connection, replace(action.order, rank=rank)) for connection, rank in action.who)
        else:
            found.append(action)
    return found


def answers(order: TellLayout, layout: Layout) -> list[LayoutPart]:
    """Return a rank's reports after it is asked for its layout."""
    parts = in_parts(layout)
    return [LayoutPart(order.rank, order.digest, i, len(parts), groups) for i, groups in enumerate(parts)]


class Talk:
    """A controller's machine with a clock. A rank's stream is ``rank + 1`` unless the test says otherwise.

    The machine's actions are returned as one line: ``Freeze:1,2`` are orders, ``[plan]`` is a record, and so on.

    Args:
        layout: the job's layout.
        joined: how many ranks have joined, from rank 0; all by default.
        program: of the machine.
        more: fields of their hellos.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        *,
        joined: int | None = None,
        program: MakeRecovery = no_recovery,
        **more: Any,
    ) -> None:
        self.layout = layout or grid(1, 3)
        self.now = 0.0
        self.machine = ControllerMachine(PATIENCE, lambda n: f"i{n}", 0.0, host="h", program=program)
        self.said: list[Action] = []
        self.streams = {r: r + 1 for r in range(self.layout.world_size)}
        for r in range(self.layout.world_size if joined is None else joined):
            self.hello(r, **more)

    @property
    def incident(self) -> Incident:
        """The open incident."""
        assert self.machine.incident
        return self.machine.incident

    # ------------------------------------------------------------------------------------------------------- what comes

    def event(self, event: Event, *, together: bool = False) -> str:
        self.said = apart(self.machine.on_event(event, self.now, more=together))
        return line(self.said)

    def all_said(self) -> str:
        """Settle the events that were delivered together."""
        self.said = apart(self.machine.settle(self.now))
        return line(self.said)

    def report(self, rank: int, report: m.Report, *, together: bool = False) -> str:
        return self.event(Received(ConnectionId(self.streams[rank]), report), together=together)

    def hello(self, rank: int, **more: Any) -> str:
        self.machine.job.learn(self.layout)  # test_layouts.py is about how it is asked for
        return self.report(rank, hello(rank, self.layout, **more))

    def back(self, rank: int, **more: Any) -> str:
        """Let the rank open another stream."""
        self.streams[rank] += 100
        known = {"incarnation": self.machine.job.incarnation, "resume": True, "term_seen": self.machine.job.term}
        return self.hello(rank, **{**known, **more})

    def lost(self, rank: int) -> str:
        return self.event(StreamEnded(ConnectionId(self.streams[rank])))

    def after(self, seconds: float) -> str:
        """Let time pass, with a tick at each deadline as long as it decides about ranks that are missing."""
        end, job, said = self.now + seconds, self.machine.job, list[Action]()
        while (job.gather_until is not None or job.suspects) and (due := self.machine.deadline()) and due < end:
            self.now = max(self.now, due)
            self.event(Tick())
            said += self.said
        self.now = end
        self.event(Tick())
        self.said = said + self.said
        return line(self.said)

    def fault(
        self, rank: int, kind: m.FaultKind = m.FaultKind.EXCEPTION, subject: int | None = None, *, wrong: bool = False
    ) -> str:
        about = Rank(rank if subject is None else subject)
        return self.report(rank, m.Fault(Rank(rank), about, kind, f"{kind.value} of {about}", wrong=wrong))

    def frozen(
        self, rank: int, version: int, phase: m.Phase = m.Phase.IDLE, *, together: bool = False, **more: Any
    ) -> str:
        final = phase is not m.Phase.UPDATING
        answer = m.Frozen(Rank(rank), self.id, Version(version), phase, final, **more)
        return self.report(rank, answer, together=together)

    def frozen_all(self, version: int = 7, *ranks: int, **more: Any) -> str:
        """Deliver the final answers of these ranks, or of all that live, and return the line of the last one."""
        return [self.frozen(rank, version, **more) for rank in ranks or sorted(self.machine.job.live)][-1]

    def saved(self, rank: int, generation: int = 0) -> str:
        piece = m.Piece(f"{rank}_{generation}", 1, "d", "shard", "s0", Rank(rank))
        return self.report(rank, m.Saved(Rank(rank), self.id, generation, (piece,)))

    def save_failed(self, rank: int, generation: int = 0, *, may_pass: bool = False) -> str:
        return self.report(rank, m.SaveFailed(Rank(rank), self.id, generation, "disk full", may_pass))

    def committed(self, rank: int, generation: int = 0) -> str:
        return self.report(rank, m.Committed(Rank(rank), self.id, generation, "/save/step", 1))

    def commit_failed(self, rank: int, generation: int = 0, *, may_pass: bool = False) -> str:
        return self.report(rank, m.CommitFailed(Rank(rank), self.id, generation, "no rename", may_pass))

    def write(self) -> str:
        """Let everything that was ordered be saved and committed."""
        for rank, order in sorted(self.incident.draft.pending.items()):
            self.saved(rank, order.generation)
        (commit,) = self.orders(m.Commit)
        return self.committed(commit.rank, commit.generation)

    def goodbye(self, rank: int, reason: m.GoodbyeReason = m.GoodbyeReason.DONE, version: int = 9) -> str:
        return self.report(rank, m.Goodbye(Rank(rank), reason, Version(version)))

    def ask(self, request: int = 1) -> str:
        return self.event(SaveRequested(request, "asked"))

    def accuse(self, rank: int, kind: m.FaultKind, pid: int = 0) -> str:
        return self.event(Accused((Rank(rank),), kind, "seen from outside", (pid,)))

    # ------------------------------------------------------------------------------------------------- what is the case

    @property
    def id(self) -> str:
        incident = self.machine.incident or self.machine.rescue.last
        assert incident is not None
        return incident.id

    def orders(self, kind: type[m.Order]) -> list[Any]:
        return [a.order for a in self.said if isinstance(a, Send) and isinstance(a.order, kind)]

    def facts(self, kind: str) -> dict[str, Any]:
        return next(a.facts for a in self.said if isinstance(a, Record) and a.kind == kind)


def line(actions: Sequence[Action]) -> str:
    """Return the actions as one line. Equal orders in a row are combined."""
    parts: list[str] = []
    for action in actions:
        match action:
            case Send(_, order):
                name = type(order).__name__
                more = {m.Release: "exit_code", m.Refused: "code"}.get(type(order))
                detail = f"({getattr(getattr(order, more), 'value', getattr(order, more))})" if more else ""
                if parts and parts[-1].startswith(f"{name}{detail}:"):
                    parts[-1] += f",{order.rank}"
                else:
                    parts.append(f"{name}{detail}:{order.rank}")
            case Record(kind):
                parts.append(f"[{kind}]")
            case AnswerSave(_, saved):
                parts.append("answer: saved" if saved else "answer: not saved")
            case Stop():
                parts.append("stop")
    return " ".join(parts)


LOST = "[opened] Freeze:1,2 [evidence]"
"""Rank 0 of three is lost."""


def all_at_7(begin: Callable[[Talk], str], *ranks: int) -> Talk:
    """Return the talk of a job in which an incident has begun, and these ranks are frozen at version 7."""
    talk = Talk()
    begin(talk)
    talk.frozen_all(7, *ranks)
    return talk


class Wide(Talk):
    """Two ranks on each host: h0, h1, ...; the controller runs on h0."""

    def __init__(self, layout: Layout | None = None, **patience: Any) -> None:
        super().__init__(layout or grid(1, 6), joined=0)
        self.machine = ControllerMachine(replace(PATIENCE, **patience), lambda n: f"i{n}", 0.0, host="h0")
        self.lines = [self.hello(r) for r in range(self.layout.world_size)]

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"host": f"h{rank // 2}", "address": f"10.0.0.{rank // 2}", **more})

    def beat(self, rank: int, version: int = 0, **more: Any) -> None:
        self.report(rank, m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE, **more))


def page(rank: int, incarnation: int = 1) -> Mirror:
    """Return the page of a dead rank, as its launcher hands it over."""
    return Mirror(Rank(rank), Version(7), True, incarnation, b"page")
