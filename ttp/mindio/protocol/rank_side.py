"""A rank's part of rounds (``rounds``): its last order, the answer, and the reports for a new controller.

An act is carried out once. If the order is repeated, because a stream broke or a controller missed the answer, the rank
repeats its answer. A new act replaces one that still runs, whose result is then not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.core.rank.actions import ProgramAction
from ttp.core.rank.events import ProgramEvent
from ttp.core.rank.program import RankProgram
from ttp.mindio.protocol.messages import Act, Acted, Ailing, Handlers, RoundKind


@dataclass(frozen=True, slots=True)
class Said(ProgramEvent):
    """A report of the program: its handlers, the end of its training loop, or the result of an act."""

    report: Handlers | Ailing | Acted


@dataclass(frozen=True, slots=True)
class StartAct(ProgramAction):
    """Carry out an act; a ``Said`` with an ``Acted`` follows."""

    act: Act


class RankRounds(RankProgram):
    """The state of the rounds on a rank with handlers."""

    saves = updates_for_snapshot = True

    def __init__(self) -> None:
        self._ailing: Ailing | None = None
        self._known: Handlers | None = None
        self._act: Act | None = None
        self._done: Acted | None = None

    def happened(self, event: ProgramEvent) -> list[m.ProgramReport]:
        """See ``RankProgram.happened``."""
        match event:
            case Said(Handlers() as report):
                self._known = report
            case Said(Ailing() as report):
                self._ailing, self.waits = report, True
            case Said(Acted() as report) if self._awaits(report):
                self._done = report
                if self._act is not None and self._act.kind is RoundKind.RESUME and report.ok:
                    self._ailing, self.waits = None, False
            case _:
                return []
        return [report]

    def _awaits(self, report: Acted) -> bool:
        return self._act is not None and report.serial == self._act.serial and self._done is None

    def ordered(self, order: m.ProgramOrder) -> Acted | StartAct | None:
        """Start the act, or repeat its answer. Return None if the order is outdated, or a repeat of the running act."""
        assert isinstance(order, Act)
        last = self._act
        if last is not None and order.serial < last.serial:
            return None
        if last is not None and order.serial == last.serial:
            return self._done
        self._act, self._done = order, None
        return StartAct(order)

    def repeated(self) -> list[m.ProgramReport]:
        """See ``RankProgram.repeated``."""
        return [report for report in (self._known, self._ailing) if report is not None]


class NoHandlers(RankProgram):
    """The rounds of a rank whose program has no handlers, in a job whose other ranks have some."""

    def ordered(self, order: m.ProgramOrder) -> Acted | None:
        """Answer at once that the act failed, so that the round does not wait for this rank."""
        assert isinstance(order, Act)
        text = f"this rank has no handlers, and so none for {order.kind.value}"
        return Acted(order.rank, order.serial, False, 0, Version(0), True, text)
