"""The seam for programs that save and repair themselves: what a rank's machine asks of their side of the protocol."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import ProgramAction
from ttp.core.rank.events import ProgramEvent


class RankProgram:
    """The rank of a program that ttp saves, and the base for programs that save and repair themselves."""

    waits = False
    """Whether the training thread has left its loop, and stands there until somebody says something."""
    saves = False
    """Whether the program writes its checkpoints itself."""
    updates_for_snapshot = False
    """Whether the update that stands at the gate may be made for a mere snapshot, so that all are at one version."""

    def happened(self, event: ProgramEvent) -> list[m.ProgramReport]:
        """Take an event of the program. Returns what to report."""
        return []

    def ordered(self, order: m.ProgramOrder) -> m.ProgramReport | ProgramAction | None:
        """Take an order. Returns an action, a report of what came of it, or None."""
        return None

    def repeated(self) -> list[m.ProgramReport]:
        """Reports that every new controller is told first."""
        return []
