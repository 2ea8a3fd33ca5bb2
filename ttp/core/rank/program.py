"""The seam for programs that save and repair themselves: what a rank's machine asks of their side of the protocol."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.rank.actions import ProgramAction
from ttp.core.rank.events import ProgramEvent


class RankProgram:
    """Has nothing to say: the rank of a program that ttp saves, and the base of what speaks for another one."""

    waits = False
    """Whether the training thread has left its loop, and stands there until somebody says something."""
    updates_for_snapshot = False
    """Whether the update that stands at the gate may be made for a mere snapshot, so that all are at one version."""

    def happened(self, event: ProgramEvent) -> list[m.ProgramReport]:
        """Something happened in the program; what to say of it."""
        return []

    def ordered(self, order: m.ProgramOrder) -> m.ProgramReport | ProgramAction | None:
        """What to do about an order: something, say what came of it, or nothing."""
        return None

    def repeated(self) -> list[m.ProgramReport]:
        """What every controller is told first."""
        return []
