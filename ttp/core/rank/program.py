"""The interface between a rank's machine and programs that save and repair themselves."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import ProgramAction
from ttp.core.rank.events import ProgramEvent


class RankProgram:
    """The default, for programs that ttp saves, and the base for programs that save and repair themselves."""

    waits = False
    """Whether the training thread has left its loop and waits for the controller."""
    saves = False
    """Whether the program writes its checkpoints itself."""
    updates_for_snapshot = False
    """Whether a rank at the gate may make its update for a snapshot, so that all ranks are at one version."""

    def happened(self, event: ProgramEvent) -> list[m.ProgramReport]:
        """Take an event of the program. Return the reports to send."""
        return []

    def ordered(self, order: m.ProgramOrder) -> m.ProgramReport | ProgramAction | None:
        """Take an order. Return an action to be done, a report of the result, or None."""
        return None

    def repeated(self) -> list[m.ProgramReport]:
        """Return the reports to send after every welcome."""
        return []
