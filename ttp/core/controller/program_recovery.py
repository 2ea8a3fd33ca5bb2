"""The seam for jobs that save and repair themselves: what the controller asks of the part that leads such a recovery.

Faults are found, the world is frozen and the newest whole version is decided on as in every other job. Then, instead of
``saving``, the recovery that ``leads`` is asked to ``begin``, and to ``advance`` after every event, until it says how
that ended. What it and the program's ranks say to each other is opaque here: ``ProgramReport``, ``ProgramOrder``,
``ProgramEvent``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.controller.events import ProgramEvent
from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.decide import NoPlan, Plan
from ttp.core.layout import Layout, Rank, Version


class Outcome(enum.Enum):
    """The way in which a recovery ended."""

    RESUMED = "resumed"  # training goes on
    SAVED = "saved"
    NOT_SAVED = "not_saved"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a recovery: the version that training goes on from or that was saved, why, and where it is.

    If training goes on, ``path`` is empty unless the version was saved first.
    """

    outcome: Outcome
    version: Version
    text: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class RescueContext:
    """The parts of the controller that a recovery may ask and use.

    Args:
        job: the ranks.
        outbox: takes orders, records and ``ProgramAction``.
        decide: returns the newest version that can be saved now, as a plan.
        on_disk: returns the newest version that is on disk.
        blame: takes evidence against a rank, or against nobody (-1), and its time.
        rescue_s: seconds that an incident may last.
        drain: takes hosts whose launchers must not start ranks again.
    """

    job: Membership
    outbox: Outbox
    decide: Callable[[Incident], Plan | NoPlan]
    on_disk: Callable[[], Version]
    blame: Callable[[Rank, m.FaultKind, str, float], None]
    rescue_s: float
    drain: Callable[[frozenset[str]], None]


class ProgramRecovery:
    """Leads no recovery. The default of a controller, and the base for programs that save and repair themselves."""

    @property
    def leads(self) -> bool:
        """True if the program itself saves."""
        return False

    @property
    def layout(self) -> Layout | None:
        """The layout, if the program knows better than the ranks' ``Hello`` which rank holds what; else None."""
        return None

    @property
    def halted(self) -> bool:
        """True if training would not go on after a thaw alone."""
        return False

    @property
    def may_repair(self) -> bool:
        """True if a training loop has ended that can be entered again: an incomplete version may then become whole."""
        return False

    def invalid(self, rank: Rank) -> bool:
        """Return whether the rank's copy belongs to no version, so that it cannot be saved."""
        return False

    def at(self, now: float) -> None:
        """Set the time, in seconds, at which all that the following calls tell happens."""

    def reported(self, report: m.ProgramReport) -> None:
        """Take a report that only the program's recovery understands."""

    def happened(self, event: ProgramEvent, *, incident: bool) -> None:
        """Take an event from outside of the ranks; ``incident``: whether one is open."""

    def lost(self, rank: Rank) -> None:
        """Note that a rank cannot be spoken to any more."""

    def came_back(self, rank: Rank, *, frozen: bool) -> None:
        """Note that a lost rank is back on another stream; not ``frozen``: its gate was open meanwhile."""

    def moved(self, version: Version) -> None:
        """Note that a rank has finished an update."""

    def begin(self, incident: Incident) -> None:
        """Begin the recovery: all ranks stand still."""
        raise NotImplementedError

    def advance(self) -> Ending | None:
        """Go on as far as possible, in an incident or not. Return how the recovery ended, once it has."""
        return None

    def over(self, *, resumed: bool) -> None:
        """End with the incident: training goes on (``resumed``), or the job has ended."""

    def reset(self) -> None:
        """Forget everything: a new incarnation begins, or another controller leads the job."""

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``advance`` has something to do."""
        return iter(())


MakeRecovery = Callable[[RescueContext], ProgramRecovery]


def no_recovery(_: RescueContext) -> ProgramRecovery:
    """Make the recovery of a controller whose jobs are saved by ttp."""
    return ProgramRecovery()
