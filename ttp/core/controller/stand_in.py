"""Makes a checkpoint in a standby controller while the job's own controller is silent. No I/O, no clock, no threads.

A silent host is in doubt for seconds before it is known whether it is lost (``silence``). If it is the host of the
controller, its ranks keep their streams to it and open a second stream, *meanwhile*, to a standby controller. That
controller freezes the ranks that come, saves and commits the version that they hold together, and thaws them. It does
not lead the ranks: it has no term, accuses no rank, and cannot release. So a doubt that turns out to be wrong costs
only a pause: a rank that hears from its controller again ends the second stream, which thaws the rank as well.

A takeover (``gathering``) differs: a rank that is sure that its controller is lost says hello again, without
``meanwhile``, usually to this same process. A checkpoint that is being made at that time goes on, and the new leader
takes it over; see ``meanwhile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ttp._version import __version__
from ttp.core import messages as m
from ttp.core.controller import events as ev
from ttp.core.controller.hello_rules import malformed, mismatch
from ttp.core.controller.layout_exchange import Layouts
from ttp.core.controller.meanwhile import Meanwhile
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import no_recovery
from ttp.core.controller.rescue import Rescue
from ttp.core.layout_messages import LayoutPart

NO_TERM = 0
"""The term of a controller that leads no rank."""
MEANWHILE = "-m"
"""Suffix of the ids of a stand-in's incidents."""


class StandIn:
    """Saves for ranks whose controller is silent.

    Args:
        timeouts: see ``ControllerTimeouts``.
        new_id: makes an incident's id from its number.
        meanwhile: takes note of the checkpoints made here.
    """

    def __init__(self, timeouts: ev.ControllerTimeouts, new_id: Callable[[int], str], meanwhile: Meanwhile) -> None:
        self._timeouts, self._new_id, self._meanwhile = timeouts, new_id, meanwhile
        self._streams: set[ev.ConnectionId] = set()
        self._incidents = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without ranks: the next rank that comes may be of another job."""
        self.job = Membership(term=NO_TERM)
        self._outbox = Outbox(self.job)
        self._layouts = Layouts(self.job, self._outbox)
        mirrors = Mirrors(self.job, self._outbox)
        self.rescue = Rescue(self.job, self._outbox, self._timeouts, self._id_of, mirrors, no_recovery)

    def _id_of(self, number: int) -> str:
        """Return an id that differs from all ids of the incidents that this controller leads."""
        self._incidents += 1  # ``number`` begins again after each ``_begin``
        return f"{self._new_id(self._incidents)}{MEANWHILE}"

    def split(self, event: ev.Event) -> tuple[ev.Event | None, ev.Event | None]:
        """Split an event into the part from ``meanwhile`` streams, and the rest; None: there is no such part."""
        match event:
            case ev.Received(connection, m.Hello(meanwhile=True)):
                self._streams.add(connection)
            case ev.Received(connection) | ev.StreamEnded(connection) if connection in self._streams:
                pass
            case ev.ReceivedAlike(who, report) if self._streams:
                here = tuple(each for each in who if each[0] in self._streams)
                rest = tuple(each for each in who if each[0] not in self._streams)
                meanwhile = ev.ReceivedAlike(here, report) if here else None
                return meanwhile, ev.ReceivedAlike(rest, report) if rest else None
            case _:
                return None, event
        return event, None

    def on_event(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take an event of a ``meanwhile`` stream, or a ``Tick``. Return the actions to be done."""
        match event:
            case ev.Received(connection, m.Hello() as hello):
                self._hello(connection, hello, now)
            case ev.Received(connection, LayoutPart() as part):
                for waited_on, hello in self._layouts.told(connection, part, now):
                    self._hello(waited_on, hello, now)
            case ev.Received(connection, report):
                self._said(connection, report, now)
            case ev.ReceivedAlike(who, report):
                for connection, rank in who:
                    self._said(connection, replace(report, rank=rank), now)
            case ev.StreamEnded(connection):
                self._ended(connection, now)
        if not self._streams:
            self._meanwhile.note(self.job, None, self.rescue.last)
            actions = self._actions()
            if self.job.layout is not None or self.job.layouts:
                self._begin()
            return actions
        self._layouts.expire(now)
        if self.job.gather_until is not None and now >= self.job.gather_until:
            self.job.gather_until = None
        self.rescue.expire(now)
        self.rescue.advance(now)
        self._meanwhile.note(self.job, self.rescue.incident, self.rescue.last)
        return self._actions()

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which ``on_event(Tick(), ...)`` is due."""
        if self._streams:
            if self.job.gather_until is not None:
                yield self.job.gather_until
            yield from self._layouts.deadlines()
            yield from self.rescue.deadlines()

    def _actions(self) -> list[ev.Action]:
        """Return the actions but drop records outside an incident, which would suggest that this controller leads."""
        return [a for a in self._outbox.take() if not isinstance(a, ev.Record) or a.incident]

    def _hello(self, connection: ev.ConnectionId, hello: m.Hello, now: float) -> None:
        job = self.job
        if job.layout is not None and (hello.run_id, hello.incarnation) != (job.run_id, job.incarnation):
            self._outbox.refuse(connection, hello, m.RefusalCode.BUSY, "this controller stands in for another job")
            return
        problem = malformed(job, hello) or (mismatch(job, hello) if job.layout is not None else None)
        if problem is not None:
            self._outbox.refuse(connection, hello, *problem)
        elif hello.layout_digest not in job.layouts:
            self._layouts.wait(connection, hello, now)
        else:
            self._join(connection, hello, now)

    def _join(self, connection: ev.ConnectionId, hello: m.Hello, now: float) -> None:
        job, rescue = self.job, self.rescue
        if job.has_later(connection, hello.rank):
            return
        if job.layout is None:
            job.start_incarnation(hello)
        rescue.committing.restored(hello.base_version)
        job.join(connection, hello, now)
        job.term = NO_TERM
        self._outbox.send(connection, m.Welcome(hello.rank, job.term, job.incarnation, __version__))
        if rescue.incident is not None:
            job.gather_until = now + self._timeouts.meanwhile_s
            rescue.joined(hello, now)
        elif hello.version > rescue.committing.on_disk():
            job.gather_until = now + self._timeouts.meanwhile_s
            rescue.snapshot(f"nothing has come from the controller of rank {hello.rank} for seconds", now)

    def _said(self, connection: ev.ConnectionId, report: m.Report, now: float) -> None:
        member, incident = self.job.members.get(report.rank), self.rescue.incident
        if member is None or member.connection != connection:
            return
        saving = self.rescue.saving
        match report:
            case m.Frozen():
                member.version, member.phase = report.version, report.phase
                self.rescue.answered((report.rank,), report, now)
            case m.Heartbeat() if incident is not None:
                member.version, member.phase = report.version, report.phase
                saving.written(incident, report.rank, report.written, now)
            case _ if incident is not None:
                saving.reported(incident, report, now)

    def _ended(self, connection: ev.ConnectionId, now: float) -> None:
        """Forget the ranks of a stream that ended; whatever the reason, it is no fault here."""
        self._streams.discard(connection)
        self._layouts.ended(connection, now)
        for rank in sorted(self.job.by_connection.get(connection, set())):
            self.rescue.lost(rank)
            self.job.detach(rank)
            del self.job.members[rank]
        if self.rescue.incident is not None and not self._streams:
            self._outbox.record("thawed", reason="every rank has closed its stream, which thaws it", false_alarm=False)
            self.rescue.close()
