"""A relay: one stream to a controller for the ranks of a host, each of which has a *line* in it.

A line is what a stream of its own would be to a rank and to the controller. It opens with what the rank says first,
carries reports up and orders down in their order, and ends for itself or with the stream that carries it. A rank that
opens another one gets another line. So everything that the controller decides about streams holds for lines too.

What a relay saves, and what it must not cost:

* Heartbeats. Once per ``heartbeat_s`` one frame stands for all lines of which a beat came lately. It carries the beats
  that say something new and names the lines that have fallen silent. A beat that tells of another activity or phase
  goes up at once, as a rank says it at once.
* Answers to a freeze go up together when all lines that were asked have answered, or after ``HOLD_S``.
* Everything else, evidence above all, goes up at once, and takes along what waits.
* An order that is the same for several ranks comes down once, for all their lines.

``Relay`` is the end near the ranks, ``Unfolded`` the one in the controller, ``folded`` and ``ordered`` are the way
down. No I/O, no clock, no threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType

from ttp.core import messages as m
from ttp.core.copy_messages import Settled
from ttp.core.layout import Rank

LineId = NewType("LineId", int)

HOLD_S = 0.002
"""How long the answers of some ranks wait for those of the other ranks of their host."""
FRESH = 1.5
"""Heartbeats after which a line counts as silent: beats and frames of the same period drift against each other."""
SHARED = (m.Freeze, m.Thaw, m.Release, m.Finished, m.Standbys, Settled)
"""Orders that often are the same for all ranks."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a relay sends to the controller in one message.

    Args:
        reports: by line; ``None``: this line has ended. Those of one line are in order.
        beat: every line that has ever beaten has beaten again as it did the last time, but those in ``silent``.
        silent: no beat came of these for ``FRESH`` heartbeats.
    """

    reports: tuple[tuple[LineId, m.Report | None], ...]
    beat: bool = False
    silent: tuple[LineId, ...] = ()


@dataclass(slots=True)
class _Line:
    """One rank, as its relay sees it."""

    beat: m.Heartbeat | None = None
    """The last one that came."""
    told: m.Heartbeat | None = None
    """The last one that went up."""
    beaten_at: float = 0.0


class Relay:
    """The end of a relay near its ranks, for one controller.

    Args:
        heartbeat_s: seconds between two frames that stand for heartbeats; as between two beats of a rank.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._lines: dict[LineId, _Line] = {}
        self._waiting: list[tuple[LineId, m.Report | None]] = []
        self._asked: set[LineId] = set()
        self._send_at: float | None = None
        self._beat_at: float | None = None

    def reported(self, line: LineId, report: m.Report, now: float) -> None:
        """A rank said something; the first report opens its line."""
        known = self._lines.setdefault(line, _Line())
        if isinstance(report, m.Heartbeat):
            self._beaten(line, known, report, now)
            return
        if known.beat != known.told:
            self._tell(line, known)  # what is older arrives before what is newer
        self._waiting.append((line, report))
        self._asked.discard(line)
        held = isinstance(report, m.Frozen) and bool(self._asked)
        self._due(now + HOLD_S if held else now)

    def ended(self, line: LineId, now: float) -> None:
        """The stream of a rank has ended."""
        if self._lines.pop(line, None) is not None:
            self._waiting.append((line, None))
            self._asked.discard(line)
            self._due(now)

    def closed(self, line: LineId) -> None:
        """The controller has ended a line: nothing of it goes up any more."""
        self._lines.pop(line, None)
        self._asked.discard(line)
        self._waiting = [(of, report) for of, report in self._waiting if of != line]

    def told(self, lines: Iterable[LineId], order: m.Order) -> None:
        """An order has come down for these lines."""
        if isinstance(order, m.Freeze):
            self._asked.update(line for line in lines if line in self._lines)

    def deadline(self) -> float | None:
        """When ``take`` has something to give at the latest."""
        due = [at for at in (self._send_at, self._beat_at) if at is not None]
        return min(due, default=None)

    def take(self, now: float) -> Frame | None:
        """What has to go up now; ``None``: nothing yet."""
        beat = self._beat_at is not None and now >= self._beat_at
        if not beat and (self._send_at is None or now < self._send_at):
            return None
        silent: tuple[LineId, ...] = ()
        if beat:
            silent = tuple(self._tell_beats(now))
            beating = any(line.told is not None for line in self._lines.values())
            self._beat_at = now + self._heartbeat_s if beating else None
        reports, self._waiting, self._send_at = tuple(self._waiting), [], None
        return Frame(reports, beat, silent)

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
            self._beat_at = now + self._heartbeat_s

    def _tell(self, id: LineId, line: _Line) -> None:
        assert line.beat is not None
        self._waiting.append((id, line.beat))
        line.told = line.beat

    def _due(self, at: float) -> None:
        self._send_at = at if self._send_at is None else min(self._send_at, at)


class Unfolded:
    """The end of a relay in the controller: frames become what streams of their own would have brought."""

    def __init__(self) -> None:
        self._beats: dict[LineId, m.Heartbeat] = {}

    def reports(self, frame: Frame) -> Iterator[tuple[LineId, m.Report | None]]:
        """Reports by line, ``None`` where a line ends."""
        fresh = set(frame.silent)
        for line, report in frame.reports:
            if isinstance(report, m.Heartbeat):
                self._beats[line] = report
                fresh.add(line)
            elif report is None:
                self._beats.pop(line, None)
            yield line, report
        if frame.beat:
            for line, beat in list(self._beats.items()):
                if line not in fresh:
                    yield line, beat

    def closed(self, line: LineId) -> None:
        """The controller has ended a line."""
        self._beats.pop(line, None)


def folded(orders: Iterable[tuple[LineId, m.Order | None]]) -> list[tuple[list[LineId], m.Order | None]]:
    """Orders on their way down, neighbours that differ in nothing but the rank together; ``None`` ends a line."""
    together: list[tuple[list[LineId], m.Order | None]] = []
    last: object = None
    for line, order in orders:
        key = _key(order)
        if key is not None and key == last:
            together[-1][0].append(line)
        else:
            together.append(([line], order))
        last = key
    return together


def _key(order: m.Order | None) -> object:
    """Equal for orders that differ in nothing but the rank; ``None`` for those that are not looked at."""
    if not isinstance(order, SHARED):
        return None
    return type(order), *(getattr(order, field) for field in _FIELDS[type(order)])


_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind) if f.name != "rank") for kind in SHARED}


def ordered(order: m.Order, rank: Rank) -> m.Order:
    """The order as it is meant for one of the ranks that it came down for."""
    return order if order.rank == rank or not isinstance(order, SHARED) else dataclasses.replace(order, rank=rank)
