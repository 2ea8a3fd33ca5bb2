"""Decides when a job is over, and when its controller can stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ttp.core import messages as m
from ttp.core.controller.events import HostsDrained, LauncherSaid, RankWasWrong, Remembered, Stop
from ttp.core.controller.evidence import OUTSIDER
from ttp.core.controller.parts import ControllerParts
from ttp.core.layout import Rank
from ttp.errors import EXIT_BAD_CONFIG


class JobEnd:
    """Ends a job whose ranks have all trained to the end, and stops the controller of a job that is over.

    Args:
        parts: the parts of the controller.
        now: the time at which the controller starts, in seconds.
    """

    def __init__(self, parts: ControllerParts, now: float) -> None:
        self.finished_at: float | None = None
        """Time at which the last rank left its training loop; None: not all ranks have left it."""
        self.stopped = False
        """True if ``Stop`` was returned."""
        self._job, self._outbox, self._timeouts = parts.job, parts.outbox, parts.timeouts
        self._rescue, self._verdict = parts.rescue, parts.rescue.verdict
        self._drained = self._left_over = self._verdict.drained
        self._quiet_since = now

    def heard(self, now: float) -> None:
        """Note that ranks are gone; from the last one on, the time without any rank counts (``abandoned_s``)."""
        self._quiet_since = now

    def told(self, event: LauncherSaid | HostsDrained | RankWasWrong | Remembered) -> None:
        """Take a fact about the exit code of the job, from a launcher, an operator, a rank or the history."""
        verdict = self._verdict
        before = verdict.now
        match event:
            case LauncherSaid(_, True, _):
                verdict.starts()
            case LauncherSaid(host, False, code):
                verdict.asks(host, code)
            case HostsDrained(hosts, drained):
                verdict.drained = verdict.drained | hosts if drained else verdict.drained - hosts
            case RankWasWrong(text):
                verdict.is_wrong(text)
            case Remembered(fruitless, progress, saved, wrong, drained, hosts, _):
                verdict.remember(fruitless, progress, wrong, drained)
                self._rescue.committing.take_over(saved)
                self._left_over, self._job.homes = drained, hosts
        if verdict.now.code == EXIT_BAD_CONFIG != before.code:
            self._outbox.record("wrong", text=verdict.now.text)

    def finish(self, ranks: Iterable[Rank]) -> None:
        """Tell these ranks that the job is over."""
        ranks = tuple(ranks)
        for rank in ranks:
            member = self._job.members[rank]
            member.left = True
            self._verdict.left.add(member.hello.host)
        self._outbox.send_alike(ranks, m.Finished(m.SEVERAL, self._job.term))

    def advance(self, now: float, *, incident: bool) -> None:
        """End the job or the controller when it is time; while an ``incident`` is open the job does not end."""
        if self._verdict.drained != self._drained:
            self._drained = self._verdict.drained
            self._outbox.record("drained", hosts=sorted(self._drained))
        if not incident:
            self._maybe_finished(now)
        if self._left_over and self._job.formed and self._job.gather_until is None:
            self._leave(now)
        self._maybe_stop(now)

    def _leave(self, now: float) -> None:
        """Accuse the ranks of hosts that were drained before the takeover, as the last controller did."""
        hosts, self._left_over = self._left_over, frozenset()
        for rank, host in sorted((rank, self._job.members[rank].hello.host) for rank in self._job.live):
            if host in hosts:
                self._job.mark_failed(rank, f"{host} is drained")
                self._rescue.fault(rank, m.FaultKind.OUTSIDE, f"{host} is drained", now, witness=OUTSIDER)

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``advance`` may have something to do."""
        if self.finished_at is not None:
            yield self.finished_at + self._timeouts.linger_s
        if not self._job.live:
            yield self._quiet_since + self._timeouts.abandoned_s

    def _maybe_finished(self, now: float) -> None:
        """End the job when every rank that said hello has left its training loop."""
        if not self._job.training or self._job.ended:
            return
        if len(self._job.done) < len(self._job.members):
            return
        self.finished_at, self._job.ended = now, True
        version = max(mb.version for mb in self._job.members.values())
        end = self._verdict.finished(version, self._rescue.committing.on_disk())
        self.finish(self._job.members)
        self._outbox.record("finished", version=version, exit_code=end.code, text=end.text)

    def _maybe_stop(self, now: float) -> None:
        if self.stopped:
            return
        if self.finished_at is not None and (not self._job.live or now >= self.finished_at + self._timeouts.linger_s):
            self._stop("the job is over")
        elif not self._job.live and now >= self._quiet_since + self._timeouts.abandoned_s:
            self._stop(f"no rank was connected to this controller for {self._timeouts.abandoned_s:g} s")

    def _stop(self, reason: str) -> None:
        self.stopped = True
        self._outbox.record("stopped", reason=reason)
        self._outbox.add(Stop(reason))
