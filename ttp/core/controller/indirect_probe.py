"""Asks a rank of a third host whether a silent host answers, before the host's ranks are given up.

The controller sees only its own streams. When the streams of a host end after a silence, the controller asks a rank on
a third host whether it still reaches that host. If it does, the network between controller and host is at fault, and
the ranks get more time to come back. If it does not, or if there is no third host, they get only the usual grace.
"""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import Rank


class IndirectProbe:
    """Chooses the rank to ask, and takes its answer.

    Args:
        job: the ranks.
        outbox: takes the questions.
        timeouts: see ``ControllerTimeouts``.
    """

    def __init__(self, job: Membership, outbox: Outbox, timeouts: ControllerTimeouts) -> None:
        self._job, self._outbox, self._timeouts = job, outbox, timeouts

    def ask(self, subject: Rank) -> None:
        """Ask a rank on a third host about the host of ``subject``, if there is such a rank.

        The ranks of the controller's own host share its view of the network.
        """
        hello = self._job.members[subject].hello
        if not hello.address:
            return
        for rank in sorted(self._job.live):
            if self._job.members[rank].hello.host not in (hello.host, self._job.home):
                self._outbox.record("witness_asked", rank=rank, subject=subject, host=hello.host)
                self._outbox.send_to(rank, m.Probe(rank, self._job.term, subject, hello.address))
                return

    def said(self, answer: m.Probed, now: float) -> None:
        """Take an answer; it applies to every suspect of the silent host."""
        subject = self._job.members.get(answer.subject)
        if subject is None:
            return
        host = subject.hello.host
        self._outbox.record(
            "witness", rank=answer.rank, subject=answer.subject, host=host, reachable=answer.reachable, text=answer.text
        )
        if not answer.reachable:
            return
        longer = now + self._timeouts.partition_s - self._timeouts.grace_s
        for rank in [r for r in self._job.suspects if self._job.members[r].hello.host == host]:
            self._job.wait_longer(rank, longer)
