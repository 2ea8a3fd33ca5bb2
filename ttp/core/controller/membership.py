"""Keeps the ranks of the job's current incarnation, and whether each of them is connected."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.layout import Layout, Rank, Version, describe, difference

Refusal = tuple[m.RefusalCode, str]

LAYOUTS_MAX = 4
"""Most layouts that are kept: that of the job, and the last few that ranks announced."""


@dataclass(slots=True)
class Member:
    """One rank of the current incarnation, as far as the controller knows it."""

    hello: m.Hello
    connection: ConnectionId | None
    version: Version
    phase: m.Phase
    last_seen: float
    lost_at: float | None = None
    mark: int = 0
    activity: str = ""
    broken: str = ""  # confirmed reason for which it cannot train on; empty: none
    fenced: bool = False  # given up: refused if it comes back
    done: bool = False
    left: bool = False  # said goodbye for good
    seat: str = ""  # whether its launcher can start it alone; see ``Accused.seat``
    seated: bool = False  # whether it is a new process in the place of a lost one

    @property
    def name(self) -> str:
        """Rank, host and process in words, for messages."""
        return f"rank {self.hello.rank} on {self.hello.host} (pid {self.hello.pid})"


@dataclass(slots=True)
class Guest:
    """A new process that waits to replace a rank that still lives, and the reports of its program."""

    connection: ConnectionId
    hello: m.Hello
    said: dict[type[m.ProgramReport], m.ProgramReport] = field(default_factory=dict)
    """The last report of each kind. The program repeats all of its reports once the process has replaced the rank."""


@dataclass(slots=True)
class Membership:
    """The ranks of the current incarnation. Everything that is needed for each event takes constant time."""

    term: int = 1
    """The term of this controller; raised above that of every other controller that a rank has seen."""
    incarnation: int = 0
    run_id: str = ""
    layout: Layout | None = None
    layouts: OrderedDict[str, Layout] = field(default_factory=OrderedDict)
    """Layouts by digest: that of the job, and the last few that ranks announced; see ``layout_exchange``."""
    members: dict[Rank, Member] = field(default_factory=dict)
    live: set[Rank] = field(default_factory=set)
    """Connected ranks."""
    suspects: OrderedDict[Rank, float] = field(default_factory=OrderedDict)
    """Lost ranks that may come back within the grace, and the start of that grace, the earliest first."""
    suspects_on: Counter[str] = field(default_factory=Counter)
    """Number of suspects on each host."""
    silent: set[Rank] = field(default_factory=set)
    """Connected ranks whose host is in doubt; see ``silence``."""
    broken: set[Rank] = field(default_factory=set)
    """Ranks that are known to be unable to train on."""
    done: set[Rank] = field(default_factory=set)
    formed: bool = False
    """True if all ranks have joined, or one has made an update, which needs all ranks: the others are unprotected.

    Before that the job has not trained: ranks may join, leave and be replaced.
    """
    ended: bool = True
    """True if this incarnation is over or there was none yet: the next one may start."""
    by_connection: dict[ConnectionId, set[Rank]] = field(default_factory=dict)
    gone: dict[Rank, int] = field(default_factory=dict)
    """Ranks that have left a job that is not formed yet, and the launch number of each."""
    seats: set[Rank] = field(default_factory=set)
    """Dead ranks that new processes may replace in this incarnation, while the other ranks go on."""
    moving: set[Rank] = field(default_factory=set)
    """Living ranks that are to be replaced: their new processes are admitted as guests."""
    guests: dict[Rank, Guest] = field(default_factory=dict)
    exited: dict[Rank, str] = field(default_factory=dict)
    """How missing ranks ended, as their launchers have told a controller that takes over."""
    gather_until: float | None = None
    """Time until which missing ranks may say hello to a controller that takes over; None: it waits for none."""

    places: set[str] = field(default_factory=set)
    """The directory that the job saves to, as the ranks of any launch name it: each host may have its own name."""
    home: str = ""
    at_home: Rank = Rank(-1)  # noqa: RUF009 - a number, which all instances may share
    """A rank of ``home``, which is the host of this controller; -1: there is none yet."""

    @property
    def save_dir(self) -> str:
        """The directory that the job saves to, as ranks of the controller's host name it if there are any."""
        member = self.members.get(self.at_home) or next(iter(self.members.values()), None)
        return member.hello.save_dir if member is not None else ""

    @property
    def complete(self) -> bool:
        """True if all ranks of the layout have said hello."""
        return self.layout is not None and len(self.members) == self.layout.world_size

    @property
    def in_doubt(self) -> bool:
        """True if it is unknown of some rank whether it lives."""
        return bool(self.suspects or self.silent)

    @property
    def training(self) -> bool:
        """True if the job trains and no rank that may still say hello is awaited."""
        return self.complete or (self.formed and self.gather_until is None)

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify this job, and the newest version of any rank, for records."""
        size = 0 if self.layout is None else self.layout.world_size
        newest = max((member.version for member in self.members.values()), default=0)
        told = {"run_id": self.run_id, "incarnation": self.incarnation, "term": self.term}
        return {**told, "world_size": size, "save_dir": self.save_dir, "newest": newest}

    # ------------------------------------------------------------------------------------------------------- changes

    def abdicate(self) -> None:
        """Forget the job, because another controller has led it meanwhile."""
        self.layout, self.run_id, self.places = None, "", set()
        self._forget_ranks()
        self.ended = True

    def _forget_ranks(self) -> None:
        self.members, self.by_connection, self.gone = {}, {}, {}
        self.suspects, self.suspects_on = OrderedDict(), Counter()
        self.live, self.silent, self.broken, self.done = set(), set(), set(), set()
        self.formed, self.gather_until, self.seats = False, None, set()
        self.moving, self.guests, self.exited, self.at_home = set(), {}, {}, Rank(-1)

    def learn(self, layout: Layout) -> None:
        """Remember a layout by its digest; only the last few are kept."""
        self.layouts[layout.digest] = layout
        for digest in list(self.layouts)[:-LAYOUTS_MAX]:
            if self.layout is None or digest != self.layout.digest:
                del self.layouts[digest]

    def start_incarnation(self, hello: m.Hello) -> None:
        """Forget the old incarnation and begin the one that ``hello`` belongs to; the layout of ``hello`` is known.

        The launcher's restart count is a lower bound of the incarnation's number, so that the numbers also grow after
        the controller that counted them is gone.
        """
        self.incarnation = hello.incarnation or max(self.incarnation, hello.launch) + 1
        self.run_id = hello.run_id
        self.layout = self.layouts[hello.layout_digest]
        self._forget_ranks()
        self.ended = False

    def join(self, connection: ConnectionId, hello: m.Hello, now: float) -> Member:
        """Add or reconnect a rank."""
        known, seated = self.members.get(hello.rank), self.takes_seat(hello)
        if hello.term_seen > self.term or (known is None and hello.term_seen == self.term):
            self.term = hello.term_seen + 1  # another controller has led the rank: this one takes over
        if known is not None:
            self.detach(hello.rank)
            self._clear(hello.rank)
        member = Member(hello, connection, hello.version, hello.phase, now)
        self.members[hello.rank] = member
        self.by_connection.setdefault(connection, set()).add(hello.rank)
        self.live.add(hello.rank)
        self.places.add(hello.save_dir)
        self.at_home = hello.rank if hello.host == self.home else self.at_home
        if seated:
            self.seats.discard(hello.rank)
            self.broken.discard(hello.rank)
        member.seated = seated or (known is not None and known.seated)
        reason = known.broken if known is not None and known.broken and not seated else hello.broken
        if reason:
            self.mark_failed(hello.rank, reason)
        if hello.phase is m.Phase.DONE:
            self.mark_done(hello.rank)
        self.formed = self.formed or hello.resume or self.complete
        return member

    def detach(self, rank: Rank) -> None:
        """Note that a rank is disconnected."""
        member = self.members[rank]
        if member.connection is not None:
            ranks = self.by_connection.get(member.connection, set())
            ranks.discard(rank)
            if not ranks:
                self.by_connection.pop(member.connection, None)
        member.connection = None
        self.live.discard(rank)
        self.silent.discard(rank)

    def forget(self, rank: Rank) -> None:
        """Forget a rank that left a job that is not formed yet: it or another process of this rank may join later."""
        self.detach(rank)
        self.gone[rank] = self.members.pop(rank).hello.launch
        self.broken.discard(rank)
        self.done.discard(rank)

    def lose(self, rank: Rank, now: float) -> None:
        """Note that a rank vanished without a goodbye: it is a suspect until the grace is over.

        Its grace ends no earlier than those of earlier suspects, which may have more time: the streams of a host that
        is cut off end one after the other.
        """
        self.detach(rank)
        member = self.members[rank]
        member.lost_at = now if member.lost_at is None else member.lost_at
        if not (member.fenced or member.left) and rank not in self.suspects:
            self.suspects[rank] = max(now, next(reversed(self.suspects.values()), now))
            self.suspects_on[member.hello.host] += 1

    def wait_longer(self, rank: Rank, since: float) -> None:
        """Let the grace of a suspect begin at ``since``, which has to be later than that of every other suspect."""
        if rank in self.suspects:
            self.suspects[rank] = since
            self.suspects.move_to_end(rank)

    def _clear(self, rank: Rank) -> None:
        if self.suspects.pop(rank, None) is not None:
            self.suspects_on[self.members[rank].hello.host] -= 1

    def hosts(self) -> dict[str, list[Rank]]:
        """Return the ranks by host, both in ascending order."""
        found: dict[str, list[Rank]] = {}
        for rank in sorted(self.members):
            found.setdefault(self.members[rank].hello.host, []).append(rank)
        return dict(sorted(found.items()))

    def mark_failed(self, rank: Rank, reason: str) -> None:
        """Note that a rank cannot train on, whether it is connected or not."""
        member = self.members[rank]
        member.broken = member.broken or reason
        self.broken.add(rank)

    def fence(self, rank: Rank, reason: str) -> None:
        """Declare a rank dead for this incarnation: its state is no longer used, and it is refused if it comes back."""
        self.mark_failed(rank, reason)
        self.members[rank].fenced = True
        self._clear(rank)

    def mark_done(self, rank: Rank) -> None:
        """Note that a rank's training loop has returned."""
        member = self.members[rank]
        member.done, member.phase = True, m.Phase.DONE
        self.done.add(rank)

    # ----------------------------------------------------------------------------------------------------- admission

    def starts_incarnation(self, hello: m.Hello) -> bool:
        """Return whether a process begins the next incarnation: the last one is over, or the launcher has restarted.

        A job that is not formed yet stays the same incarnation: a process that died early is just replaced.

        Restart counts of different nodes are not comparable (torchelastic does not count membership restarts), so only
        counts of the same rank are compared.
        """
        if self.layout is None:
            return True
        if self.takes_seat(hello):
            return False
        if hello.incarnation:
            newer = hello.incarnation > self.incarnation and not self._outlives(hello)
            return newer and (not self.live or hello.run_id == self.run_id)
        taken = self.members.get(hello.rank)
        if taken is not None and taken.hello.nonce == hello.nonce:
            return False
        if not (self.formed or self.ended):
            another = (hello.run_id, hello.layout_digest) != (self.run_id, self.layout.digest)
            return not self.live and (another or hello.launch > self.gone.get(hello.rank, hello.launch))
        relaunched = taken is not None and hello.run_id == self.run_id and hello.launch > taken.hello.launch
        return self.ended or not self.live or relaunched

    def takes_seat(self, hello: m.Hello) -> bool:
        """Return whether ``hello`` is from a new process that may replace a dead rank in this incarnation."""
        known = self.members.get(hello.rank) if hello.rank in self.seats else None
        return known is not None and known.hello.nonce != hello.nonce and not hello.incarnation

    def is_guest(self, hello: m.Hello) -> bool:
        """Return whether ``hello`` is from a new process on another host that is to replace a living rank."""
        known = self.members.get(hello.rank) if hello.rank in self.moving - self.seats else None
        if known is None or known.hello.nonce == hello.nonce or known.hello.host == hello.host or hello.incarnation:
            return False
        return not (self.malformed(hello) or self._stranger(hello) or self.mismatch(hello))

    def guests_on(self, connection: ConnectionId) -> list[Rank]:
        """Return the ranks that guests on this stream wait to replace."""
        return [rank for rank, guest in self.guests.items() if guest.connection == connection]

    def may_have_moved(self, hello: m.Hello) -> bool:
        """Return whether ``hello``, from a rank that another controller led, may show that this job is led elsewhere.

        A stray rank of another job or incarnation does not show that for a job with live ranks here. A rank that comes
        to a job that is still forming just joins it. So does one that was cut off from this controller, and went round
        the others, while most ranks stayed here.
        """
        if self.layout is None or self.malformed(hello) is not None:
            return False
        if not self.formed:
            return False  # no state here can be out of date
        if self._outlives(hello) or 2 * len(self.live - {hello.rank}) > self.layout.world_size:
            return False
        return not self.live or (hello.run_id, hello.incarnation) == (self.run_id, self.incarnation)

    def _outlives(self, hello: m.Hello) -> bool:
        """Return whether every rank is connected, and ``hello`` is from none of their processes.

        Then it is from a process that was left of another launch, whatever the number of its incarnation: if a job is
        started anew, a new controller counts from 1 again.
        """
        if self.layout is None or len(self.live) < self.layout.world_size:
            return False
        known = self.members.get(hello.rank)
        return known is None or known.hello.nonce != hello.nonce

    def refusal(self, hello: m.Hello) -> Refusal | None:
        """Return why ``hello`` cannot be admitted, in words for the operator; ``None`` if it can.

        An unknown layout is no reason.
        """
        malformed = self.malformed(hello)
        if malformed is not None or self.starts_incarnation(hello):
            return malformed
        return self._stranger(hello) or self._rank_taken(hello) or self.mismatch(hello)

    def malformed(self, hello: m.Hello) -> Refusal | None:
        """Return why ``hello`` is invalid for any job; ``None`` if it is valid."""
        if hello.protocol_major != m.PROTOCOL_MAJOR:
            return m.RefusalCode.PROTOCOL, (
                f"this controller speaks protocol {m.PROTOCOL_MAJOR}.{m.PROTOCOL_MINOR}, rank {hello.rank} speaks "
                f"{hello.protocol_major}.{hello.protocol_minor} (ttp {hello.ttp_version}): "
                "install the same ttp on every host"
            )
        if not 0 <= hello.rank < hello.world_size:
            return m.RefusalCode.MALFORMED, f"rank {hello.rank} is not in a world of {hello.world_size}"
        known = self.layouts.get(hello.layout_digest)
        if known is not None and known.world_size != hello.world_size:
            return m.RefusalCode.MALFORMED, f"rank {hello.rank}: layout and digest do not match"
        return None

    def _stranger(self, hello: m.Hello) -> Refusal | None:
        if hello.incarnation and hello.incarnation < self.incarnation:
            return m.RefusalCode.FENCED, (
                f"rank {hello.rank} belongs to incarnation {hello.incarnation} of the job, which was given up; "
                f"incarnation {self.incarnation} is running"
            )
        if hello.run_id != self.run_id:
            return m.RefusalCode.OTHER_JOB, (
                f"this controller serves job {self.run_id!r}, not {hello.run_id!r}: two jobs share TTP_PORT; "
                "give each job a port of its own"
            )
        return None

    def _rank_taken(self, hello: m.Hello) -> Refusal | None:
        taken = self.members.get(hello.rank)
        if taken is None or self.takes_seat(hello):
            return None
        if taken.hello.nonce != hello.nonce:
            if not self.formed and hello.launch > taken.hello.launch:
                return None
            if hello.rank in self.live or taken.done:
                return m.RefusalCode.RANK_TAKEN, (
                    f"rank {hello.rank} is already held by pid {taken.hello.pid} on {taken.hello.host}: either two "
                    "jobs share TTP_PORT, or two processes were given the same RANK"
                )
            return m.RefusalCode.FENCED, (
                f"rank {hello.rank} was lost; a new process joins with the restarted job, not this one"
            )
        if taken.fenced:
            return (
                m.RefusalCode.FENCED,
                f"rank {hello.rank} was given up ({taken.broken}); its state is not used any more",
            )
        return None

    def mismatch(self, hello: m.Hello) -> Refusal | None:
        """Return in what ``hello`` differs from the job's layout; ``None`` if it does not, as far as that is known."""
        assert self.layout is not None
        if hello.world_size != self.layout.world_size:
            return m.RefusalCode.MISMATCH, (
                f"rank {hello.rank} has WORLD_SIZE={hello.world_size}, the others have {self.layout.world_size}"
            )
        theirs = self.layouts.get(hello.layout_digest)
        if theirs is not None and theirs.digest != self.layout.digest:
            return m.RefusalCode.MISMATCH, (
                f"rank {hello.rank} announces another layout than the others: {describe(theirs)} against "
                f"{describe(self.layout)}: {difference(theirs, self.layout)}. "
                "Every rank must wrap the same model in the same way"
            )
        return None
