"""Decides whether a checkpoint goes to the host's memory first: if the survivors go on and the storage is slow. Pure.

Such a checkpoint is made like any other, with a manifest, but in a directory in memory. A writer process copies it from
there to the storage (``ttp.launch.shadow``). A *held* checkpoint does not count as saved: ranks may go on from it, but
are not told to exit with 75. If they cannot go on, one rank commits the checkpoint to the storage, i.e. waits for the
writer. If the save to memory fails, the save begins again on the storage. See decision 63.
"""

from __future__ import annotations

from ttp.core.controller import continuing
from ttp.core.controller.committing import Committing
from ttp.core.controller.incident import Incident
from ttp.core.controller.job_verdict import JobVerdict, Verdict
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.saving import Saving
from ttp.core.decide import How, NoPlan, Plan
from ttp.core.layout import Version
from ttp.errors import EXIT_SAVED


class Shadow:
    """Handles the differences between a save to memory and a save to the storage.

    Args:
        job: the ranks of the job.
        outbox: takes the records.
        saving: numbers the orders to save.
        committing: commits what is held in memory to the storage.
        verdict: the job's verdict.
    """

    def __init__(
        self, job: Membership, outbox: Outbox, saving: Saving, committing: Committing, verdict: JobVerdict
    ) -> None:
        self._job, self._outbox, self._saving, self._committing = job, outbox, saving, committing
        self._verdict = verdict

    def choose(self, incident: Incident, plan: Plan) -> None:
        """Choose memory or storage for the first plan of an incident. Its later plans go to the same place."""
        draft, forgiven = incident.draft, incident.ranks.forgiven
        if not (draft.plan or draft.directory or forgiven or incident.recovered or incident.requests):
            draft.directory = draft.hold = self._place(incident, plan)

    def _place(self, incident: Incident, plan: Plan) -> str:
        job, answers = self._job, incident.ranks.answers
        places = {answers[rank].hold_dir if rank in answers else "" for rank in job.live}
        hosts = {member.hello.host for member in job.members.values()}
        plain = plan.lost == 0 and all(a.how is not How.KEPT for a in plan.assignments)
        if len(places) != 1 or len(hosts) != 1 or not job.complete or incident.snapshot or not plain:
            return ""
        return "" if continuing.why_not_after(job, incident, plan, self._committing.base) else places.pop()

    def awaits(self, incident: Incident, result: Plan | NoPlan, now: float) -> bool:
        """Order one rank to wait until the version held in memory is durable, if no newer version can be saved.

        A version that is held but not durable does not count as on disk.

        Returns:
            True if a version is held and ``result`` is not a plan for a newer version.
        """
        draft, ranks = incident.draft, incident.ranks
        held = max((answer.held for answer in ranks.answers.values()), default=Version(0))
        if not held or (isinstance(result, Plan) and result.version > held):
            return False
        if any(map(ranks.can_commit, ranks.answers)):
            reason = f"version {held} is held in memory, and no rank has a newer one"
            draft.plan, draft.tasks, draft.pending = Plan(held, (), reason), [], {}
            self._await(incident, held, now)
        return True

    def _await(self, incident: Incident, version: Version, now: float) -> None:
        self._outbox.record("awaited", version=version)
        incident.draft.generation, incident.draft.awaiting = self._saving.next_generation(incident), True
        self._committing.begin(incident, "the held version has to become durable", now)

    def failed(self, incident: Incident) -> None:
        """Begin the save again, on the storage, if a rank could not write or commit the checkpoint in memory."""
        failures = incident.ranks.failures
        if incident.draft.holds and failures:
            self._outbox.record("not_held", failures=dict(sorted(failures.items())))
            why = "the checkpoint cannot be held in memory, so it is saved to the storage"
            incident.begin_again(why, "", failures)

    def leave(self, incident: Incident) -> None:
        """Save to the storage from now on: ranks have a newer version than the held one, or cannot go on from it."""
        if incident.draft.holds and incident.saved:
            incident.draft.directory, incident.saved, incident.path = "", Version(0), ""

    def may_end(self, incident: Incident, now: float) -> bool:
        """Return whether ranks may be released now: they go on from the checkpoint, or the checkpoint is durable."""
        if incident.ranks.waiting and not incident.newest_is_known():
            return False
        if continuing.waits(self._job, incident, now):
            return False
        end = self._verdict.now if self._verdict.wrong else Verdict(EXIT_SAVED, "")
        again = not incident.requests and continuing.judge(self._job, incident, end, self._committing.base)[0]
        return again or self.is_durable(incident, now)

    def is_durable(self, incident: Incident, now: float) -> bool:
        """Return whether the checkpoint is durable. If not, order one rank to wait until it is, as a commit."""
        if not (incident.draft.holds and self._job.live):
            return True  # without living ranks the launcher waits for the writer
        if not any(map(incident.ranks.can_commit, incident.ranks.answers)):
            return False
        version = incident.saved
        self.leave(incident)
        self._await(incident, version, now)
        return False
