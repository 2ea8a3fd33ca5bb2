"""Retries a save after the storage has failed on every rank: in the fallback directory, or again after a pause."""

from __future__ import annotations

from ttp.core.controller.incident import NEVER, Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox

RETRY_S, RETRY_MAX_S = 0.1, 10.0
"""Seconds of the pause before the storage is tried again, doubled each time, and their maximum."""

REFUSALS_MAX = 16
"""Ranks that the storage has refused after which the fallback directory is used. A thousand would take too long."""


class Retries:
    """Sends an incident back to ``FREEZING``, where the plan is made again.

    Args:
        job: the ranks.
        outbox: takes records.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox

    def refused(self, incident: Incident) -> bool:
        """Return whether the storage has refused so many ranks that the others need not try."""
        return incident.stage is not Stage.SAVED and len(incident.ranks.passing) >= REFUSALS_MAX

    def elsewhere(self, incident: Incident) -> bool:
        """Begin the save again in the fallback directory. Return False if there is none or it was tried already.

        Also False if only the saved version is being saved once more: the checkpoint that exists will do.
        """
        fallback = next(filter(None, (mb.hello.fallback_dir for mb in self._job.members.values())), "")
        failures = incident.ranks.failures
        if not (fallback and failures) or incident.draft.directory or incident.again_until < NEVER:
            return False
        self._outbox.record("fallback", directory=fallback, failures=dict(sorted(failures.items())))
        incident.begin_again(f"the save is tried again in {fallback}", fallback, failures)
        return True

    def later(self, incident: Incident, reason: str, now: float) -> bool:
        """Begin the save again after a pause, if the storage refused for a reason that may pass.

        Only ranks that failed for such a reason get orders again: the others would fail again.

        Returns:
            False if no rank failed for such a reason, or if training can go on without a checkpoint.
        """
        broken, ranks = incident.faulty or self._job.broken or self._job.in_doubt, incident.ranks
        if incident.snapshot or incident.again_until < NEVER or not (ranks.passing and broken):
            return False
        pause_s = min(RETRY_MAX_S, RETRY_S * 2**incident.retries)
        incident.retries += 1
        self._outbox.record("retry", after_s=pause_s, failures=dict(sorted(ranks.failures.items())), reason=reason)
        incident.look_again_at = now + pause_s
        rank = min(ranks.passing)
        why = f"the storage refused rank {rank} ({ranks.failures[rank]}): the save is tried again after {pause_s:g} s"
        incident.begin_again(why, "", ranks.passing)
        return True
