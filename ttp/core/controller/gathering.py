"""After a takeover: waits until the ranks of the running job have said hello to the new controller.

A missing rank may be dead, connected to another controller, or still on its way. It may be late because it queues
behind thousands of others or because this controller was stopped. So the wait ends only when no rank has said hello for
``ControllerTimeouts.gather_s``, and it begins again if this controller itself is late.

If only a minority has come and no incident is open, the controller sends these ranks to another controller once: the
majority may still have a controller, and a healthy job must not be declared broken. It does so again if the job has
trained meanwhile: then it is another fault of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ttp.core import messages as m
from ttp.core.controller.parts import ControllerParts
from ttp.core.layout import Rank, Version


class Gathering:
    """Waits for ranks that another controller led before; ``Membership.gather_until`` is the end of the wait.

    Args:
        parts: the parts of the controller.
        abdicate: forgets the job and sends its ranks to another controller; takes the time.
        now: the time at which the controller starts.
    """

    def __init__(self, parts: ControllerParts, abdicate: Callable[[float], None], now: float) -> None:
        self._job, self._rescue, self._timeouts, self._abdicate = parts.job, parts.rescue, parts.timeouts, abdicate
        self._sent_on = self._counted = False
        self._since = now
        self._sent_version = Version(0)
        self._late_s = parts.timeouts.gather_s / 6

    def joined(self, hello: m.Hello, *, new: bool, now: float) -> None:
        """Note a rank's hello.

        Args:
            hello: the hello.
            new: this is the rank's first hello to this controller.
            now: the time, in seconds.
        """
        job = self._job
        if hello.version > self._sent_version + 1:
            self._sent_on = False  # all ranks have trained together since they were sent on
        if job.complete:
            job.gather_until, self._sent_on = None, False
        elif new and job.gather_until is not None:
            job.gather_until, self._counted = now + self._timeouts.gather_s, self._sent_on
        elif new and hello.resume:
            job.gather_until = now + self._timeouts.gather_s
            self._sent_on &= now < self._since + 2 * self._timeouts.forming_s  # later ranks are of another launch
            self._since = self._since if self._sent_on else now
            self._counted = self._sent_on

    def expire(self, now: float) -> None:
        """End the wait when it is time; ``now`` in seconds."""
        for due in self.deadlines():
            if now >= due + self._late_s:  # this controller is late: hellos may be waiting unread
                self._job.gather_until = now + self._timeouts.gather_s
        if self._job.gather_until is not None and not self._counted and now >= self._mostly_over:
            self._count_ranks(now)
        if self._job.gather_until is not None and now >= self._job.gather_until:
            self._is_over(now)

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``expire`` has to be called."""
        if self._job.gather_until is not None:
            yield self._job.gather_until if self._counted else self._mostly_over

    def _is_over(self, now: float) -> None:
        """Report ranks that have not said hello to this controller as lost.

        In a job that never trained a missing rank may not have started yet. So the wait is longer, up to
        ``forming_s``, and the ranks that came may be sent to another controller again. After that time only a restart
        can bring all ranks together.
        """
        job = self._job
        assert job.layout is not None
        patient = now < self._since + self._timeouts.forming_s
        if self._rescue.incident is None and self._untrained and job.live and patient:
            job.gather_until, self._counted = now + self._timeouts.gather_s, False
            return
        job.gather_until, self._sent_on = None, False
        for rank in map(Rank, range(job.layout.world_size)):
            if rank not in job.members:
                host, why = job.host_of(rank), job.exited.get(rank, "")
                who = f"rank {rank}{host and ' on '}{host}"
                text = f"{who} did not come back to the new controller{why and ': '}{why}"
                self._rescue.fault(rank, m.FaultKind.LOST, text, now)

    @property
    def _untrained(self) -> bool:
        base = self._rescue.committing.base
        return all(mb.version <= base and not mb.done for mb in self._job.members.values())

    @property
    def _mostly_over(self) -> float:
        """Time at which a minority is sent to another controller: not all ranks notice a lost controller at once."""
        assert self._job.gather_until is not None
        return self._job.gather_until - self._timeouts.gather_s / 3

    def _count_ranks(self, now: float) -> None:
        """Send the ranks to another controller if no incident is open and most ranks are missing.

        The missing ranks may have a controller that waits for these. In a job that never trained exactly half of the
        ranks are sent too, as there is no step to lose.
        """
        job = self._job
        assert job.layout is not None
        self._counted = True
        few = 2 * len(job.live) < job.layout.world_size + self._untrained
        choice = any(mb.hello.standbys for mb in job.members.values())
        if self._rescue.incident is None and few and choice:
            self._sent_on, self._sent_version = True, max(mb.version for mb in job.members.values())
            self._abdicate(now)
