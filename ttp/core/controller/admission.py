"""Handles a rank's hello: admits the rank, sends it elsewhere, refuses it, or begins the next incarnation.

``Admission.hello`` asks in this order, 1 and 2 only if the layout is known (the rules are in ``hello_rules``):

1. The rank's place is about to move to this process: it is a guest, and waits (``is_guest``).
2. Another controller has led the rank since: this controller forgets its own job (``may_have_moved``).
3. This controller has no job and the rank knows standby controllers: the rank is sent there (``elsewhere``).
4. The hello is invalid, or the rank does not fit the job now: it is refused (``malformed``, ``_refusal``).
5. The rank's layout is unknown: it is asked for first, and then the hello is handled anew (``layout_exchange``).
6. The rank is admitted, after the next incarnation has begun if ``starts_incarnation`` says so (``_admit``).

Only ``membership`` keeps who is a member. After a takeover ``gathering`` waits for the other ranks.
"""

from __future__ import annotations

from ttp._version import __version__
from ttp.core import messages as m
from ttp.core.controller import hello_rules as rules
from ttp.core.controller.events import ConnectionId, LedElsewhere
from ttp.core.controller.gathering import Gathering
from ttp.core.controller.incident import Stage
from ttp.core.controller.job_end import JobEnd
from ttp.core.controller.membership import Guest, Member
from ttp.core.controller.parts import ControllerParts
from ttp.core.layout import Rank, compact_ranks

_SET_UP_OTHERWISE = frozenset({m.RefusalCode.MISMATCH, m.RefusalCode.PROTOCOL})
"""Refusals of a rank that differs from those that came first."""
_NO_ID = "none"
"""Run id of each job of torchrun that is given none: another job may have it too."""
_BY_A_PROCESS = frozenset({m.RefusalCode.RANK_TAKEN, m.RefusalCode.FENCED})
"""Refusals of a new process because there is, or was, another one of its rank."""


class Admission:
    """Admits ranks, and tells the parts of the controller about each admitted rank.

    Args:
        parts: the parts of the controller.
        end: tells whether the job is over.
        now: the time at which the controller starts, in seconds.
    """

    def __init__(self, parts: ControllerParts, end: JobEnd, now: float) -> None:
        self._parts, self._end = parts, end
        self._job, self._outbox, self._rescue = parts.job, parts.outbox, parts.rescue
        self.gathering = Gathering(parts, self._abdicate, now)
        """Waits for the other ranks of a job that another controller led before."""

    def hello(self, connection: ConnectionId, hello: m.Hello, now: float) -> None:
        """Handle a rank's hello: admit the rank, refuse it, or ask for its layout first if that is unknown."""
        unknown = hello.layout_digest not in self._job.layouts
        if not unknown and rules.is_guest(self._job, hello):
            self._job.guests[hello.rank] = Guest(connection, hello)
            self._welcome(connection, hello, joins=True, guest=True)
            self._outbox.record("guest", rank=hello.rank, host=hello.host, pid=hello.pid)
            return
        abdicates = hello.takeover and hello.term_seen > self._job.term and rules.may_have_moved(self._job, hello)
        if abdicates and not unknown:
            self._abdicate(now)
        refusal = rules.elsewhere(self._job, hello) or rules.malformed(self._job, hello)
        if refusal is None and not (abdicates and unknown):
            refusal = self._refusal(hello, now)
        if refusal is not None:
            self._outbox.refuse(connection, hello, *refusal)
            self._missed(hello, *refusal)
        elif unknown:
            self._parts.layouts.wait(connection, hello, now)
        else:
            self._admit(connection, hello, now)

    def _refusal(self, hello: m.Hello, now: float) -> rules.Refusal | None:
        refusal = rules.refusal(self._job, hello) or self._busy(hello)
        in_the_way = not hello.incarnation and refusal is not None and refusal[0] in _BY_A_PROCESS
        if refusal is None or in_the_way:
            refusal = rules.of_another_start(self._job, hello, now, self._parts.timeouts.gather_s) or refusal
        if refusal is not None:
            return refusal
        return None if self._rescue.program.leads else rules.apart(self._job, hello)

    def _missed(self, hello: m.Hello, code: m.RefusalCode, text: str) -> None:
        """Let no rank wait in ``restore()`` for a rank of the same start that was set up in another way."""
        job = self._job
        told_apart = job.run_id != _NO_ID and code in _SET_UP_OTHERWISE
        if job.formed or job.layout is None or hello.resume or not told_apart:
            return
        needed = hello.rank < job.layout.world_size and hello.rank not in job.members
        if needed and (hello.run_id, hello.launch) in {(job.run_id, mb.hello.launch) for mb in job.members.values()}:
            self._parts.restoring.give_up(f"rank {hello.rank} on {hello.host} was refused: {text}")

    def _admit(self, connection: ConnectionId, hello: m.Hello, now: float) -> None:
        """Make a rank a member of the job, or of the next incarnation, which begins with it."""
        if rules.starts_incarnation(self._job, hello):
            self._new_incarnation(hello, now)
        known = self._job.members.get(hello.rank)
        if self._job.has_later(connection, hello.rank):
            return
        if known is not None:
            self._replaces(known, hello)
        self._rescue.committing.restored(hello.base_version)
        self._welcome(connection, hello, joins=self._job.join(connection, hello, now).seated)
        if known is None:  # a rank that comes back has not moved
            self._parts.hangs.observed((hello.rank,), m.Heartbeat(hello.rank, hello.version, hello.phase), now)
        self._parts.joined(hello.rank, now)
        kind = "reconnected" if hello.resume else "joined"
        self._outbox.record(kind, rank=hello.rank, host=hello.host, pid=hello.pid, version=hello.version)
        if hello.local_rank == 0 and not hello.resume:
            self._compare_name(hello)
        self.gathering.joined(hello, new=known is None, now=now)
        moved = known is not None and known.hello.host != hello.host
        if self._job.complete and (known is None or moved):
            hosts = {hello.host: str(hello.rank)} if moved else self._job.hosts_told()
            facts = {"world_size": hello.world_size, "incarnation": self._job.incarnation, "hosts": hosts}
            self._outbox.record("formed", **facts)
        self._joined(hello, now)

    def _compare_name(self, hello: m.Hello) -> None:
        """Record, once for each name, that two machines have it: their ranks are taken for neighbours."""
        job = self._job
        first = job.first_on.setdefault(hello.host, hello.rank)
        if first is None:
            return
        other = job.members.get(first)
        if other is None or first not in job.live or other.hello.host != hello.host:
            job.first_on[hello.host] = hello.rank
        elif rules.namesakes(other.hello, hello):
            job.first_on[hello.host] = None
            text = (
                f"ranks {first} and {hello.rank} both name their host {hello.host!r}, but have the addresses "
                f"{other.hello.address} and {hello.address}: if these are two machines, or containers that do not "
                "share /dev/shm, set TTP_HOST to another name on each. Otherwise rank-local state (random streams, "
                "extra_state) of living ranks is missing in checkpoints, and no mirrors or standbys are kept there"
            )
            self._outbox.record("one_name", host=hello.host, text=text)

    def _replaces(self, known: Member, hello: m.Hello) -> None:
        """Let another process, or the same one on another stream, take the place of a member."""
        if known.hello.nonce != hello.nonce:
            text = f"rank {hello.rank} was started again as pid {hello.pid} on {hello.host}"
            self._outbox.send_to(hello.rank, m.Refused(hello.rank, m.RefusalCode.FENCED, text))
            self._parts.forget(hello.rank)
        if known.hello.host != hello.host:
            self._parts.silence.lost(hello.rank)  # on its former host

    def _welcome(self, connection: ConnectionId, hello: m.Hello, *, joins: bool, guest: bool = False) -> None:
        term, incarnation = self._job.term, self._job.incarnation
        self._outbox.send(connection, m.Welcome(hello.rank, term, incarnation, __version__, joins, guest))

    def guest_said(self, connection: ConnectionId, report: m.Report) -> None:
        """Keep the program reports of a guest; ignore every other report of a process that is not a member."""
        guest = self._job.guests.get(report.rank)
        if guest is not None and guest.connection == connection and isinstance(report, m.ProgramReport):
            guest.said[type(report)] = report

    def seat_guests(self, now: float) -> bool:
        """Admit the guests whose seats are open. Return whether there was such a guest."""
        found = sorted(self._job.seats & self._job.guests.keys())
        for rank in found:
            guest = self._job.guests.pop(rank)
            self.hello(guest.connection, guest.hello, now)
        return bool(found)

    def _joined(self, hello: m.Hello, now: float) -> None:
        if self._end.finished_at is not None:
            self._end.finish((hello.rank,))
            return
        self._rescue.joined(hello, now)
        if hello.broken:  # its own report, which follows, says of what kind; the cause may be a rank that does not come
            self._rescue.fault(hello.rank, m.FaultKind.COLLECTIVE, hello.broken, now)

    def led_elsewhere(self, event: LedElsewhere, now: float) -> None:
        """Forget the job if all ranks have gone to another controller, as they do while this one stands still.

        Otherwise it would take all of them for dead, and record that the job was lost.
        """
        job, incident = self._job, self._rescue.incident
        same = event.run_id == job.run_id and event.incarnation >= job.incarnation
        if job.live or not job.suspects or not same or event.term <= job.term:
            return
        if incident is not None:
            incident.evidence.withdraw_all(m.FaultKind.LOST)
        self._abdicate(now)

    def _busy(self, hello: m.Hello) -> rules.Refusal | None:
        incident = self._rescue.incident
        if incident is None or incident.stage is Stage.RELEASED or not self._job.live:
            return None
        known = self._job.members.get(hello.rank)
        another = known is None or (known.hello.nonce != hello.nonce and not self._job.takes_seat(hello))
        newcomer = not hello.incarnation and another
        relaunched = rules.starts_incarnation(self._job, hello)
        if not (newcomer or relaunched):
            return None
        incident.overtaken |= relaunched
        return m.RefusalCode.BUSY, "the last incarnation of this job is still being saved; try again in a moment"

    def _abdicate(self, now: float) -> None:
        """Forget the job: another controller has led it meanwhile, so the state of this controller is out of date."""
        self._outbox.record("abdicated", term=self._job.term)
        self._rescue.close()
        for connection in sorted(self._job.by_connection):
            self._outbox.send(connection, m.Refused(Rank(-1), m.RefusalCode.MOVED, "another controller leads this job"))
        self._job.abdicate()
        self._end.heard(now)
        self._parts.forget_incarnation()
        self._end.finished_at = None

    def _new_incarnation(self, hello: m.Hello, now: float) -> None:
        self._rescue.close()
        for rank in sorted(self._job.live):
            text = f"rank {hello.rank}, pid {hello.pid} on {hello.host}, has begun a new incarnation of the job"
            self._outbox.send_to(rank, m.Refused(rank, m.RefusalCode.FENCED, text))
        same_job = hello.run_id == self._job.run_id and hello.save_dir in self._job.places
        if not same_job:
            self._job.places = set()
        committing = self._rescue.committing
        self._parts.restoring.expect(committing.held or committing.last, same_job=same_job)
        self._job.start_incarnation(hello)
        self._parts.forget_incarnation()
        self._end.finished_at = None
        self._parts.hangs.reset(now, same_job=same_job)
        if not hello.resume:
            self._rescue.verdict.launch_begins(same_job=same_job)
        committing.start_launch(hello.base_version)
        self._outbox.record(
            "incarnation",
            incarnation=self._job.incarnation,
            run_id=hello.run_id,
            world_size=hello.world_size,
            save_dir=hello.save_dir,
            resumed=hello.resume,
            groups={
                shard: compact_ranks(ranks) for shard, ranks in self._job.layouts[hello.layout_digest].groups.items()
            },
        )
