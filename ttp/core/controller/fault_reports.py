"""Decides which reports count as evidence of a fault, and which witnesses are believed."""

from __future__ import annotations

from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.events import Accused, ConnectionId, RankWasWrong
from ttp.core.controller.evidence import OUTSIDER
from ttp.core.controller.job_end import JobEnd
from ttp.core.controller.membership import Member
from ttp.core.controller.parts import ControllerParts
from ttp.core.layout import Rank, Version

STACKS_MAX = 8
"""Most suspects whose stacks are requested."""


class FaultReports:
    """Passes evidence on to the rescue, and tells the parts of the controller about lost ranks.

    Args:
        parts: the parts of the controller.
        end: notes when the last rank is gone.
    """

    def __init__(self, parts: ControllerParts, end: JobEnd) -> None:
        self._parts, self._end = parts, end
        self._job, self._outbox, self._rescue = parts.job, parts.outbox, parts.rescue

    def stream_ended(self, connection: ConnectionId, now: float) -> None:
        """Handle the end of a stream: all of its ranks are disconnected."""
        self._parts.layouts.ended(connection, now)
        for rank in [rank for rank, guest in self._job.guests.items() if guest.connection == connection]:
            del self._job.guests[rank]
        for rank in sorted(self._job.by_connection.get(connection, set())):
            member = self._job.members[rank]
            first_of_host = not self._job.suspects_on[member.hello.host]
            self._rank_lost(member, now)
            if member.left:
                continue
            if self._job.formed:
                self._stream_lost(member, now, first_of_host=first_of_host)
            else:
                self._outbox.record("gone", rank=rank, host=member.hello.host, pid=member.hello.pid)
        self._end.heard(now)

    def _rank_lost(self, member: Member, now: float) -> None:
        """Tell the parts that keep state of a rank, in this order, that the rank is disconnected.

        The rescue drops the rank's save; the silence watch stops watching the rank; the job keeps the rank as left in
        good order or as lost, or forgets it if the job was not formed yet; hang detection stops watching it.
        """
        rank = member.hello.rank
        self._rescue.lost(rank)
        self._parts.silence.lost(rank)
        if member.left:
            self._job.detach(rank)
            return
        if not self._job.formed:
            self._job.forget(rank)
            self._parts.forget(rank)
        else:
            self._job.lose(rank, now)
            self._parts.hangs.forget(rank)

    def _stream_lost(self, member: Member, now: float, *, first_of_host: bool) -> None:
        rank, silent_s = member.hello.rank, now - member.last_seen
        cut_off = silent_s > self._parts.timeouts.silent_s
        silence = f"silent for {silent_s:.1f} s, then " if cut_off else ""
        text = f"{member.name} was lost: {silence}its stream ended without a goodbye"
        self._rescue.fault(rank, m.FaultKind.LOST, text, now)
        if cut_off and first_of_host:
            self._parts.indirect_probe.ask(rank)

    def look_for_hangs(self, now: float) -> None:
        """Report a hang as a fault if the job makes no progress."""
        suspicion = self._parts.hangs.check(now, self._job.live)
        if suspicion is None:
            return
        for rank in suspicion.subjects or (OUTSIDER,):
            self._rescue.fault(rank, m.FaultKind.HUNG, suspicion.text, now)
        self.record_lesson()
        for rank in suspicion.subjects[:STACKS_MAX]:
            self._ask_for_stack(rank)

    def record_lesson(self) -> None:
        """Record a wait that controllers which lead the job after this one have to know of, if there is one."""
        hangs = self._parts.hangs
        if hangs.lesson_s:
            self._outbox.record("stood_still", stood_s=round(hangs.lesson_s, 3))
            hangs.lesson_s = 0.0

    def _ask_for_stack(self, subject: Rank) -> None:
        """Ask another rank of the subject's host for the subject's stack; if there is none, ask the subject itself."""
        hello = self._job.members[subject].hello
        others = (r for r in self._job.live if r != subject and self._job.members[r].hello.host == hello.host)
        witness = min(others, default=subject)
        incident = self._rescue.incident.id if self._rescue.incident is not None else ""
        self._outbox.send_to(witness, m.TakeStack(witness, self._job.term, incident, subject, hello.pid))

    def accused(self, event: Accused, now: float) -> None:
        """Take evidence from outside of the job: from a launcher, a node monitor or an operator."""
        for index, rank in enumerate(event.ranks):
            member = self._job.members.get(rank)
            if member is None and self._job.gather_until is not None:  # it may be about an earlier process of this rank
                self._job.exited[rank] = event.reason
            if member is None or member.left or not self._job.formed:
                continue  # a job that is not formed has nothing to lose
            if event.pids and event.pids[index] not in (0, member.hello.pid):
                continue  # about an earlier process of this rank
            text = f"{member.name}: {event.reason}"
            if event.kind is m.FaultKind.EXITED:
                member.seat = event.seat or member.seat
                self._exited(member, text, now)
            else:
                self._job.mark_failed(rank, text)
            self._rescue.fault(rank, event.kind, text, now, witness=OUTSIDER)
        for page in event.pages:
            self._parts.mirrors.hand_over(page)
        self._end.heard(now)

    def _exited(self, member: Member, text: str, now: float) -> None:
        """Handle the end of a process that a reliable witness saw: fence the rank at once, without a grace period."""
        rank = member.hello.rank
        refused = m.Refused(rank, m.RefusalCode.FENCED, f"{text}; its state is not used any more")
        self._outbox.send_to(rank, refused)  # in case the process lives after all
        self._rank_lost(member, now)
        self._job.fence(rank, text)

    def reported(self, report: m.Fault, now: float) -> None:
        """Take a rank's report that it cannot train on, or that another process of its host ended."""
        subject = self._job.members.get(report.subject)
        if subject is None or (report.nonce and report.nonce != subject.hello.nonce):
            return
        report = replace(report, text=report.text or report.kind.value)
        if report.subject == report.rank:
            self._job.mark_failed(report.subject, report.text)
            if report.wrong:
                self._end.told(RankWasWrong(report.text))
            if report.kind is m.FaultKind.COLLECTIVE and self._rescue.incident is None:
                self._blame_who_left(subject.version, now)
        elif report.kind is m.FaultKind.EXITED:
            report = replace(report, text=f"{subject.name}: {report.text}")
            witness = self._job.members[report.rank]
            if not report.nonce or witness.hello.host != subject.hello.host or subject.left or not self._job.formed:
                return  # only a neighbour can know, and it knows which process
            self._exited(subject, report.text, now)
        self._rescue.fault(report.subject, report.kind, report.text, now, detail=report.detail, witness=report.rank)

    def _blame_who_left(self, version: Version, now: float) -> None:
        """Name ranks that left the job on purpose, which is a fault only if others, at ``version``, wait for them."""
        for rank, member in self._job.members.items():
            needed = version <= member.version + 1  # further on, the others have made updates without this rank
            if member.left and member.done and needed and not self._job.ended:
                how = "by sys.exit(0), Ctrl-C or the end of its program"
                text = f"{member.name} left train() at version {member.version} while others trained ({how})"
                self._rescue.fault(rank, m.FaultKind.EXITED, text, now)
