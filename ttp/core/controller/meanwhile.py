"""Remembers what a controller that takes over has saved, or still saves, as a stand-in for the same ranks.

Ranks come to a standby controller twice: *meanwhile*, when they hear nothing of their own controller (``stand_in``),
and to be taken over, when they are sure that it is lost. A checkpoint that is being made by then goes on: an incident
that is opened during it freezes no rank before it has ended, as its ranks stand still already and a freeze would have
them begin again. So evidence waits while all ranks that have come to be taken over stand still for that checkpoint and
none has failed in it; never longer than ``TTP_OT``, as no incident may. The takeover then plans as always, and finds
that version on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ttp.core.controller.incident import Incident
from ttp.core.controller.membership import Membership
from ttp.core.layout import Version

_Job = tuple[str, int]


@dataclass(slots=True)
class Meanwhile:
    """The saves of the stand-in. The stand-in writes this object, and the parts that lead the job read it."""

    _saves_for: Membership | None = None
    _made_for: _Job | None = None
    _made: tuple[Version, str] | None = None
    _whose: set[str] = field(default_factory=set)

    def note(self, job: Membership, incident: Incident | None, last: Incident | None) -> None:
        """Note the present state of the stand-in.

        Args:
            job: the ranks of the stand-in.
            incident: its open incident; None: none is open.
            last: the incident that it closed last; None: none yet.
        """
        going = incident is not None and incident.plan is not None and not (incident.failures or incident.forgiven)
        self._saves_for = job if going else None
        if last is not None and last.path and self._made != (last.saved, last.path):
            self._made_for, self._made = _of(job), (last.saved, last.path)
            pages = {rank for task in last.tasks for rank in task.order.pages}
            self._whose = {job.members[rank].hello.nonce for rank in pages if rank in job.members}

    def saves(self, job: Membership) -> bool:
        """Return whether all ranks of this job that can be spoken to stand still for a checkpoint in progress."""
        there = self._saves_for
        return there is not None and _of(there) == _of(job) and job.live <= there.live

    def made(self, job: Membership) -> tuple[Version, str] | None:
        """Return version and path of the last checkpoint; None if a rank that can be spoken to has no part in it."""
        if self._made_for != _of(job) or any(job.members[rank].hello.nonce not in self._whose for rank in job.live):
            return None
        return self._made


def _of(job: Membership) -> _Job:
    return job.run_id, job.incarnation
