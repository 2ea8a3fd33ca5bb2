"""The evidence of an incident: the faults that were reported, against which ranks, and which reports still stand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank

OUTSIDER = Rank(-1)
"""Stands for a witness or a subject that is not a rank of the job."""

EXPLAINS = (
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
"""Kinds of evidence, the best explanation first. A failed collective is only how peers see the death of a rank."""


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
    """True if the text is from the best witness. A neighbour sees a death first, but the launcher knows the signal."""


class EvidenceBook:
    """The evidence of one incident.

    Args:
        incident: its id.
        record: called with the id, the kind of the record and its facts for everything that is added or withdrawn.
    """

    def __init__(self, incident: str, record: Callable[..., None]) -> None:
        self.by_kind: dict[m.FaultKind, OrderedDict[Rank, Evidence]] = {}
        """Evidence that stands, by kind and subject, the oldest first. An OrderedDict removes its first item fast."""
        self._incident, self._record = incident, record
        self._withdrawn: list[Evidence] = []

    def add(self, evidence: Evidence, detail: str = "", witness: int | None = None) -> None:
        """Add evidence, unless evidence of this kind is known against the subject; a final text replaces another one.

        Args:
            evidence: the subject and the reason.
            detail: details beyond ``evidence.text``, for the record.
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
        self._record(self._incident, "evidence", **facts, host=evidence.host, detail=detail, witness=witness)

    def withdraw(self, subject: Rank, kind: m.FaultKind) -> bool:
        """Withdraw evidence that turned out to be wrong. Return False if there was none."""
        found = self.by_kind.get(kind)
        evidence = found.pop(subject, None) if found else None
        if evidence is None:
            return False
        self._withdrawn.append(evidence)
        self._record(self._incident, "retracted", rank=subject, evidence=kind.value)
        return True

    def withdraw_from(self, subjects: Iterable[Rank], kind: m.FaultKind) -> list[Rank]:
        """Withdraw evidence of one kind against ``subjects``. Return the subjects that had such evidence."""
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
        """The text of the evidence that explains the incident best."""
        for kind in EXPLAINS:
            if self.by_kind.get(kind):
                return next(iter(self.by_kind[kind].values())).text
        if not self._withdrawn:
            return "a controller was lost during an incident"
        return min(self._withdrawn, key=lambda e: (EXPLAINS.index(e.kind), e.at)).text

    @property
    def preempted(self) -> bool:
        """True if SIGTERM from outside explains the incident best."""
        return next((kind for kind in EXPLAINS if self.by_kind.get(kind)), None) is m.FaultKind.PREEMPTED

    @property
    def subjects(self) -> set[Rank]:
        """The ranks against which evidence stands."""
        return {rank for found in self.by_kind.values() for rank in found}

    @property
    def kinds(self) -> set[m.FaultKind]:
        """The kinds of evidence that stand, without requests for a checkpoint."""
        return {kind for kind, found in self.by_kind.items() if found and kind is not m.FaultKind.SNAPSHOT}
