"""After a takeover: waits until the ranks of a running job have come to a controller that knows nothing yet.

A missing rank may be dead, or elsewhere, or still on its way. A rank that is late, behind thousands of others or
because this controller did not run for a moment, is not missing: the waiting ends when no rank has come for a while
(``ControllerTimeouts.gather_s``), and it begins anew if this controller was late itself.

A controller that only a minority has come to, none of them frozen, sends them to another controller once: the other
ranks may have one, and a healthy job must not be called broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.controller.membership import Membership
from ttp.core.controller.rescue import Rescue
from ttp.core.layout import Rank


class Gathering:
    """Waits for ranks that another controller has led; ``Membership.gather_until`` says until when.

    Args:
        job: the ranks.
        rescue: gets evidence against those that are missing.
        patience: see ``ControllerTimeouts``.
        abdicate: sends the ranks to another controller, as they may be led elsewhere.
        now: the time at which the controller starts.
    """

    def __init__(
        self,
        job: Membership,
        rescue: Rescue,
        patience: ControllerTimeouts,
        abdicate: Callable[[float], None],
        now: float,
    ) -> None:
        self._job, self._rescue, self._patience, self._abdicate = job, rescue, patience, abdicate
        self._sent_on = self._counted = False
        self._since = now
        self._late_s = patience.gather_s / 6

    def joined(self, *, new: bool, resumes: bool, now: float) -> None:
        """Note a rank's hello; ``new``: its first one here, ``resumes``: it was led by another controller."""
        job = self._job
        if job.complete:
            job.gather_until, self._sent_on = None, False
        elif new and job.gather_until is not None:
            job.gather_until, self._counted = now + self._patience.gather_s, self._sent_on
        elif new and resumes:
            job.gather_until = now + self._patience.gather_s
            self._sent_on &= now < self._since + 2 * self._patience.forming_s  # else it was another launch
            self._since = self._since if self._sent_on else now
            self._counted = self._sent_on

    def expire(self, now: float) -> None:
        """End the waiting when it is time; ``now`` in seconds."""
        for due in self.deadlines():
            if now >= due + self._late_s:  # other ranks may have come meanwhile, and were not heard
                self._job.gather_until = now + self._patience.gather_s
        if self._job.gather_until is not None and not self._counted and now >= self._mostly_over:
            self._count_ranks(now)
        if self._job.gather_until is not None and now >= self._job.gather_until:
            self._is_over(now)

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``expire`` has to be called."""
        if self._job.gather_until is not None:
            yield self._job.gather_until if self._counted else self._mostly_over

    def _is_over(self, now: float) -> None:
        """Treat ranks that have not come to this new controller as lost.

        In a job that never trained a missing rank may not have begun, so the wait is longer, and the ranks that came
        are sent elsewhere now and then; but not for ever: then only a restart brings them together.
        """
        job = self._job
        assert job.layout is not None
        patient = now < self._since + self._patience.forming_s
        if self._rescue.incident is None and self._untrained and job.live and patient:
            job.gather_until, self._counted = now + self._patience.gather_s, False
            return
        job.gather_until, self._sent_on = None, False
        for rank in range(job.layout.world_size):
            if rank not in job.members:
                text = f"rank {rank} did not come back to the new controller"
                self._rescue.fault(Rank(rank), m.FaultKind.LOST, text, now)

    @property
    def _untrained(self) -> bool:
        base = self._rescue.base_version
        return all(mb.version <= base and not mb.done for mb in self._job.members.values())

    @property
    def _mostly_over(self) -> float:
        """Time at which a minority is sent on: ranks may notice the loss of their controller that far apart."""
        assert self._job.gather_until is not None
        return self._job.gather_until - self._patience.gather_s / 3

    def _count_ranks(self, now: float) -> None:
        """Send the ranks elsewhere if none is frozen and most are missing: those may have a controller that waits.

        In a job that never trained half of the ranks are sent too: nothing is lost by looking for the others.
        """
        job = self._job
        assert job.layout is not None
        self._counted = True
        few = 2 * len(job.live) < job.layout.world_size + self._untrained
        choice = any(mb.hello.standbys for mb in job.members.values())
        if self._rescue.incident is None and few and choice:
            self._sent_on = True
            self._abdicate(now)
