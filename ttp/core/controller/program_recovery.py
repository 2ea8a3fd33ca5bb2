"""The interface between the controller and the recovery of jobs that save and repair themselves.

The controller detects faults, freezes the ranks and decides on the newest complete version as in every other job. Then,
if the recovery ``leads``, the controller calls its ``begin`` instead of saving, and its ``advance`` after every event,
until that returns an ``Ending``. The controller does not look into the messages between the recovery and the program's
ranks (``ProgramReport``, ``ProgramOrder``) or into its events (``ProgramEvent``).
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
    """The end of a recovery.

    Args:
        outcome: the way in which it ended.
        version: the version that training goes on from, or that was saved.
        text: the reason, in words.
        path: where that version is saved; empty: it is not, as may be if training goes on.
    """

    outcome: Outcome
    version: Version
    text: str
    path: str = ""


def not_saved(text: str) -> Ending:
    """Return the ending of a recovery that has saved nothing, with the reason."""
    return Ending(Outcome.NOT_SAVED, Version(0), text)


@dataclass(frozen=True, slots=True)
class RescueContext:
    """The parts of the controller that a recovery may use.

    Args:
        job: the ranks.
        outbox: takes orders, records and ``ProgramAction``.
        decide: returns the plan for the newest version that can be saved now.
        on_disk: returns the newest version that is on disk.
        blame: adds evidence: the subject (-1: no rank), the kind, the text and the time.
        rescue_s: the longest time of an incident, in seconds.
        drain: takes the hosts whose launchers must not start ranks again.
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
        """The layout, if the program knows it more accurately than the ranks' ``Hello``; else None."""
        return None

    @property
    def halted(self) -> bool:
        """True if a thaw alone would not make training go on."""
        return False

    @property
    def may_repair(self) -> bool:
        """True if the program can repair ranks, so that a version that is incomplete now may become complete."""
        return False

    def invalid(self, rank: Rank) -> bool:
        """Return whether the rank's copy is of no version and cannot be saved."""
        return False

    def at(self, now: float) -> None:
        """Set the time, in seconds, for all calls that follow."""

    def reported(self, report: m.ProgramReport) -> None:
        """Take a report that only the program's recovery understands."""

    def happened(self, event: ProgramEvent, *, incident: bool) -> None:
        """Take an event that does not come from a rank; ``incident``: whether an incident is open."""

    def lost(self, rank: Rank) -> None:
        """Note that a rank is disconnected."""

    def came_back(self, rank: Rank, *, frozen: bool) -> None:
        """Note that a lost rank is back on another stream; not ``frozen``: its gate was open meanwhile."""

    def moved(self, version: Version) -> None:
        """Note that a rank has reported ``version``."""

    def begin(self, incident: Incident) -> None:
        """Begin the recovery; all connected ranks are frozen."""
        raise NotImplementedError

    def advance(self) -> Ending | None:
        """Go on as far as possible, in an incident or not. Return the end of the recovery; None: it goes on."""
        return None

    def over(self, *, resumed: bool) -> None:
        """Note that the incident is over: training goes on (``resumed``), or the job has ended."""

    def reset(self) -> None:
        """Forget everything: a new incarnation begins, or another controller leads the job."""

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``advance`` has something to do."""
        return iter(())


MakeRecovery = Callable[[RescueContext], ProgramRecovery]


def no_recovery(_: RescueContext) -> ProgramRecovery:
    """Make the recovery for jobs that ttp saves: it leads nothing."""
    return ProgramRecovery()
