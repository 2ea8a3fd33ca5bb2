"""Remembers the checkpoint that a controller has saved, or still saves, as a stand-in for ranks that it then leads.

Ranks come to a standby controller twice: *meanwhile*, when they hear nothing from their own controller (``stand_in``),
and for a takeover, when they are sure that it is lost. A checkpoint that is being made at that time goes on. Its ranks
are frozen already, and a new freeze would make them begin again; so an incident that is opened during the checkpoint
sends no freeze before the checkpoint has ended. It waits as long as all ranks that have come for the takeover are
frozen for that checkpoint and no save has failed, and at most for ``TTP_OT``, like every incident. Then the takeover
makes its plan as usual, and finds that the version is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Membership
from ttp.core.layout import Version

_Job = tuple[str, int]


@dataclass(slots=True)
class Meanwhile:
    """The saves of the stand-in, which writes this object. The parts that lead the job read it."""

    _saves_for: Membership | None = None
    """The ranks of the stand-in, while it makes a checkpoint."""
    _made_for: _Job | None = None
    """The job of the last checkpoint."""
    _made: tuple[Version, str] | None = None
    """Version and path of the last checkpoint."""
    _whose: set[str] = field(default_factory=set)
    """The nonces of the ranks whose pages are in it."""

    def note(self, job: Membership, incident: Incident | None, last: Incident | None) -> None:
        """Note the present state of the stand-in.

        Args:
            job: the ranks of the stand-in.
            incident: the open incident of the stand-in, if any.
            last: the incident that the stand-in closed last, if any.
        """
        going = incident is not None and incident.draft.plan is not None and not incident.ranks.reasons
        self._saves_for = job if going else None
        if last is not None and last.path and self._made != (last.saved, last.path):
            self._made_for, self._made = _of(job), (last.saved, last.path)
            self._whose = {job.members[rank].hello.nonce for rank in last.draft.collected if rank in job.members}

    def saves(self, job: Membership) -> bool:
        """Return whether all connected ranks of this job are frozen for a checkpoint that the stand-in is making."""
        there = self._saves_for
        return there is not None and _of(there) == _of(job) and job.live <= there.live

    def made(self, job: Membership) -> tuple[Version, str] | None:
        """Return version and path of the stand-in's last checkpoint; None if it lacks the page of a connected rank."""
        if self._made_for != _of(job) or any(job.members[rank].hello.nonce not in self._whose for rank in job.live):
            return None
        return self._made


def _of(job: Membership) -> _Job:
    return job.run_id, job.incarnation
