"""Collects the actions that one event makes a rank do."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import Action, Send, SendAside


class RankOutbox:
    """Actions in the order in which they have to be done."""

    def __init__(self) -> None:
        self.welcomed = False
        """Whether a controller has answered ``Hello`` on the open stream, so that reports reach one."""
        self.answers_aside = False
        """Whether the controller that stands in has frozen this rank, so that it gets the answers; see ``stand_in``."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Return all actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def do(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def report(self, report: m.Report) -> None:
        """Send a report to the controller, if it has welcomed this rank; lasting facts are repeated after a welcome."""
        if self.welcomed:
            self.do(Send(report))

    def answer(self, report: m.Report) -> None:
        """Send an answer to the controller that froze this rank."""
        if self.answers_aside:
            self.do(SendAside(report))
        else:
            self.report(report)
