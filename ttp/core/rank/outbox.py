"""Collects the actions that a rank has to do after one event."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import Action, Send, SendAside


class RankOutbox:
    """Actions in the order in which they have to be done."""

    def __init__(self) -> None:
        self.welcomed = False
        """Whether the controller has answered ``Hello`` on the open stream, so that it takes reports."""
        self.answers_aside = False
        """Whether a stand-in has frozen this rank, so that answers go to the stand-in; see ``stand_in``."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Return all actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def do(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def report(self, report: m.Report) -> None:
        """Send a report to the controller if it has welcomed this rank. After a welcome lasting facts are repeated."""
        if self.welcomed:
            self.do(Send(report))

    def answer(self, report: m.Report) -> None:
        """Send an answer to the controller that froze this rank."""
        if self.answers_aside:
            self.do(SendAside(report))
        else:
            self.report(report)
