"""A rank's side of rounds (``ttp.core.rounds``): what was ordered, what came of it, what a new controller has to know.

An act is carried out once. Told again, because a stream broke or a controller did not hear the answer, the rank says
again what came of it. A new act replaces one that is still running: what that one brings is said to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttp.core.rounds_messages import Act, Acted, Ailing, Handlers, RoundKind


@dataclass(frozen=True, slots=True)
class StartAct:
    """Carry out an act; ``ActDone`` follows."""

    act: Act


class HandlerTalk:
    """What was said about handlers."""

    def __init__(self) -> None:
        self.ailing: Ailing | None = None
        self._known: Handlers | None = None
        self._act: Act | None = None
        self._done: Acted | None = None

    def known(self, report: Handlers) -> Handlers:
        """The program's handlers are known, or known better."""
        self._known = report
        return report

    def ailed(self, report: Ailing | None) -> Ailing | None:
        """The training thread has left its loop, or has gone back."""
        self.ailing = report
        return report

    def ordered(self, act: Act) -> StartAct | Acted | None:
        """What to do about an order: start it, say its answer again, or nothing."""
        last = self._act
        if last is not None and act.serial < last.serial:
            return None
        if last is not None and act.serial == last.serial:
            return self._done
        self._act, self._done = act, None
        return StartAct(act)

    def done(self, report: Acted) -> Acted | None:
        """The answer, if somebody waits for it."""
        if self._act is None or report.serial != self._act.serial or self._done is not None:
            return None
        self._done = report
        if self._act.kind is RoundKind.RESUME and report.ok:
            self.ailing = None
        return report

    def repeated(self) -> list[Handlers | Ailing]:
        """What every controller is told first."""
        return [report for report in (self._known, self.ailing) if report is not None]
