"""Keeps the ranks of the job's current incarnation, and whether each of them is connected."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.layout import Layout, Rank, Version, compact_ranks

LAYOUTS_MAX = 4
"""Most layouts that are kept: that of the job, and the last few that ranks announced."""


def has_trained(hello: m.Hello) -> bool:
    """Return whether the process has made an update, which needs all ranks."""
    return hello.version > hello.base_version


def is_new(hello: m.Hello) -> bool:
    """Return whether the process has made no update, and no controller has welcomed it."""
    return not (hello.incarnation or has_trained(hello))


@dataclass(slots=True)
class Member:
    """One rank of the current incarnation, as far as the controller knows it."""

    hello: m.Hello
    connection: ConnectionId | None
    version: Version
    phase: m.Phase
    last_seen: float
    mark: int = 0
    activity: str = ""
    broken: str = ""  # confirmed reason for which it cannot train on; empty: none
    fenced: bool = False  # given up: refused if it comes back
    done: bool = False
    left: bool = False  # said goodbye for good
    seat: str = ""  # whether its launcher can start it alone; see ``Accused.seat``
    seated: bool = False  # whether it is a new process in the place of a lost one
    adopted: bool = False  # whether another controller welcomed this process first

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
class Ranks:
    """The ranks of one incarnation. All of it is forgotten when the next one begins."""

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
    by_connection: dict[ConnectionId, set[Rank]] = field(default_factory=dict)
    gone: dict[Rank, Member] = field(default_factory=dict)
    """Ranks that have left a job that is not formed yet, as they were then."""
    first_on: dict[str, Rank | None] = field(default_factory=dict)
    """The first rank of a launcher on each host, by name; None: it is known that two machines have this name."""
    seats: set[Rank] = field(default_factory=set)
    """Dead ranks that new processes may replace in this incarnation, while the other ranks go on."""
    moving: set[Rank] = field(default_factory=set)
    """Living ranks that are to be replaced: their new processes are admitted as guests."""
    guests: dict[Rank, Guest] = field(default_factory=dict)
    exited: dict[Rank, str] = field(default_factory=dict)
    """How missing ranks ended, as their launchers have told a controller that takes over."""
    homes: Mapping[Rank, str] = field(default_factory=dict)
    """The hosts of the ranks, as the controller before this one has recorded them."""
    gather_until: float | None = None
    """Time until which missing ranks may say hello to a controller that takes over; None: it waits for none."""
    new_at: float | None = None
    """Time at which the last process joined that no controller had welcomed before; None: there is none yet."""
    at_home: Rank = Rank(-1)  # noqa: RUF009 - a number, which all instances may share
    """A rank of the controller's host; -1: there is none yet."""


@dataclass(slots=True)
class Membership(Ranks):
    """The job and the ranks of its current incarnation. All that is needed for each event takes constant time."""

    term: int = 1
    """The term of this controller; raised above that of every other controller that a rank has seen."""
    incarnation: int = 0
    run_id: str = ""
    layout: Layout | None = None
    layouts: OrderedDict[str, Layout] = field(default_factory=OrderedDict)
    """Layouts by digest: that of the job, and the last few that ranks announced; see ``layout_exchange``."""
    back_at: float = 0.0
    """Time at which a suspect has last come back."""
    ended: bool = True
    """True if this incarnation is over or there was none yet: the next one may start."""
    places: set[str] = field(default_factory=set)
    """The directory that the job saves to, as the ranks of any launch name it: each host may have its own name."""
    home: str = ""
    """The host of this controller."""

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
    def shared_names(self) -> list[str]:
        """The host names that two machines seem to have, in ascending order."""
        return sorted(name for name, first in self.first_on.items() if first is None)

    @property
    def all_here(self) -> bool:
        """True if all ranks of the layout have said hello, to this controller too."""
        return self.complete and self.gather_until is None

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
        none = Ranks()
        for each in fields(none):
            setattr(self, each.name, getattr(none, each.name))

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
            self.back_at = now if hello.rank in self.suspects else self.back_at
            self._clear(hello.rank)
        met = self.met(hello)
        adopted = met.adopted if met is not None else hello.incarnation > 0
        member = Member(hello, connection, hello.version, hello.phase, now, adopted=adopted)
        if not hello.incarnation:
            self.formed = self.formed and not self._begins_with_new()
            self.new_at = now
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
        in_step = hello.resume and (has_trained(hello) or self.new_at is None)
        self.formed = self.formed or in_step or self.complete
        return member

    def _begins_with_new(self) -> bool:
        """Return whether the first new process shows that the job forms: it counted as formed for ranks that came back.

        They have made no update, so nothing is lost with them, and one that leaves may be of an earlier start.
        """
        trained = (member.version > member.hello.base_version for member in self.members.values())
        return self.new_at is None and not (self.complete or any(trained))

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
        self.gone[rank] = self.members.pop(rank)
        self.broken.discard(rank)
        self.done.discard(rank)

    def met(self, hello: m.Hello) -> Member | None:
        """Return what is known of the process of ``hello``, also if it was forgotten; None: it is new here."""
        known = self.members.get(hello.rank) or self.gone.get(hello.rank)
        return known if known is not None and known.hello.nonce == hello.nonce else None

    def missed(self, launch: int) -> list[Member]:
        """Return the ranks that left before the job was formed, without a goodbye, and did not come back.

        One of an older launch than ``launch`` is none of them, because its next process may still come.
        """
        gone = (member for rank, member in sorted(self.gone.items()) if rank not in self.members)
        return [member for member in gone if not member.done and member.hello.launch >= launch]

    def lose(self, rank: Rank, now: float) -> None:
        """Note that a rank vanished without a goodbye: it is a suspect until the grace is over.

        Its grace ends no earlier than those of earlier suspects, which may have more time: the streams of a host that
        is cut off end one after the other.
        """
        self.detach(rank)
        member = self.members[rank]
        if not (member.fenced or member.left) and rank not in self.suspects:
            self.suspects[rank] = max(now, next(reversed(self.suspects.values()), now))
            self.suspects_on[member.hello.host] += 1

    def wait_longer(self, rank: Rank, since: float) -> None:
        """Let the grace of a suspect begin at ``since``, and put it last: suspects are in the order of these times."""
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

    def hosts_told(self) -> dict[str, str]:
        """Return the ranks of each host in a short text, for records."""
        return {host: compact_ranks(ranks) for host, ranks in self.hosts().items()}

    def host_of(self, rank: Rank) -> str:
        """Return the host of a rank, also of one that only an earlier controller has met; empty if it is unknown."""
        return self.members[rank].hello.host if rank in self.members else self.homes.get(rank, "")

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

    def takes_seat(self, hello: m.Hello) -> bool:
        """Return whether ``hello`` is from a new process that may replace a dead rank in this incarnation."""
        known = self.members.get(hello.rank) if hello.rank in self.seats else None
        return known is not None and known.hello.nonce != hello.nonce and not hello.incarnation

    def has_later(self, connection: ConnectionId, rank: Rank) -> bool:
        """Return whether a rank has opened another stream since this one: what comes on this one is late."""
        known = self.members.get(rank)
        return known is not None and known.connection is not None and connection < known.connection
