"""Ranks are told to stand still, and say what they hold."""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts, in_queue
from ttp.core.controller.evidence import Evidence
from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import Rank


class Freezing:
    """Asks for answers, takes them, and stops waiting for those that do not come.

    Args:
        job: the ranks.
        outbox: takes orders and records.
        timeouts: of the controller.
    """

    def __init__(self, job: Membership, outbox: Outbox, timeouts: ControllerTimeouts) -> None:
        self._job, self._outbox, self._timeouts = job, outbox, timeouts

    def ask(self, incident: Incident, rank: Rank, cause: str, now: float) -> None:
        """The rank has to close its gate, because of ``cause``, and to say (again) what it holds."""
        incident.forget(rank)
        incident.waiting.add(rank)
        incident.frozen_at[rank] = now
        due = now + self._answer_s
        incident.expire_check_at = min(incident.expire_check_at, due) if len(incident.waiting) > 1 else due
        self.send(incident, rank, cause)

    @property
    def _answer_s(self) -> float:
        """How long a rank may take to answer a freeze."""
        return in_queue(self._timeouts.answer_s, len(self._job.members))

    def send(self, incident: Incident, rank: Rank, cause: str) -> None:
        """Tell the rank once more what it is frozen for; its answer stands."""
        self._outbox.send_to(rank, m.Freeze(rank, self._job.term, incident.id, cause, incident.snapshot))

    def take(self, incident: Incident, answer: m.Frozen, now: float) -> bool:
        """Take the answer of a rank. Returns whether it says anything new."""
        if not answer.main_thread_blocked:
            incident.evidence.withdraw(answer.rank, m.FaultKind.HUNG)  # it came to the gate after all
        if incident.answered(answer.rank) and (not answer.final or incident.is_stale(answer)):
            return False  # said again: it stands still since its final answer
        incident.accept(answer)
        spoke = incident.evidence.withdraw(answer.rank, m.FaultKind.SILENT)
        if spoke and not answer.final and now < incident.frozen_at.get(answer.rank, now) + self._timeouts.freeze_s:
            incident.waiting.add(answer.rank)  # it is in an update: its answer was late, or this controller was
            incident.expire_check_at = now
        self._outbox.record(
            "answer" if answer.final else "acknowledged",
            rank=answer.rank,
            version=answer.version,
            phase=answer.phase.value,
            stuck=answer.main_thread_blocked,
            settled=answer.post_step_done,
            bad=list(answer.bad),
            after_ms=round((now - incident.frozen_at.get(answer.rank, now)) * 1e3, 3),
        )
        return True

    def expire(self, incident: Incident, now: float) -> None:
        """Stop waiting for ranks that take too long to answer; that is evidence against them."""
        if not incident.waiting or now < incident.expire_check_at:
            return
        dues: list[float] = []
        for rank in sorted(incident.waiting):
            acknowledged = rank in incident.answers
            patience_s = max(self._timeouts.freeze_s, self._answer_s) if acknowledged else self._answer_s
            due = incident.frozen_at[rank] + patience_s
            if now < due:
                dues.append(due)
                continue
            incident.waiting.discard(rank)
            what = "is still in an update" if acknowledged else "did not answer the freeze"
            text = f"rank {rank} {what} after {patience_s:g} s"
            host = self._job.members[rank].hello.host
            incident.evidence.add(Evidence(rank, m.FaultKind.SILENT, text, now, host))
        incident.expire_check_at = min(dues, default=now)
