"""Why an incident is open: what speaks against which rank, and what of it still holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank

OUTSIDER = Rank(-1)
"""The witness or subject that is no rank of the job."""

_EXPLAINS = (
    m.FaultKind.EXITED,
    m.FaultKind.EXCEPTION,
    m.FaultKind.LOST,
    m.FaultKind.OUTSIDE,
    m.FaultKind.PREEMPTED,
    m.FaultKind.HUNG,
    m.FaultKind.SILENT,
    m.FaultKind.AILING,
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
    host: str = ""
    """Of the subject."""
    final: bool = False
    """By whoever knows best: a neighbour sees an end first, the launcher knows the signal."""


class EvidenceBook:
    """The evidence of one incident.

    Args:
        record: remembers, under a word, what was added or withdrawn.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        self.by_kind: dict[m.FaultKind, OrderedDict[Rank, Evidence]] = {}
        """What stands, by kind and subject, the oldest first. Ordered: often the first of many is taken away."""
        self._record = record
        self._withdrawn: list[Evidence] = []

    def add(self, evidence: Evidence, detail: str = "", witness: int | None = None) -> None:
        """Take evidence, unless it is known.

        Args:
            evidence: who, and why.
            detail: more than ``evidence.text``, for the record.
            witness: the rank that says so.
        """
        found = self.by_kind.setdefault(evidence.kind, OrderedDict())
        known = found.get(evidence.subject)
        if known is None:
            found[evidence.subject] = evidence
        elif evidence.final and evidence.text != known.text:
            known.text, known.final = evidence.text, True
        else:
            return
        facts = {"rank": evidence.subject, "evidence": evidence.kind.value, "text": evidence.text}
        self._record("evidence", **facts, host=evidence.host, detail=detail, witness=witness)

    def withdraw(self, subject: Rank, kind: m.FaultKind) -> bool:
        """The evidence turned out to be wrong; false when there was none."""
        found = self.by_kind.get(kind)
        evidence = found.pop(subject, None) if found else None
        if evidence is None:
            return False
        self._withdrawn.append(evidence)
        self._record("retracted", rank=subject, evidence=kind.value)
        return True

    def withdraw_from(self, subjects: Iterable[Rank], kind: m.FaultKind) -> list[Rank]:
        """It turned out to be wrong of these; returns against whom there was any."""
        found = self.by_kind.get(kind)
        return [subject for subject in subjects if self.withdraw(subject, kind)] if found else []

    def withdraw_all(self, kind: m.FaultKind) -> None:
        """None of this kind holds."""
        for subject in self.against(kind):
            self.withdraw(subject, kind)

    def stands(self, subject: Rank, kind: m.FaultKind) -> bool:
        """Whether evidence of this kind stands against the rank."""
        return subject in self.by_kind.get(kind, ())

    def against(self, kind: m.FaultKind) -> list[Rank]:
        """Ranks against which evidence of this kind stands, the oldest first."""
        return list(self.by_kind.get(kind, ()))

    @property
    def cause(self) -> str:
        """The evidence that explains the most, in words."""
        for kind in _EXPLAINS:
            if self.by_kind.get(kind):
                return next(iter(self.by_kind[kind].values())).text
        if not self._withdrawn:
            return "a controller was lost during an incident"
        return min(self._withdrawn, key=lambda e: (_EXPLAINS.index(e.kind), e.at)).text

    @property
    def subjects(self) -> set[Rank]:
        """Of whom evidence stands."""
        return {rank for found in self.by_kind.values() for rank in found}

    @property
    def kinds(self) -> set[m.FaultKind]:
        """Of the evidence of real faults that stands."""
        return {kind for kind, found in self.by_kind.items() if found and kind is not m.FaultKind.SNAPSHOT}
