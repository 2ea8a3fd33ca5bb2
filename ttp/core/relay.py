"""A relay: one stream to a controller for all ranks of a host, each of which has a *line* in it.

For the rank and for the controller a line is like a separate stream. It opens with the rank's first report, carries
reports up and orders down, in order, and ends by itself or with the stream that carries it. A rank that connects again
gets a new line. So every rule of the controller about streams also holds for lines.

The relay reduces the number of messages as follows, without delaying evidence:

* Heartbeats: once per ``heartbeat_s`` one frame stands for all lines that sent a heartbeat lately. It carries only the
  heartbeats that changed, and lists the silent lines. A heartbeat whose activity changed, or whose phase became or was
  ``DONE``, is sent at once. The frames of many hosts leave at the same ``SLOTS`` moments of a period, so that the
  controller wakes for a group of them, and never for all at once.
* Answers to a freeze go up together when all frozen lines have answered, or after ``HOLD_S``.
* Every other report, evidence above all, goes up at once, together with the reports that wait.
* A message that is the same for several ranks is sent once, for all their lines: heartbeats and answers up, orders
  down. Its rank is ``SEVERAL``; the rank of a line is that of the report which opened it.

``Relay`` is the end near the ranks, ``RelayEnd`` is the end in the controller, and ``folded`` joins equal messages in
both directions. No I/O, no clock, no threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NewType, Protocol, TypeVar

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, ReceivedAlike
from ttp.core.layout import Rank

LineId = NewType("LineId", int)

HOLD_S = 0.002
"""Seconds that the first answers to a freeze wait for the answers of the other ranks of the host."""
FRESH = 1.5
"""Heartbeat periods after which a line counts as silent; more than 1, as heartbeats and frames drift in time."""
SLOTS = 50
"""Moments of a heartbeat's period at which frames leave: of a thousand hosts twenty then send at the same moment."""
ALIKE = (m.Heartbeat, m.Frozen)
"""Reports that are often equal on all ranks."""

Word = TypeVar("Word", m.Report, m.Order)
Lines = tuple[LineId, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of one message from a relay to the controller.

    Args:
        reports: reports with the lines that sent them; ``None``: these lines have ended. The reports of each line are
            in order.
        beat: the last heartbeat of every line counts as repeated, except for the lines in ``silent``.
        silent: lines without a heartbeat for ``FRESH`` periods.
    """

    reports: tuple[tuple[Lines, m.Report | None], ...]
    beat: bool = False
    silent: tuple[LineId, ...] = ()


@dataclass(slots=True)
class _Line:
    """The relay's state of one line."""

    rank: Rank
    beat: m.Heartbeat | None = None
    """The last heartbeat from the rank."""
    told: m.Heartbeat | None = None
    """The last heartbeat that was sent up."""
    beaten_at: float = 0.0


class Relay:
    """The end of a relay near its ranks, for one controller.

    Args:
        heartbeat_s: seconds between two frames with ``beat``; equal to a rank's heartbeat period.
        ahead_s: such a frame leaves when ``now + ahead_s`` is a multiple of ``heartbeat_s``; see ``slot_s``.
    """

    def __init__(self, heartbeat_s: float, ahead_s: float = 0.0) -> None:
        self._heartbeat_s, self._ahead_s = heartbeat_s, ahead_s
        self._lines: dict[LineId, _Line] = {}
        self._waiting: list[tuple[LineId, m.Report | None]] = []
        self._asked: set[LineId] = set()
        self._send_at: float | None = None
        self._beat_at: float | None = None

    def reported(self, line: LineId, report: m.Report, now: float) -> None:
        """Take a rank's report; the first report opens its line."""
        known = self._lines.setdefault(line, _Line(report.rank))
        if isinstance(report, ALIKE) and report.rank == known.rank:
            report = replace(report, rank=m.SEVERAL)
        if isinstance(report, m.Heartbeat):
            self._beaten(line, known, report, now)
            return
        if known.beat != known.told:
            self._tell(line, known)  # a line's reports stay in order
        self._waiting.append((line, report))
        self._asked.discard(line)
        held = isinstance(report, m.Frozen) and bool(self._asked)
        self._due(now + HOLD_S if held else now)

    def ended(self, line: LineId, now: float) -> None:
        """Take the end of a rank's stream."""
        if self._lines.pop(line, None) is not None:
            self._waiting.append((line, None))
            self._asked.discard(line)
            self._due(now)

    def closed(self, line: LineId) -> None:
        """Drop a line that the controller has ended, with its reports that wait."""
        self._lines.pop(line, None)
        self._asked.discard(line)
        self._waiting = [(of, report) for of, report in self._waiting if of != line]

    def told(self, lines: Iterable[LineId], order: m.Order) -> None:
        """Note an order that was sent to these lines: after a ``Freeze`` their answers wait for each other."""
        if isinstance(order, m.Freeze):
            self._asked.update(line for line in lines if line in self._lines)

    def deadline(self) -> float | None:
        """Return the time by which ``take`` should be called; None: no report or heartbeat waits."""
        due = [at for at in (self._send_at, self._beat_at) if at is not None]
        return min(due, default=None)

    def take(self, now: float) -> Frame | None:
        """Return the frame to send to the controller now; ``None`` if none is due yet."""
        beat = self._beat_at is not None and now >= self._beat_at
        if not beat and (self._send_at is None or now < self._send_at):
            return None
        silent: tuple[LineId, ...] = ()
        if beat:
            silent = tuple(self._tell_beats(now))
            beating = any(line.told is not None for line in self._lines.values())
            self._beat_at = self._next_beat(now) if beating else None
        reports, self._waiting, self._send_at = folded(self._waiting), [], None
        return Frame(tuple(reports), beat, silent)

    def _tell_beats(self, now: float) -> Iterator[LineId]:
        for id, line in self._lines.items():
            if line.beat is None:
                continue
            if line.beat != line.told:
                self._tell(id, line)
            elif now - line.beaten_at > FRESH * self._heartbeat_s:
                yield id

    def _beaten(self, id: LineId, line: _Line, beat: m.Heartbeat, now: float) -> None:
        last, line.beat, line.beaten_at = line.told, beat, now
        if last is None or (last.activity, last.phase is m.Phase.DONE) != (beat.activity, beat.phase is m.Phase.DONE):
            self._tell(id, line)
            self._due(now)
        if self._beat_at is None:
            self._beat_at = self._next_beat(now)

    def _next_beat(self, now: float) -> float:
        period_s = self._heartbeat_s
        wait_s = period_s - (now + self._ahead_s) % period_s
        return now + (wait_s if wait_s > period_s / 10 else wait_s + period_s)

    def _tell(self, id: LineId, line: _Line) -> None:
        assert line.beat is not None
        self._waiting.append((id, line.beat))
        line.told = line.beat

    def _due(self, at: float) -> None:
        self._send_at = at if self._send_at is None else min(self._send_at, at)


def slot_s(host: str, heartbeat_s: float) -> float:
    """Return the moment at which the ``beat`` frames of a host leave, spread over ``SLOTS`` by the host's name.

    The moment is given in seconds before each multiple of ``heartbeat_s`` of the wall clock.
    """
    number = int.from_bytes(hashlib.sha256(host.encode()).digest()[:4], "big")
    return number % SLOTS * heartbeat_s / SLOTS


class Unfolded:
    """Turns frames into the reports that separate streams would have carried."""

    def __init__(self) -> None:
        self._beats: dict[LineId, m.Heartbeat] = {}

    def reports(self, frame: Frame) -> Iterator[tuple[Lines, m.Report | None]]:
        """Yield reports with the lines that sent them; ``None`` where lines end."""
        fresh = set(frame.silent)
        for lines, report in frame.reports:
            if isinstance(report, m.Heartbeat):
                self._beats.update(dict.fromkeys(lines, report))
                fresh.update(lines)
            elif report is None:
                for line in lines:
                    self._beats.pop(line, None)
            yield lines, report
        if frame.beat:
            yield from folded((line, beat) for line, beat in self._beats.items() if line not in fresh)

    def closed(self, line: LineId) -> None:
        """Forget a line that the controller has ended."""
        self._beats.pop(line, None)


class Line(Protocol):
    """A line as the controller uses it, like the stream of a rank. ``closing``: the controller has ended it."""

    id: ConnectionId
    line: LineId
    rank: Rank
    closing: bool


AnyLine = TypeVar("AnyLine", bound=Line)


class RelayEnd(Generic[AnyLine]):
    """The controller's end of a relay's stream: the lines in it, and the events that they cause.

    Args:
        make: makes a line that a rank has opened.
        ended: is called with each line that has ended.
    """

    def __init__(self, make: Callable[[LineId, Rank], AnyLine], ended: Callable[[AnyLine], None]) -> None:
        self.lines: dict[LineId, AnyLine] = {}
        self._make, self._ended = make, ended
        self._unfolded = Unfolded()

    def events(self, frame: Frame) -> Iterator[Received | ReceivedAlike]:
        """Yield the events of a frame. What an event causes counts for the next one."""
        for numbers, report in self._unfolded.reports(frame):
            if isinstance(report, m.Hello):
                for number in numbers:
                    self.open(number, report.rank)
            known = [self.lines[number] for number in numbers if number in self.lines]  # others have been ended already
            if report is None:
                for line in known:
                    self.over(line)
                continue
            who = tuple((line.id, line.rank) for line in known if not line.closing)
            if isinstance(report, ALIKE) and report.rank == m.SEVERAL:
                yield ReceivedAlike(who, report)
            else:
                yield from (Received(connection, report) for connection, _ in who)

    def open(self, number: LineId, rank: Rank) -> AnyLine:
        """Return the line with this number; a new one if there is none."""
        if number not in self.lines:
            self.lines[number] = self._make(number, rank)
        return self.lines[number]

    def over(self, line: AnyLine) -> None:
        """End a line, if it has not ended. Another line may have its number by then."""
        if self.lines.get(line.line) is line:
            del self.lines[line.line]
            line.closing = True
            self._unfolded.closed(line.line)
            self._ended(line)

    def close(self) -> None:
        """End all lines, because the stream has ended."""
        for line in list(self.lines.values()):
            self.over(line)


def folded(said: Iterable[tuple[LineId, Word | None]]) -> list[tuple[Lines, Word | None]]:
    """Join equal messages from, or to, several lines; ``None`` ends a line.

    The messages of each line stay in order. Messages of different lines may change places, as on separate streams.
    """
    together: list[tuple[list[LineId], Word | None]] = []
    alike: dict[Word, int] = {}
    last: dict[LineId, int] = {}
    for line, word in said:
        for_all = word is not None and word.rank == m.SEVERAL
        at = alike.get(word, -1) if for_all else -1  # type: ignore[arg-type]
        if at > last.get(line, -1):
            together[at][0].append(line)
        else:
            at = len(together)
            together.append(([line], word))
            if for_all:
                alike[word] = at  # type: ignore[index]
        last[line] = at
    return [(tuple(lines), word) for lines, word in together]
