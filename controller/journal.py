"""The journal: one JSON-lines file for each incident, under ``save_dir/incidents/``.

Theory of operation
-------------------
Each directory has its own writer thread, so that a slow or hanging disk delays one copy of an incident's file and never
the rescue. Failing storage is often the cause of an incident, so the lines of an incident are kept in memory until they
are on some disk:

- The controller writes only to directories that it was given at its start, or that a process of this host has named in
  the run directory: a rank on another host may be faulty, and must not choose where the controller writes.
- If a write to a directory fails, all lines of the incident are written to ``run_dir`` too. The failed lines are tried
  again with the next line for this directory, be it of another incident or of a launch, and at the end.
- If the incident moves to the fallback directory, all its lines are written there.
- If the controller ends and a directory still hangs, the lines of its incidents are written to ``run_dir``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.aside import aside
from ttp.core.controller.hangs import MEMORY_S
from ttp.launch.run_dir import journals_allowed
from ttp.store import history
from ttp.store.durable import make_directory, naming, sync_directory
from ttp.store.mounts import Mounts

log = logging.getLogger("ttp.controller")

FOLDER = "incidents"
"""Name of the folder with the files of incidents, in each directory."""
LINES_MAX = 100_000
"""Most lines that may wait for one directory, or are kept of one incident; further lines are dropped."""
REFUSED_MAX = 16 << 20
"""Most characters of failed lines of an incident that are kept for another try."""
EARLY_MAX = 100
"""Most lines of the history of launches that wait until the controller may write to the directory."""
GATHER_S = 0.005
"""Seconds that a line waits, so that further lines are written together with it."""
INCIDENTS_MAX = 8
"""Number of incidents whose lines are kept in memory."""
NOT_TOLD = (
    "no rank on this host saves there, so the controller may not write there: start a controller without a rank on its "
    "host with TTP_SAVE_DIR (and TTP_FALLBACK_DIR)"
)
_FSYNC_AFTER = {"committed", "released", "closed", "thawed"}
"""Kinds of events that are made durable at once."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One recorded event, as watchers and the journal get it.

    Args:
        sequence: number of the event in this controller, from 1.
        unix_s: time on the wall clock.
        monotonic_s: time on the controller's monotonic clock.
        kind: kind of the event.
        incident: id of the incident; empty: the event belongs to none.
        facts: further facts, as a JSON object.
    """

    sequence: int
    unix_s: float
    monotonic_s: float
    kind: str
    incident: str
    facts: str  # JSON


@dataclass(slots=True)
class _IncidentLines:
    """The lines of one incident, and the directories to which they are written."""

    lines: list[str] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)


class Journal:
    """Appends events to the file of their incident, and launches to the history of launches.

    Args:
        run_dir: a directory on a local disk; gets the lines that cannot be written to save_dir.
        told: directories that may be written to, in addition to those of ``journals_allowed``.
        fallback_dir: gets a copy of the history of launches, in case ``save_dir`` is broken.
        address: ``host:port`` of this controller, for the history of launches.
    """

    def __init__(
        self, run_dir: Path, told: Iterable[str | None] = (), fallback_dir: str | None = None, address: str = ""
    ) -> None:
        self._run_dir, self._fallback, self._address = run_dir, fallback_dir, address
        self._told = {str(run_dir), *filter(None, told)}
        self._incidents: dict[str, _IncidentLines] = {}
        self._writers: dict[Path, _Writer] = {}
        self._lock = threading.Lock()  # never held during a disk call

    def launch_begins(
        self, save_dir: str, recorded: RecordedEvent, found: Callable[[int, history.Launch | None, float], None]
    ) -> None:
        """Record the start of a launch, and read the history of launches.

        Args:
            save_dir: the job's directory of checkpoints; empty: nothing is recorded.
            recorded: the event, with the facts of the launch. ``resumed``: this controller took over during the launch,
                and the controller before it has recorded the start.
            found: called on another thread with what ``history.behind`` returns.
        """
        if not save_dir:
            return
        facts = json.loads(recorded.facts) | {"controller": self._address, "run_dir": str(self._run_dir)}
        resumed = (facts["run_id"], facts["incarnation"]) if facts["resumed"] else None
        with self._lock:
            self._writer(Path(save_dir)).read(resumed, found)
        self._note(save_dir, history.LEADS if resumed else recorded.kind, recorded.unix_s, facts)

    def launch_goes_on(self, save_dir: str, recorded: RecordedEvent, launch: tuple[str, int] | None = None) -> None:
        """Record an event of the launch. A failed line is not tried again: the incident's file has the event too.

        Args:
            save_dir: the job's directory of checkpoints; empty: nothing is recorded.
            recorded: the event.
            launch: run id and incarnation of the launch; None: it is the last one that was recorded.
        """
        if save_dir:
            named = dict(zip(("run_id", "incarnation"), launch, strict=True)) if launch else {}
            facts = named | json.loads(recorded.facts) | {"controller": self._address}
            self._note(save_dir, recorded.kind, recorded.unix_s, facts)

    def _note(self, save_dir: str, kind: str, unix_s: float, facts: dict[str, Any]) -> None:
        line = history.line_of(kind, unix_s, facts)
        with self._lock:
            for place in filter(None, (save_dir, self._fallback)):
                self._writer(Path(place)).note(line)

    def write(self, save_dir: str, recorded: RecordedEvent) -> None:
        """Queue the line of an event; never blocks. If ``LINES_MAX`` lines wait for a hanging disk, it is dropped."""
        incident, line = recorded.incident, line_of(recorded)
        with self._lock:
            kept = self._incidents.get(incident) or self._begin(incident, Path(save_dir or self._run_dir))
            if len(kept.lines) < LINES_MAX:
                kept.lines.append(line)
            for place in kept.places:
                self._writer(place).put(incident, line, recorded.kind in _FSYNC_AFTER)
            if recorded.kind == "fallback" and (place := json.loads(recorded.facts).get("directory")):
                self._also_to(Path(place), incident)

    def close(self, timeout_s: float) -> None:
        """Write the queued lines, for at most ``timeout_s`` seconds; half as long again if a directory hangs."""
        if hanging := self._finish(timeout_s):
            with self._lock:
                for incident, kept in self._incidents.items():
                    if set(kept.places) <= hanging:
                        self._also_to(self._run_dir, incident)
            self._finish(timeout_s / 2)

    def _finish(self, timeout_s: float) -> set[Path]:
        """End all writers, including those that start meanwhile. Return the directories of the writers that hang."""
        deadline = time.monotonic() + timeout_s
        hanging: set[Path] = set()
        while True:
            with self._lock:
                open_ones = {place: writer for place, writer in self._writers.items() if not writer.ended}
                for writer in open_ones.values():
                    writer.end()
            if not open_ones:
                return hanging
            hanging |= {p for p, w in open_ones.items() if not w.join(deadline - time.monotonic())}

    def _begin(self, incident: str, place: Path) -> _IncidentLines:
        while len(self._incidents) >= INCIDENTS_MAX:
            del self._incidents[next(iter(self._incidents))]
        kept = self._incidents[incident] = _IncidentLines(places=[place])
        return kept

    def _writer(self, place: Path) -> _Writer:
        if place not in self._writers or self._writers[place].ended:
            self._writers[place] = _Writer(place, self._refused, self._may_write_to)
        return self._writers[place]

    def _may_write_to(self, place: Path) -> bool:
        """Return whether the controller's settings, or a process of this host in ``run_dir``, have named ``place``.

        What was named once is remembered: a cleaner of temporary files may remove ``run_dir`` while the job trains.
        """
        if str(place) not in self._told:
            self._told |= {str(place)} & journals_allowed(self._run_dir)
        return str(place) in self._told

    def _refused(self, incident: str) -> None:
        with self._lock:
            self._also_to(self._run_dir, incident)

    def _also_to(self, place: Path, incident: str) -> None:
        kept = self._incidents.get(incident)
        if kept is not None and place not in kept.places:
            kept.places.append(place)
            self._writer(place).put(incident, "".join(kept.lines), True)


@dataclass(slots=True)
class _Batch:
    """What a writer does at once: ``lines`` by incident, and whether to make them durable; jobs on the history."""

    lines: dict[str, tuple[list[str], bool]] = field(default_factory=dict)
    jobs: list[Callable[[], None]] = field(default_factory=list)


class _Writer:
    """Writes to one directory, on a thread. Where no thread can be started, lines wait until one can.

    Call ``put``, ``note``, ``read`` and ``end`` under the lock of the journal.

    Args:
        place: save_dir, the fallback directory or the run directory.
        refused: called with an incident whose lines could not be written; they are tried again with the next line.
        may_write_to: called before each write; returns whether the directory may be written to.
    """

    def __init__(self, place: Path, refused: Callable[[str], None], may_write_to: Callable[[Path], bool]) -> None:
        self.ended = self._last = False
        self._early: tuple[str, ...] = ()  # lines of the history from before a process of this host named the directory
        self._place, self._refused, self._may_write_to = place, refused, may_write_to
        self._mounts = Mounts()
        self._inbox: queue.SimpleQueue[tuple[str, str, bool] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, incident: str, text: str, durable: bool) -> None:
        """Queue ``text``, which is one or more lines of ``incident``; ``durable``: with an fsync after the write."""
        if self._inbox.qsize() < LINES_MAX:
            self._queue((incident, text, durable))

    def note(self, line: str) -> None:
        """Queue a line of the history of launches. It is dropped if the directory does not exist.

        Where the controller may not write yet, the line is written with the next one.
        """
        if self._inbox.qsize() < LINES_MAX:
            self._queue(lambda: self._note(line))

    def read(self, resumed: tuple[str, int] | None, found: Callable[[int, history.Launch | None, float], None]) -> None:
        """Read the history of launches on the writer's thread, and call ``found``; see ``Journal.launch_begins``."""
        self._queue(lambda: found(*history.behind(self._place, resumed, MEMORY_S)))

    def _queue(self, item: tuple[str, str, bool] | Callable[[], None] | None) -> None:
        self._inbox.put(item)
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the next item tries again
                self._thread = aside("ttp-journal", self._run)

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job on the history of launches. A failure is only logged: no rescue depends on the history."""
        try:
            self._mounts.check(self._place)
            job()
        except (OSError, ValueError) as problem:
            log.info("the history of launches in %s cannot be read or written: %s", self._place, problem)

    def _note(self, line: str) -> None:
        if not self._place.is_dir():
            return
        if not self._may_write_to(self._place):  # the first rank to join may be on another host than the controller
            self._early = (*self._early, line)[-EARLY_MAX:]
            return
        lines, self._early = (*self._early, line), ()
        _append(self._place / FOLDER, history.FILE, "".join(lines).encode(), True)

    def end(self) -> None:
        """Write the queued lines, then end the thread."""
        self.ended = True
        self._queue(None)

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds. Return whether everything was written."""
        if self._thread is None:
            return False
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # an invalid path is reported when its first line is written
            self._mounts = Mounts(self._place)
        refused: dict[str, str] = {}
        warned: set[str] = set()
        while batch := self._batch():
            for incident in refused:  # one that is over gets no further line
                batch.lines.setdefault(incident, ([], True))
            for incident, (lines, durable) in batch.lines.items():
                text = refused.pop(incident, "") + "".join(lines)
                try:
                    self._mounts.check(self._place)
                    if not self._may_write_to(self._place):
                        raise PermissionError(NOT_TOLD)
                    _append(self._place / FOLDER, f"{incident}.jsonl", text.encode(), durable)
                except (OSError, ValueError) as problem:  # ValueError: an invalid path
                    level = logging.DEBUG if incident in warned else logging.WARNING
                    log.log(level, "the incident's file in %s cannot be written: %s", self._place, problem)
                    warned.add(incident)
                    if len(text) < REFUSED_MAX:
                        refused[incident] = text
                    self._refused(incident)
            for job in batch.jobs:  # after the lines: each may wait for the disk, and the incident tells more
                self._do(job)

    def _batch(self) -> _Batch | None:
        """Return what was queued since the last call; None at the end.

        Waits for a first item, then ``GATHER_S`` seconds for further ones, so that the answers of ten thousand ranks
        become a few writes.
        """
        if self._last:
            return None
        batch = _Batch()
        item = self._inbox.get()
        time.sleep(GATHER_S if item is not None else 0)
        while item is not None:
            if callable(item):
                batch.jobs.append(item)
            else:
                incident, text, durable = item
                lines, one_is = batch.lines.get(incident, ([], False))
                lines.append(text)
                batch.lines[incident] = lines, durable or one_is
            if self._inbox.empty():
                return batch
            item = self._inbox.get()
        self._last = True
        return batch


def line_of(recorded: RecordedEvent) -> str:
    """Return an event as a line (JSON) of its incident's file."""
    h = recorded
    facts = h.facts[1:-1]  # without the braces; the facts are already JSON
    return (
        f'{{"sequence": {h.sequence}, "unix_s": {h.unix_s:.6f}, "monotonic_s": {h.monotonic_s:.6f}, '
        f'"kind": {_quoted(h.kind)}, "incident": {_quoted(h.incident)}{", " if facts else ""}{facts}}}\n'
    )


_quoted = functools.lru_cache(json.dumps)


def _append(folder: Path, name: str, data: bytes, durable: bool) -> None:
    """Append all of ``data``. On an error truncate the file again: half a line would corrupt the next line."""
    if not folder.is_dir():
        make_directory(folder)
    handle = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    size, written = os.fstat(handle).st_size, 0
    try:
        with naming(folder / name):
            while written < len(data):
                written += os.write(handle, data[written:])
            if durable:
                os.fsync(handle)
        if durable:
            sync_directory(folder)
    except OSError:
        with contextlib.suppress(OSError):
            now = os.fstat(handle).st_size
            if written and now == size + written:  # no other process has written meanwhile
                os.ftruncate(handle, size)
            if not size and now in (0, written):  # readers would take an empty file for the incident's, not run_dir's
                (folder / name).unlink()
        raise
    finally:
        os.close(handle)
