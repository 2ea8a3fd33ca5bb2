"""All ranks restore the same checkpoint: gathers what each of them found, decides once, tells everybody."""

from __future__ import annotations

from dataclasses import replace

from ttp.core import messages as m
from ttp.core.agreement import agree
from ttp.core.layout import Rank, Version
from ttp.core.membership import Membership
from ttp.core.outbox import Outbox


class Restoring:
    """The agreement of one incarnation. Ranks repeat their view to a new controller until they have begun to train.

    Args:
        job: the ranks.
        outbox: takes the decisions.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self.decision: m.RestoreDecision | None = None
        self._job = job
        self._outbox = outbox
        self._views: dict[Rank, m.RestoreView] = {}

    def reset(self) -> None:
        """A new incarnation begins."""
        self._views, self.decision = {}, None

    def viewed(self, view: m.RestoreView) -> None:
        """A rank says what it found; the last of them makes the decision."""
        assert self._job.layout is not None
        self._views[view.rank] = view
        if self.decision is not None:
            self._tell(view.rank)
        elif len(self._views) == self._job.layout.world_size:
            self._decide()

    def _decide(self) -> None:
        verdict = agree(self._views.values())
        chosen, error = (m.Candidate(Version(0), "", ""), verdict) if isinstance(verdict, str) else (verdict, "")
        self.decision = m.RestoreDecision(
            Rank(-1), self._job.term, chosen.version, chosen.name, chosen.manifest_digest, error
        )
        self._outbox.record("restore", version=chosen.version, name=chosen.name, error=error)
        for rank in self._views:
            self._tell(rank)

    def _tell(self, rank: Rank) -> None:
        assert self.decision is not None
        self._outbox.send_to(rank, replace(self.decision, rank=rank, term=self._job.term))
