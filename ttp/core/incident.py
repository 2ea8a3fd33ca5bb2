"""One incident: everything from the first sign of a fault to the release."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from ttp.core import messages as m
from ttp.core.decide import Plan
from ttp.core.layout import Rank, Version


class Stage(enum.Enum):
    """Where an incident is; see the theory of operation in ``ttp.core.controller_machine``."""

    FREEZING = "freezing"
    SAVING = "saving"
    COMMITTING = "committing"
    SAVED = "saved"
    RELEASED = "released"


_EXPLAINS = (
    m.FaultKind.EXITED,
    m.FaultKind.EXCEPTION,
    m.FaultKind.LOST,
    m.FaultKind.OUTSIDE,
    m.FaultKind.PREEMPTED,
    m.FaultKind.SILENT,
    m.FaultKind.COLLECTIVE,
    m.FaultKind.SNAPSHOT,
)
"""Which evidence explains the most. A collective's error is what a death looks like from its neighbours."""


@dataclass(slots=True)
class Evidence:
    """One reason to believe that something is wrong."""

    subject: Rank
    kind: m.FaultKind
    text: str
    at: float
    retracted: bool = False


@dataclass(slots=True)
class Incident:
    """State of one incident. Ranks in ``waiting`` were told to freeze and have not given their final answer."""

    id: str
    opened_at: float
    snapshot: bool
    stage: Stage = Stage.FREEZING
    evidence: list[Evidence] = field(default_factory=list)
    answers: dict[Rank, m.Frozen] = field(default_factory=dict)
    frozen_at: dict[Rank, float] = field(default_factory=dict)
    waiting: set[Rank] = field(default_factory=set)
    silent: set[Rank] = field(default_factory=set)
    clean_versions: Counter[Version] = field(default_factory=Counter)
    expire_check_at: float = 0.0
    failures: dict[Rank, str] = field(default_factory=dict)
    generation: int = 0
    plan: Plan | None = None
    orders: dict[Rank, m.SaverOrder] = field(default_factory=dict)
    pieces: dict[Rank, tuple[m.Piece, ...]] = field(default_factory=dict)
    pending: set[Rank] = field(default_factory=set)
    committer: Rank | None = None
    path: str = ""
    size: int = 0
    exit_code: int | None = None
    release_text: str = ""
    released_at: float | None = None
    gather_until: float | None = None
    outcome: str = ""
    requests: list[int] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The evidence that explains the most, in words."""
        standing = [e for e in self.evidence if not e.retracted] or self.evidence
        if not standing:
            return "a controller was lost during an incident"
        return min(standing, key=lambda e: (_EXPLAINS.index(e.kind), e.at)).text

    @property
    def standing(self) -> list[Evidence]:
        """Evidence of a real fault that nobody has taken back."""
        return [e for e in self.evidence if not e.retracted and e.kind is not m.FaultKind.SNAPSHOT]

    @property
    def draft(self) -> str:
        """Directory name under which the planned checkpoint is written."""
        assert self.plan is not None
        return f".draft-step_{self.plan.version}-{self.id}"

    def accept(self, answer: m.Frozen) -> None:
        """Take an answer; a later answer of the same rank replaces the earlier one."""
        self.forget_answer(answer.rank)
        self.answers[answer.rank] = answer
        self.silent.discard(answer.rank)
        if not answer.final:
            return
        self.waiting.discard(answer.rank)
        if answer.phase is not m.Phase.TORN:
            self.clean_versions[answer.version] += 1

    def forget_answer(self, rank: Rank) -> None:
        """The rank is gone, or is asked again."""
        old = self.answers.pop(rank, None)
        if old is not None and old.final and old.phase is not m.Phase.TORN:
            self.clean_versions[old.version] -= 1
            self.clean_versions += Counter()  # drops what fell to zero

    def answered(self, rank: Rank) -> bool:
        """Whether the rank has given its final answer."""
        answer = self.answers.get(rank)
        return answer is not None and answer.final
