"""The evidence of an incident: what speaks against which rank, and which of it still holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank

OUTSIDER = Rank(-1)
"""Stands for a witness or subject that is no rank of the job."""

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
"""Kinds of evidence, the one that explains most first. A collective's error is how the neighbours see a death."""


@dataclass(slots=True)
class Evidence:
    """One reason to believe that something is wrong."""

    subject: Rank
    kind: m.FaultKind
    text: str
    at: float
    host: str = ""
    """The subject's host."""
    final: bool = False
    """True if the text is from the best witness: a neighbour sees an end first, the launcher knows the signal."""


class EvidenceBook:
    """The evidence of one incident.

    Args:
        record: records, under a keyword, what was added or withdrawn.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        self.by_kind: dict[m.FaultKind, OrderedDict[Rank, Evidence]] = {}
        """Evidence that stands, by kind and subject, the oldest first. Ordered: often the first of many is removed."""
        self._record = record
        self._withdrawn: list[Evidence] = []

    def add(self, evidence: Evidence, detail: str = "", witness: int | None = None) -> None:
        """Add evidence, unless it is known.

        Args:
            evidence: the subject and the reason.
            detail: more than ``evidence.text``, for the record.
            witness: the rank that reports it.
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
        """Withdraw evidence that turned out to be wrong. Return False if there was none."""
        found = self.by_kind.get(kind)
        evidence = found.pop(subject, None) if found else None
        if evidence is None:
            return False
        self._withdrawn.append(evidence)
        self._record("retracted", rank=subject, evidence=kind.value)
        return True

    def withdraw_from(self, subjects: Iterable[Rank], kind: m.FaultKind) -> list[Rank]:
        """Withdraw evidence of one kind against ``subjects``. Return those against whom there was any."""
        found = self.by_kind.get(kind)
        return [subject for subject in subjects if self.withdraw(subject, kind)] if found else []

    def withdraw_all(self, kind: m.FaultKind) -> None:
        """Withdraw all evidence of one kind."""
        for subject in self.against(kind):
            self.withdraw(subject, kind)

    def stands(self, subject: Rank, kind: m.FaultKind) -> bool:
        """Return whether evidence of this kind stands against the rank."""
        return subject in self.by_kind.get(kind, ())

    def against(self, kind: m.FaultKind) -> list[Rank]:
        """Return the ranks against which evidence of this kind stands, the oldest first."""
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
        """The ranks against which evidence stands."""
        return {rank for found in self.by_kind.values() for rank in found}

    @property
    def kinds(self) -> set[m.FaultKind]:
        """The kinds of evidence of real faults that stand."""
        return {kind for kind, found in self.by_kind.items() if found and kind is not m.FaultKind.SNAPSHOT}
