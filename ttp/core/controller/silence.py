"""Watches for silent hosts, whose power, switch or cable may have failed. No I/O, no clock, no threads.

The death of a process ends its stream at once. A host that is cut off or has lost its power ends no stream: gRPC ends
the streams only after its keepalive timeout. Until then the host is *in doubt*: the ranks of all other hosts are frozen
and their state is saved, because a freeze can be taken back. No rank is released because of a doubt, see ``Rescue``.

Missing reports alone do not put a host in doubt. A rank that is stopped, or whose interpreter lock is held, sends none
for seconds; and if the controller itself was stopped, reports wait unread in its sockets. So a host without reports for
a while is *looked at*: the driver of the machine asks its own kernel how long nothing has arrived from that host,
neither data nor an acknowledgement. The host's kernel acknowledges data whatever its processes do.

If ``check`` is called late, the controller or its machine was stopped: then the time of every host begins again.

Cost: constant for every report of a host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ttp.core.controller.events import TIMER_LATE_S, ControllerTimeouts, LookAt, LookedAt
from ttp.core.controller.incident import NEVER
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.rescue import Rescue
from ttp.core.layout import Rank, compact_ranks

LOOK_S = 0.25
"""Seconds between two looks at one host."""


class Silence:
    """Watches the hosts of one incarnation, except the controller's own.

    Args:
        job: the ranks.
        outbox: takes ``LookAt`` actions and records.
        rescue: takes the ranks of hosts in doubt.
        timeouts: see ``ControllerTimeouts``.
    """

    def __init__(self, job: Membership, outbox: Outbox, rescue: Rescue, timeouts: ControllerTimeouts) -> None:
        self._job, self._outbox, self._rescue, self._timeouts = job, outbox, rescue, timeouts
        self.reset()

    def reset(self) -> None:
        """Forget all hosts, because another incarnation begins."""
        self._ranks: dict[str, set[Rank]] = {}  # connected ranks by host
        self._heard: OrderedDict[str, float] = OrderedDict()  # last report of each host, the oldest first
        self._looks: OrderedDict[str, float] = OrderedDict()  # when to look again at quiet hosts, the next first
        self._asked: set[str] = set()  # hosts that are being looked at
        self._doubted: OrderedDict[str, float] = OrderedDict()  # end of the doubt about each host, the next first

    # ------------------------------------------------------------------------------------------------------------ input

    def joined(self, rank: Rank, now: float) -> None:
        """Note that a rank is connected."""
        host = self._job.members[rank].hello.host
        self._ranks.setdefault(host, set()).add(rank)
        self.heard(host, now)

    def heard(self, host: str, now: float) -> bool:
        """Note a report of a rank of this host. Return whether that ends a doubt about the host."""
        if host == self._job.home or self._timeouts.quiet_s is None:
            return False
        self._looks.pop(host, None)
        self._asked.discard(host)
        self._heard[host] = now
        self._heard.move_to_end(host)
        if self._doubted.pop(host, None) is None:
            return False
        ranks = self._ranks[host]
        self._outbox.record("heard_again", host=host, ranks=compact_ranks(sorted(ranks)))
        for each in sorted(ranks & self._job.silent):
            self._job.silent.discard(each)
            self._rescue.heard_again(each, now)
        return True

    def lost(self, rank: Rank) -> None:
        """Stop watching a disconnected rank: the end of its stream is evidence of its own, not a doubt."""
        host = self._job.members[rank].hello.host
        ranks = self._ranks.get(host, set())
        ranks.discard(rank)
        if ranks:
            return
        for times in (self._heard, self._looks, self._doubted):
            times.pop(host, None)
        self._ranks.pop(host, None)
        self._asked.discard(host)

    def looked(self, event: LookedAt, now: float) -> None:
        """Take the kernel's answer: the time for which nothing has come from a host."""
        host = event.host
        if host not in self._asked:
            return  # the host was heard meanwhile
        self._asked.discard(host)
        if event.silent_s is None:
            return  # unknown: the streams of a dead host end after gRPC's keepalive timeout
        if event.silent_s >= self._timeouts.doubt_s and self._matters:
            self._doubt(host, event.silent_s, now)
        else:
            self._looks[host] = now + LOOK_S

    def _doubt(self, host: str, silent_s: float, now: float) -> None:
        ranks = sorted(self._ranks[host])
        self._doubted[host] = now + self._timeouts.doubt_max_s
        self._job.silent.update(ranks)
        for rank in ranks:
            text = f"{self._job.members[rank].name}: nothing has come from its host for {silent_s:.1f} s"
            self._rescue.unheard(rank, text, now)

    # ------------------------------------------------------------------------------------------------------------ time

    @property
    def _matters(self) -> bool:
        """True if a doubt matters: the job is formed, so it has steps to lose, and no takeover is going on."""
        return self._job.formed and not self._job.ended and self._job.gather_until is None

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``check`` has something to do."""
        if self._quiet_at < NEVER:
            yield self._quiet_at
        for times in filter(None, (self._looks, self._doubted)):
            yield next(iter(times.values()))

    @property
    def _quiet_at(self) -> float:
        """Time at which to look at the host with the oldest report."""
        quiet_s = self._timeouts.quiet_s
        return next(iter(self._heard.values())) + quiet_s if self._heard and quiet_s is not None else NEVER

    def check(self, now: float) -> None:
        """Look at hosts that have sent no report for too long; turn a doubt that has lasted too long into a fault."""
        due = min(self.deadlines(), default=NEVER)
        if now < due:
            return
        if now > due + TIMER_LATE_S:
            self._was_away(now)
            return
        while now >= self._quiet_at:
            self._look(self._heard.popitem(last=False)[0])
        while self._looks and now >= next(iter(self._looks.values())):
            self._look(self._looks.popitem(last=False)[0])
        while self._doubted and now >= next(iter(self._doubted.values())):
            self._job.silent -= self._ranks[self._doubted.popitem(last=False)[0]]  # the evidence against them stands

    def _look(self, host: str) -> None:
        self._asked.add(host)
        streams = (self._job.members[rank].connection for rank in self._ranks[host])
        self._outbox.add(LookAt(host, tuple(sorted({stream for stream in streams if stream is not None}))))

    def _was_away(self, now: float) -> None:
        """Let the time of every host begin again: this controller did not run, and reports may wait unread."""
        for host in (*self._heard, *self._looks):
            self._heard[host] = now
        self._looks.clear()
        for host in self._doubted:
            self._doubted[host] = max(self._doubted[host], now + LOOK_S)
