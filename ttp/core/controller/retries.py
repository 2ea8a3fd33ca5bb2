"""Retries after the storage has refused on every rank: in another directory, or once more after a while."""

from __future__ import annotations

from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox

RETRY_S, RETRY_MAX_S = 0.1, 10.0
"""Seconds after which refusing storage is tried again, doubled each time, and their maximum."""


class Retries:
    """Sends an incident back to ``FREEZING``, where the plan is made anew.

    Args:
        job: the ranks.
        outbox: takes records.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox

    def elsewhere(self, incident: Incident) -> bool:
        """Try everything once more in the fallback directory. Return whether there is one."""
        fallback = next((mb.hello.fallback_dir for mb in self._job.members.values()), "")
        if not (fallback and incident.failures) or incident.directory:
            return False
        self._outbox.record("fallback", directory=fallback, failures=dict(sorted(incident.failures.items())))
        incident.enter(Stage.FREEZING, f"once more, in {fallback}")
        incident.forgive(fallback, incident.failures)
        return True

    def later(self, incident: Incident, reason: str, now: float) -> bool:
        """Try everything once more after a pause, as the storage refuses everywhere. Return whether that is done.

        It is not done if training could go on instead. A rank that failed for another reason is not asked again: it
        would fail again.
        """
        broken = incident.faulty or self._job.broken or self._job.in_doubt
        if incident.snapshot or not (incident.passing and broken):
            return False
        pause_s = min(RETRY_MAX_S, RETRY_S * 2**incident.retries)
        incident.retries += 1
        self._outbox.record("retry", after_s=pause_s, failures=dict(sorted(incident.failures.items())), reason=reason)
        incident.enter(Stage.FREEZING, f"the storage refused: once more after {pause_s:g} s")
        incident.look_again_at = now + pause_s
        incident.forgive("", incident.passing)
        return True
