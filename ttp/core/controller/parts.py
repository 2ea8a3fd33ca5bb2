"""Makes the parts of a controller, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable

from ttp.core.controller.events import ControllerTimeouts
from ttp.core.controller.hangs import HangWatch
from ttp.core.controller.indirect_probe import IndirectProbe
from ttp.core.controller.layout_exchange import Layouts
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import MakeRecovery
from ttp.core.controller.rescue import Rescue
from ttp.core.controller.restore_agreement import Restoring
from ttp.core.controller.silence import Silence
from ttp.core.controller.standby import Standby
from ttp.core.layout import Rank
from ttp.core.replication import Buddies


class ControllerParts:
    """The parts of one controller. ``ControllerMachine``, ``Admission`` and ``FaultReports`` call them.

    Args:
        timeouts: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number.
        host: the host that the controller runs on, named as ranks name their hosts.
        port: the port that it listens on; 0 if unknown.
        program: leads jobs that save and repair themselves.
    """

    def __init__(
        self, timeouts: ControllerTimeouts, new_id: Callable[[int], str], host: str, port: int, program: MakeRecovery
    ) -> None:
        self.timeouts = timeouts
        job = self.job = Membership(home=host)
        outbox = self.outbox = Outbox(job)
        self.layouts = Layouts(job, outbox)
        self.mirrors = Mirrors(job, outbox)
        self.buddies = Buddies(job, outbox)
        self.rescue = Rescue(job, outbox, timeouts, new_id, self.mirrors, program)
        self.restoring = Restoring(job, outbox)
        self.hangs = HangWatch(timeouts.hang_s, timeouts.heartbeat_s)
        self.silence = Silence(job, outbox, self.rescue, timeouts)
        self.indirect_probe = IndirectProbe(job, outbox, timeouts)
        self.standby = Standby(job, outbox, timeouts.standbys, port)

    def joined(self, rank: Rank, now: float) -> None:
        """Tell the parts that watch or serve ranks that this one is connected."""
        self.silence.joined(rank, now)
        for part in (self.standby, self.buddies, self.mirrors):
            part.joined(rank)

    def forget(self, rank: Rank) -> None:
        """Forget a process that left before the job was formed: its reports do not hold for the next process."""
        self.restoring.forget(rank)
        self.hangs.forget(rank)

    def forget_incarnation(self) -> None:
        """Forget all ranks, because a new launch begins or another controller has led the job."""
        for part in (self.restoring, self.standby, self.mirrors, self.buddies, self.rescue.program, self.silence):
            part.reset()
