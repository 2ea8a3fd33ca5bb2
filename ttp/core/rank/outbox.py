"""Collects what one event makes a rank do."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import Action, Send, SendAside


class RankOutbox:
    """Actions in the order in which they have to be done."""

    def __init__(self) -> None:
        self.welcomed = False
        """A controller has answered ``Hello`` on the stream that is open: reports reach somebody."""
        self.answers_aside = False
        """What this rank is frozen for is of the controller that stands in, see ``stand_in``."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Everything since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def do(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def report(self, report: m.Report) -> None:
        """Tell the controller, if there is one; what has to be known later is said again after its welcome."""
        if self.welcomed:
            self.do(Send(report))

    def answer(self, report: m.Report) -> None:
        """Tell the controller for which this rank is frozen."""
        if self.answers_aside:
            self.do(SendAside(report))
        else:
            self.report(report)
