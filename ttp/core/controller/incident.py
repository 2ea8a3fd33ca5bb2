"""The state of one incident: everything from the first sign of a fault to the release."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.controller.draft import Draft
from ttp.core.controller.evidence import EvidenceBook
from ttp.core.controller.frozen_ranks import FrozenRanks
from ttp.core.layout import Rank, Version

OVER, NEVER = float("-inf"), float("inf")


class Stage(enum.Enum):
    """The stage of an incident; see the theory of operation in ``ttp.core.controller.machine``."""

    FREEZING = "freezing"
    SAVING = "saving"
    PROGRAM = "mending"  # the name that journals use
    COMMITTING = "committing"
    SAVED = "saved"
    RELEASED = "released"


_EDGES = {
    Stage.FREEZING: set(Stage),
    Stage.SAVING: {Stage.FREEZING, Stage.COMMITTING, Stage.RELEASED},
    Stage.PROGRAM: {Stage.SAVED, Stage.RELEASED},
    Stage.COMMITTING: {Stage.FREEZING, Stage.SAVING, Stage.SAVED, Stage.RELEASED},
    Stage.SAVED: {Stage.FREEZING, Stage.COMMITTING, Stage.RELEASED},
    Stage.RELEASED: set(),
}
"""The stages that may follow each stage; see ``Incident.enter``."""


@dataclass(slots=True)
class Incident:
    """State of one incident: its evidence, its ranks, the checkpoint that it writes, and its end."""

    id: str
    opened_at: float
    patient_since: float
    """Time from which ``TTP_OT`` counts: a snapshot that becomes a rescue gets the full time from the fault on."""
    snapshot: bool
    evidence: EvidenceBook
    ranks: FrozenRanks
    draft: Draft
    recovered: bool
    """True if a new controller opened the incident again after a takeover, because a rank reported being frozen."""
    deferred: bool = False
    """True while no freeze is sent: ranks are frozen for another checkpoint, which ends first; see ``meanwhile``."""
    overtaken: bool = False
    """True if a process of the next launch has said hello: the launcher will end all living ranks of this launch."""
    pauses: dict[str, float] = field(default_factory=dict)
    """End of each wait that delays the incident, by the wait's name; ``OVER`` once it has passed."""
    look_again_at: float = 0.0
    """Earliest time to plan again: answers come, and savers are lost, by the thousand. 0: at any time."""
    waits_for: str = ""
    """The last reason for which no plan was made yet in this stage."""
    stage: Stage = Stage.FREEZING
    why: str = "a fault was reported, or a checkpoint was requested"
    """Reason for the present stage, in words; only ``enter`` changes stage and reason."""
    retries: int = 0
    """Number of times that the whole save was tried again because the storage had refused it."""
    saved: Version = Version(0)  # noqa: RUF009 - a number
    """The newest version that is known to be on disk; 0 if none is."""
    path: str = ""
    size: int = 0
    again_until: float = NEVER
    """End of the time for saving the saved version once more, with more pages; ``NEVER``: that is not done."""
    outcome: str = ""
    release: m.Release | None = None
    """The order that ended the incident; None: no rank was told to exit."""
    closes_at: float = NEVER
    """Time at which the incident is closed although ranks that were released are still connected."""
    requests: list[int] = field(default_factory=list)
    trial: bool = False
    """True if a request asks all ranks to go on as after a death, as a trial of that."""

    @property
    def cause(self) -> str:
        """The text of the evidence that explains the incident best."""
        return self.evidence.cause

    @property
    def faulty(self) -> bool:
        """True if evidence of a fault stands, i.e. was not withdrawn."""
        return bool(self.evidence.kinds)

    def enter(self, stage: Stage, why: str) -> None:
        """Go to another stage. Only this method changes the stage. A thaw closes the incident in any stage.

        ::

            FREEZING ---> SAVING ---> COMMITTING ---> SAVED ---> RELEASED
              | | ^         | ^            | |         ^ |          ^
              | | |         | +------------+ |         | |          |   the committer failed: another rank commits
              | | +---------+----------------+---------|-+          |   a saver failed, or a newer version came
              | |                  +-------------------+            |   the checkpoint is held, and has to be durable
              | +-------------------------------------->            |   the version is on disk (if held: COMMITTING)
              +-----> PROGRAM --------------------------            |   the program itself saves
            any stage ----------------------------------------------+   ranks are told to exit: saved, or impossible

        Args:
            stage: the next stage.
            why: the reason, in words.

        Raises:
            AssertionError: the stage cannot follow the present one.
        """
        assert stage in _EDGES[self.stage], f"from {self.stage.value} ({self.why}) to {stage.value} ({why})"
        self.stage, self.why, self.waits_for = stage, why, ""

    def after_ms(self, now: float) -> float:
        """Return the milliseconds since the incident was opened, for records."""
        return round((now - self.opened_at) * 1e3, 3)

    def ends_at(self, rescue_s: float) -> float:
        """Return when to end without a newer checkpoint; ``rescue_s``: see ``ControllerTimeouts``."""
        return min(self.again_until, self.patient_since + rescue_s)

    def may_repeat(self, version: Version) -> bool:
        """Return whether the saved version, which is ``version``, is to be saved once more, and that has not begun."""
        return self.again_until < NEVER and version == self.saved and self.draft.plan is None

    def waits(self, what: str, seconds: float, now: float) -> bool:
        """Return whether the wait named ``what`` still lasts. It begins with the first call and lasts ``seconds``."""
        return now < self.pauses.setdefault(what, now + seconds)

    def end_pauses(self, now: float) -> None:
        """Mark the waits that are over, so that they no longer make a deadline."""
        if now >= self.look_again_at:
            self.look_again_at = 0.0
        for what, until in self.pauses.items():
            if until <= now:
                self.pauses[what] = OVER

    def newest_is_known(self) -> bool:
        """Return whether the newest version is known and complete in every shard, so that no more answers are needed.

        Ranks differ by at most one version (Statement 2): once two versions are known, no answer can have a newer one.
        """
        return self.ranks.counts.newest_is_whole(lambda: stripes.covered(self.draft.written()))

    def begin_again(self, why: str, directory: str, failed: Iterable[Rank]) -> None:
        """Plan anew, for ``directory``, and let these ranks, which have failed, try again."""
        self.enter(Stage.FREEZING, why)
        self.draft.move(directory)
        self.ranks.forgive(failed)

    def takes_back(self) -> bool:
        """Plan with pieces that were set aside, as this version is lost. Return whether there are any to save."""
        version = self.draft.take_back(self.saved)
        if version is not None:
            self.enter(Stage.FREEZING, f"no other version can be saved, and pieces of version {version} are durable")
        return version is not None
