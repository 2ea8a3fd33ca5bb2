"""Short helpers for tests that exchange messages with the machine of one rank."""

from __future__ import annotations

from typing import Any

from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.rank.machine import ProcessorMachine
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

ME = Rank(1)
FROZEN = "CloseGate"


class Rank1:
    """The machine of rank 1, with a clock."""

    def __init__(self, *, joined: bool = True, can_continue: bool = False, **timeouts: Any) -> None:
        self.now = 0.0
        self.machine = ProcessorMachine(hello(1, grid(1, 3), can_continue=can_continue), RankTimeouts(**timeouts), 0.0)
        self.did: list[act.Action] = []
        if joined:
            self.event(ev.StreamUp())
            self.order(m.Welcome(ME, 1, 1, "1"))

    def event(self, event: ev.Event) -> str:
        self.did = self.machine.on_event(event, self.now)
        return " ".join(_word(a) for a in self.did)

    def order(self, order: m.Order) -> str:
        return self.event(ev.OrderReceived(order))

    def comes_back(self, term: int = 1) -> str:
        """Lose the stream, and open another one to the controller of this term, which welcomes the rank."""
        self.event(ev.StreamDown("gone"))
        self.event(ev.StreamUp())
        return self.order(m.Welcome(ME, term, 1, "1"))

    def after(self, seconds: float) -> str:
        self.now += seconds
        return self.event(ev.Observed(self.machine.state.version, m.Phase.IDLE))

    def freeze(self, incident: str = "a", *, snapshot: bool = False, term: int = 1) -> str:
        return self.order(m.Freeze(ME, term, incident, "why", snapshot))

    def quiet(self, version: int = 7, phase: m.Phase = m.Phase.IDLE, *, parked: bool = True, **more: Any) -> str:
        return self.event(ev.Quiet(Version(version), phase, parked, True, **more))

    def save(
        self,
        version: int = 7,
        generation: int = 0,
        *,
        incident: str = "a",
        shards: tuple[str, ...] = ("s0",),
        how: How = How.AS_IS,
    ) -> str:
        order = m.SaverOrder(ME, tuple(map(Shard, shards)), how, (ME,), True)
        return self.order(m.Save(ME, 1, incident, generation, Version(version), "draft", order))

    def commit(self, generation: int = 0) -> str:
        return self.order(m.Commit(ME, 1, "a", generation, Version(7), 1, "draft", "", "", 3, (), ()))

    def thaw(self, incident: str = "a", term: int = 1) -> str:
        return self.order(m.Thaw(ME, term, incident, "why"))

    def sent(self, kind: type[m.Report]) -> Any:
        return next(a.report for a in self.did if isinstance(a, act.Send) and isinstance(a.report, kind))


def _word(action: act.Action) -> str:
    match action:
        case act.Send(report):
            return f">{type(report).__name__}"
        case act.Exit(code):
            return f"Exit({code})"
        case act.Connect(start_controller):
            return "Connect(start)" if start_controller else "Connect"
        case act.LetGo(rescued):
            return f"LetGo({rescued})"
    return type(action).__name__
