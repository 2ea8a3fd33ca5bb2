"""Orders ranks to freeze, and takes their answers."""

from __future__ import annotations

from collections.abc import Collection

from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts, in_queue
from ttp.core.controller.evidence import Evidence
from ttp.core.controller.incident import Incident
from ttp.core.controller.meanwhile import Meanwhile
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import Rank


class Freezing:
    """Sends freeze orders, takes the answers, and stops waiting for answers that do not come in time.

    Args:
        job: the ranks.
        outbox: takes orders and records.
        timeouts: the timeouts of the controller.
        meanwhile: tells whether ranks are frozen for another checkpoint, which has to end first.
    """

    def __init__(self, job: Membership, outbox: Outbox, timeouts: ControllerTimeouts, meanwhile: Meanwhile) -> None:
        self._job, self._outbox, self._timeouts, self._meanwhile = job, outbox, timeouts, meanwhile

    def ask(self, incident: Incident, ranks: Collection[Rank], cause: str, now: float) -> None:
        """Order these ranks to close their gates, because of ``cause``, and to report (again) the state they hold."""
        if incident.deferred:
            return
        incident.ranks.ask(ranks, now, now + self._answer_s)
        self.send(incident, ranks, cause)

    @property
    def _answer_s(self) -> float:
        """Return the seconds that a rank may take to answer a freeze."""
        return in_queue(self._timeouts.answer_s, len(self._job.members))

    def send(self, incident: Incident, ranks: Collection[Rank], cause: str) -> None:
        """Repeat the freeze order to these ranks, with the present cause; answers given before stay valid."""
        if incident.deferred:
            return
        order = m.Freeze(m.SEVERAL, self._job.term, incident.id, cause, incident.snapshot)
        self._outbox.send_alike(ranks, order)

    def take(self, incident: Incident, ranks: Collection[Rank], answer: m.Frozen, now: float) -> list[Rank]:
        """Take the answer of these ranks. Return the ranks for which it is new."""
        if not answer.main_thread_blocked:
            incident.evidence.withdraw_from(ranks, m.FaultKind.HUNG)  # they came to the gate after all
        known = incident.ranks
        news = [
            rank for rank in ranks if not known.answered(rank) or (answer.final and not known.is_stale(rank, answer))
        ]
        if not news:  # a rank that has given its final answer may only repeat it
            return []
        known.accept(news, answer)
        asked_at = known.asked_at
        for rank in incident.evidence.withdraw_from(news, m.FaultKind.SILENT):
            if not answer.final and now < asked_at.get(rank, now) + self._timeouts.freeze_s:
                known.waiting.add(rank)  # it is in an update: its answer was late, or this controller was
                known.expire_check_at = now
        self._outbox.record(
            "answer" if answer.final else "acknowledged",
            ranks=news,
            version=answer.version,
            phase=answer.phase.value,
            stuck=answer.main_thread_blocked,
            settled=answer.post_step_done,
            bad=list(answer.bad),
            after_ms=round((now - min(asked_at.get(rank, now) for rank in news)) * 1e3, 3),
        )
        return news

    def expire(self, incident: Incident, now: float) -> None:
        """Stop waiting for ranks that take too long to answer, and add evidence against them.

        Also sends the freeze orders that were deferred, once the other checkpoint has ended.
        """
        if incident.deferred and not self._meanwhile.saves(self._job):
            incident.deferred = False
            self.ask(incident, sorted(self._job.live), incident.cause, now)
        ranks = incident.ranks
        if not ranks.waiting or now < ranks.expire_check_at:
            return
        dues: list[float] = []
        for rank in sorted(ranks.waiting):
            acknowledged = rank in ranks.answers
            patience_s = max(self._timeouts.freeze_s, self._answer_s) if acknowledged else self._answer_s
            due = ranks.asked_at[rank] + patience_s
            if now < due:
                dues.append(due)
                continue
            ranks.waiting.discard(rank)
            what = "is still in an update" if acknowledged else "did not answer the freeze"
            text = f"rank {rank} {what} after {patience_s:g} s"
            host = self._job.members[rank].hello.host
            incident.evidence.add(Evidence(rank, m.FaultKind.SILENT, text, now, host))
        ranks.expire_check_at = min(dues, default=now)

    def looks_again(self, incident: Incident, now: float) -> bool:
        """Return whether to wait for a second look: the only evidence is a hang, and slow ranks may reach the gate."""
        return self.only_hangs(incident) and incident.waits("second look", self._timeouts.second_look_s, now)

    def only_hangs(self, incident: Incident) -> bool:
        """Return whether the only evidence is a hang. Withdraw it, also that of no rank, if all have come to the gate.

        Cheap, as it is asked after every event: a rank that comes to the gate answers anew, and goes to the end.
        """
        if self._job.broken or incident.evidence.kinds != {m.FaultKind.HUNG}:
            return False
        ranks = incident.ranks
        if ranks.waiting or not ranks.answers or any(a.main_thread_blocked for a in ranks.answers.values()):
            return True
        incident.evidence.withdraw_all(m.FaultKind.HUNG)
        return False
