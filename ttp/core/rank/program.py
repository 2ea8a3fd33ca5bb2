"""The seam for programs that save and repair themselves: what a rank's machine asks of their side of the protocol."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import ProgramAction
from ttp.core.rank.events import ProgramEvent


class RankProgram:
    """The rank of a program that ttp saves, and the base for programs that save and repair themselves."""

    waits = False
    """Whether the training thread has left its loop and waits there for the controller."""
    saves = False
    """Whether the program writes its checkpoints itself."""
    updates_for_snapshot = False
    """Whether the update that stands at the gate may be made for a snapshot, so that all are at one version."""

    def happened(self, event: ProgramEvent) -> list[m.ProgramReport]:
        """Take an event of the program. Return the reports to send."""
        return []

    def ordered(self, order: m.ProgramOrder) -> m.ProgramReport | ProgramAction | None:
        """Take an order. Return an action, a report of its result, or None."""
        return None

    def repeated(self) -> list[m.ProgramReport]:
        """Return the reports that every new controller gets first."""
        return []
