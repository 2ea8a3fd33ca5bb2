"""Gets the layouts that ranks announce by digest: asks one of the ranks for a layout, and takes it in parts.

Theory of operation
-------------------
A rank says hello with the digest of its layout. An unknown digest opens an *inquiry*: the controller asks one of the
ranks that announced the digest for the layout, and all of these ranks wait. If the asked rank is lost or takes too
long, the next one is asked. Every rank that was asked may answer, so a slow answer still counts. Parts are put together
per rank, so a rank that sends nonsense spoils only its own answer. Once the layout is known, the waiting hellos are
handled in the order in which they came.

The controller keeps one copy of each layout, and only a few layouts. Should every rank announce a different layout, it
asks for a few of them at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ttp.core import layout_messages as lm
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import WORLD_SIZE_MAX, Layout, Rank, Shard
from ttp.errors import ConfigError

PARTS_MAX = 1024
RANKS_MAX = 1 << 24
"""Most members of all groups of a layout together: enough for 10^5 ranks that are in a hundred groups each."""
ANSWER_S = 1.0
"""Seconds that a rank may take for the next part before another rank is asked; doubled with each rank asked."""
PATIENCE_DOUBLED_MAX = 4
TELLERS_MAX = 4
"""Most ranks per layout whose parts are kept."""
INQUIRIES_MAX = 4
"""Most layouts that are asked for at one time."""

Speaker = tuple[ConnectionId, Rank]


@dataclass(slots=True)
class _Telling:
    """The parts of a layout that one rank has sent so far."""

    count: int = 0
    parts: dict[int, tuple[lm.ShardGroup, ...]] = field(default_factory=dict)
    groups: int = 0
    ranks: int = 0

    def add(self, part: lm.LayoutPart) -> str:
        """Add a part, which may come twice. Return what is wrong with it; empty if it is correct."""
        if not 0 <= part.index < part.count <= PARTS_MAX or (self.count and part.count != self.count):
            return f"part {part.index} of {part.count} is not a valid part of a layout"
        if part.index not in self.parts:
            self.count = part.count
            self.parts[part.index] = part.groups
            self.groups += max(1, len(part.groups))  # an empty part takes memory too
            self.ranks += sum(len(group.ranks) for group in part.groups)
        if self.groups > WORLD_SIZE_MAX or self.ranks > RANKS_MAX:
            return f"more than {WORLD_SIZE_MAX} shards, or more than {RANKS_MAX} ranks in all shards together"
        return ""

    @property
    def whole(self) -> bool:
        return len(self.parts) == self.count

    def layout(self, world_size: int) -> Layout | str:
        """Return the layout, or the reason for which the parts are not a layout, in words."""
        groups: dict[Shard, list[tuple[Rank, ...]]] = {}
        for index in range(self.count):
            for number, group in enumerate(self.parts[index]):
                if group.name in groups and (number or next(reversed(groups)) != group.name):
                    return f"shard {group.name!r} is listed twice"
                groups.setdefault(group.name, []).append(group.ranks)
        try:
            return Layout(world_size, {name: tuple(r for run in runs for r in run) for name, runs in groups.items()})
        except ConfigError as problem:
            return str(problem)


@dataclass(slots=True)
class _Inquiry:
    """The ranks that wait for one layout, and the ranks that were asked for it, the latest last."""

    waiting: OrderedDict[Speaker, m.Hello] = field(default_factory=OrderedDict)
    asked: OrderedDict[Speaker, _Telling] = field(default_factory=OrderedDict)
    turn: list[Speaker] = field(default_factory=list)
    """Ranks still to be asked in this round, in reverse order."""
    times: int = 0
    due: float = 0.0

    def next(self) -> Speaker:
        """Return the rank to ask next. Called only while some rank waits."""
        while True:
            if not self.turn:
                new = [speaker for speaker in self.waiting if speaker not in self.asked]
                self.turn = list(reversed(new or self.waiting))
            if (speaker := self.turn.pop()) in self.waiting:
                return speaker


class Layouts:
    """Asks ranks for the layouts that they have announced.

    Args:
        job: keeps the known layouts.
        outbox: takes the questions.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox
        self._open: OrderedDict[str, _Inquiry] = OrderedDict()
        """Open inquiries by digest; only for the first ``INQUIRIES_MAX`` of them is a rank being asked."""
        self._by_connection: dict[ConnectionId, set[tuple[str, Rank]]] = {}

    def wait(self, connection: ConnectionId, hello: m.Hello, now: float) -> None:
        """Keep ``hello`` until the layout that it announces is known, and ask for that layout."""
        digest = hello.layout_digest
        inquiry = self._open.setdefault(digest, _Inquiry())
        inquiry.waiting[connection, hello.rank] = hello
        self._by_connection.setdefault(connection, set()).add((digest, hello.rank))
        if not inquiry.asked and digest in self._current():
            self._ask(digest, now)

    def told(self, connection: ConnectionId, part: lm.LayoutPart, now: float) -> list[tuple[ConnectionId, m.Hello]]:
        """Take a part of a layout. Return the hellos that can be handled now; empty if the layout is still unknown.

        A rank that sends an impossible part or layout is refused here.
        """
        speaker, inquiry = (connection, part.rank), self._open.get(part.digest)
        telling = inquiry.asked.get(speaker) if inquiry is not None else None
        if inquiry is None or telling is None or speaker not in inquiry.waiting:
            return []  # late: the layout is known by now, or another rank was asked
        problem = telling.add(part)
        if not problem and not telling.whole:
            inquiry.due = now + self._patience_s(inquiry)
            return []
        layout = problem or telling.layout(inquiry.waiting[speaker].world_size)
        if isinstance(layout, str):
            self._refuse(speaker, part.digest, f"announces an impossible layout: {layout}", now)
        elif layout.digest != part.digest:
            self._refuse(speaker, part.digest, "layout and digest do not match", now)
        else:
            self._job.learn(layout)
            return self._close(part.digest, now)
        return []

    def ended(self, connection: ConnectionId, now: float) -> None:
        """Forget the waiting ranks of a stream that has ended, and ask others in their place."""
        for digest, rank in sorted(self._by_connection.get(connection, ())):
            self._drop(digest, (connection, rank), now)

    def expire(self, now: float) -> None:
        """Ask the next rank for each layout whose answer takes too long."""
        for digest in self._current():
            if now >= self._open[digest].due:
                if len(self._open) > INQUIRIES_MAX:
                    self._open.move_to_end(digest)  # other inquiries get their turn
                    self._open[digest].asked.clear()
                    self._start(now)
                else:
                    self._ask(digest, now)

    def deadlines(self) -> Iterator[float]:
        """Return the times at which ``expire`` has to be called."""
        return (self._open[digest].due for digest in self._current())

    def _current(self) -> list[str]:
        return [digest for digest, _ in zip(self._open, range(INQUIRIES_MAX), strict=False)]

    def _start(self, now: float) -> None:
        for digest in self._current():
            if not self._open[digest].asked:
                self._ask(digest, now)

    def _ask(self, digest: str, now: float) -> None:
        """Ask the next rank for a layout; begin again with the first rank when all were asked."""
        inquiry = self._open[digest]
        speaker = inquiry.next()
        inquiry.asked.setdefault(speaker, _Telling())
        inquiry.asked.move_to_end(speaker)
        while len(inquiry.asked) > TELLERS_MAX:
            inquiry.asked.popitem(last=False)
        inquiry.due = now + self._patience_s(inquiry)
        inquiry.times += 1
        connection, rank = speaker
        self._outbox.send(connection, lm.TellLayout(rank, digest))

    @staticmethod
    def _patience_s(inquiry: _Inquiry) -> float:
        return ANSWER_S * (1 << min(inquiry.times, PATIENCE_DOUBLED_MAX))

    def _refuse(self, speaker: Speaker, digest: str, why: str, now: float) -> None:
        connection, rank = speaker
        hello = self._open[digest].waiting[speaker]
        text = f"rank {rank}: {why}" if why.startswith("layout") else f"rank {rank} {why}"
        self._outbox.refuse(connection, hello, m.RefusalCode.MALFORMED, text)
        self._drop(digest, speaker, now)

    def _drop(self, digest: str, speaker: Speaker, now: float) -> None:
        inquiry = self._open.get(digest)
        if inquiry is None:
            return
        inquiry.waiting.pop(speaker, None)
        self._forget(digest, speaker)
        latest = next(reversed(inquiry.asked), None) == speaker
        inquiry.asked.pop(speaker, None)
        if not inquiry.waiting:
            self._close(digest, now)
        elif latest:
            self._ask(digest, now)

    def _forget(self, digest: str, speaker: Speaker) -> None:
        connection, rank = speaker
        waits = self._by_connection.get(connection, set())
        waits.discard((digest, rank))
        if not waits:
            self._by_connection.pop(connection, None)

    def _close(self, digest: str, now: float) -> list[tuple[ConnectionId, m.Hello]]:
        inquiry = self._open.pop(digest)
        for speaker in inquiry.waiting:
            self._forget(digest, speaker)
        self._start(now)
        return [(connection, hello) for (connection, _), hello in inquiry.waiting.items()]
