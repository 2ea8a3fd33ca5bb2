"""The journal: one JSON-lines file for each incident, under ``save_dir/incidents/``.

Theory of operation
-------------------
Each directory has a writer thread of its own, so that a slow or hanging disk delays one copy of an incident's file and
never the rescue. Failing storage is often the cause of an incident, so its lines are kept in memory until they are safe
somewhere:

- Only directories are written to that the controller was told when it was started, or that a process of this host has
  named in the run directory: ranks speak to the controller from other hosts, and one of them may be faulty.
- When a directory refuses a line, all lines of the incident go to ``run_dir`` too. The refused lines are tried again
  with the next one.
- When the incident moves to the fallback directory, its lines are written there from the beginning.
- When the controller ends and a directory still hangs, the lines that it has not taken go to ``run_dir``.
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

from ttp.launch.run_dir import journals_allowed
from ttp.store import history
from ttp.store.durable import make_directory, naming, sync_directory
from ttp.store.mounts import Mounts

log = logging.getLogger("ttp.controller")

FOLDER = "incidents"
LINES_MAX = 100_000
"""Most lines that may wait for one directory, or are kept of one incident; further lines are dropped."""
REFUSED_MAX = 16 << 20
"""Most characters of refused lines that are kept for another try."""
GATHER_S = 0.005
"""Seconds that a line waits so that others are written with it."""
STORIES_MAX = 8
"""Incidents whose lines are kept in memory."""
NOT_TOLD = (
    "no rank on this host saves there: start a controller that has no rank on its host "
    "with TTP_SAVE_DIR (and TTP_FALLBACK_DIR)"
)
_FSYNC_AFTER = {"committed", "released", "closed", "thawed"}


@dataclass(frozen=True, slots=True)
class Happening:
    """One recorded event, as watchers and the journal get it."""

    sequence: int
    unix_s: float
    monotonic_s: float
    kind: str
    incident: str
    facts: str  # JSON


@dataclass(slots=True)
class _Story:
    """The lines of one incident, and the directories that they are written to."""

    lines: list[str] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)


class Journal:
    """Appends events to the file of their incident.

    Args:
        run_dir: on a local disk; gets the lines that save_dir refuses.
        told: directories that may be written to, besides those of ``journals_allowed``.
        fallback_dir: gets the history of launches too, as ``save_dir`` may be what is broken.
    """

    def __init__(self, run_dir: Path, told: Iterable[str | None] = (), fallback_dir: str | None = None) -> None:
        self._run_dir, self._fallback = run_dir, fallback_dir
        self._told = frozenset({str(run_dir), *filter(None, told)})
        self._stories: dict[str, _Story] = {}
        self._writers: dict[Path, _Writer] = {}
        self._lock = threading.Lock()  # never held during a disk call

    def launch_begins(
        self, save_dir: str, happening: Happening, resumed: bool, told: Callable[[int, bool], None]
    ) -> None:
        """Record the start of a launch, and remember which file system is mounted at ``save_dir`` from now on.

        Args:
            save_dir: of the job.
            happening: the event, with the facts of the launch.
            resumed: this controller took over during the launch; the controller before it has recorded the start.
            told: called on another thread with the number of launches before this one that brought no new version, and
                whether this launch has brought one.
        """
        if not save_dir:
            return
        with self._lock:
            writer = self._writer(Path(save_dir))
        writer.read(resumed, told)
        if not resumed:
            self.launch_goes_on(save_dir, happening)

    def launch_goes_on(self, save_dir: str, happening: Happening) -> None:
        """Record an event of the launch. A refused line is not tried again: the incident's file has the event too."""
        if save_dir:
            line = history.line_of(happening.kind, happening.unix_s, json.loads(happening.facts))
            with self._lock:
                for place in filter(None, (save_dir, self._fallback)):
                    self._writer(Path(place)).note(line)

    def write(self, save_dir: str, happening: Happening) -> None:
        """Queue the line of an event; never blocks. Beyond ``LINES_MAX`` lines that wait for a hanging disk it is
        dropped.
        """
        incident, line = happening.incident, line_of(happening)
        with self._lock:
            story = self._stories.get(incident) or self._begin(incident, Path(save_dir) if save_dir else self._run_dir)
            if len(story.lines) < LINES_MAX:
                story.lines.append(line)
            for told in story.places:
                self._writer(told).put(incident, line, happening.kind in _FSYNC_AFTER)
            if happening.kind == "fallback" and (place := json.loads(happening.facts).get("directory")):
                self._also_to(Path(place), incident)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s`` seconds, and half as long again if a directory hangs."""
        if hanging := self._finish(timeout_s):
            with self._lock:
                for incident, story in self._stories.items():
                    if set(story.places) <= hanging:
                        self._also_to(self._run_dir, incident)
            self._finish(timeout_s / 2)

    def _finish(self, timeout_s: float) -> set[Path]:
        """End all writers, also those that begin meanwhile. Return the directories of the writers that hang."""
        deadline = time.monotonic() + timeout_s
        hanging: set[Path] = set()
        while open_ones := {place: w for place, w in self._open_writers().items() if not w.ended}:
            for writer in open_ones.values():
                writer.end()
            hanging |= {p for p, w in open_ones.items() if not w.join(deadline - time.monotonic())}
        return hanging

    def _open_writers(self) -> dict[Path, _Writer]:
        with self._lock:
            return dict(self._writers)

    def _begin(self, incident: str, place: Path) -> _Story:
        while len(self._stories) >= STORIES_MAX:
            del self._stories[next(iter(self._stories))]
        story = self._stories[incident] = _Story(places=[place])
        return story

    def _writer(self, place: Path) -> _Writer:
        if place not in self._writers or self._writers[place].ended:
            self._writers[place] = _Writer(place, self._refused, self._may_write_to)
        return self._writers[place]

    def _may_write_to(self, place: Path) -> bool:
        """Return whether this host has named ``place``, not only a rank over the network. Reads ``run_dir``."""
        return str(place) in self._told or str(place) in journals_allowed(self._run_dir)

    def _refused(self, incident: str) -> None:
        with self._lock:
            self._also_to(self._run_dir, incident)

    def _also_to(self, place: Path, incident: str) -> None:
        story = self._stories.get(incident)
        if story is not None and place not in story.places:
            story.places.append(place)
            self._writer(place).put(incident, "".join(story.lines), True)


class _Writer:
    """The thread that writes to one directory.

    Args:
        place: save_dir, the fallback directory or the run directory.
        refused: called with an incident whose lines could not be written; they are tried again with its next line.
        may_write_to: asked before each write whether the directory may be written to.
    """

    def __init__(self, place: Path, refused: Callable[[str], None], may_write_to: Callable[[Path], bool]) -> None:
        self.ended = self._last = False
        self._place, self._refused, self._may_write_to = place, refused, may_write_to
        self._mounts = Mounts()
        self._inbox: queue.SimpleQueue[tuple[str, str, bool] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-journal", daemon=True)
        self._thread.start()

    def put(self, incident: str, text: str, durable: bool) -> None:
        """Queue ``text``, whole lines of ``incident``, with an fsync after it if ``durable``."""
        if self._inbox.qsize() < LINES_MAX:
            self._inbox.put((incident, text, durable))

    def note(self, line: str) -> None:
        """Queue a line of the history of launches. It is dropped if the directory does not exist."""
        if self._inbox.qsize() < LINES_MAX:
            self._inbox.put(lambda: self._note(line))

    def read(self, resumed: bool, told: Callable[[int, bool], None]) -> None:
        """Call ``told`` on the writer's thread with what the history says; see ``Journal.launch_begins``."""
        self._inbox.put(lambda: told(*history.behind(self._place, resumed)))

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job on the history of launches. A failure is only logged, because the history is a convenience."""
        try:
            self._mounts.check(self._place)
            job()
        except (OSError, ValueError) as problem:
            log.info("cannot read or write the history of launches in %s: %s", self._place, problem)

    def _note(self, line: str) -> None:
        if self._place.is_dir() and self._may_write_to(self._place):
            _append(self._place / FOLDER, history.FILE, line.encode(), True)

    def end(self) -> None:
        """Write what is queued, then end the thread."""
        self.ended = True
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds. Return whether the thread has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # an impossible path is reported with its first line
            self._mounts = Mounts(self._place)
        refused: dict[str, str] = {}
        warned: set[str] = set()
        while waiting := self._batch():
            for incident, (lines, durable) in waiting.items():
                text = refused.pop(incident, "") + "".join(lines)
                try:
                    self._mounts.check(self._place)
                    if not self._may_write_to(self._place):
                        raise PermissionError(NOT_TOLD)
                    _append(self._place / FOLDER, f"{incident}.jsonl", text.encode(), durable)
                except (OSError, ValueError) as problem:  # ValueError: an impossible path
                    level = logging.DEBUG if incident in warned else logging.WARNING
                    log.log(level, "cannot write the record of the incident in %s: %s", self._place, problem)
                    warned.add(incident)
                    if len(text) < REFUSED_MAX:
                        refused[incident] = text
                    self._refused(incident)

    def _batch(self) -> dict[str, tuple[list[str], bool]]:
        """Return the lines queued since the last call, by incident, and whether to make them durable; empty at the end.

        Waits for a first line, then ``GATHER_S`` for others, so that the answers of ten thousand ranks become a few
        writes.
        """
        batch: dict[str, tuple[list[str], bool]] = {}
        item = None if self._last else self._inbox.get()
        if item is not None:
            time.sleep(GATHER_S)
        while item is not None:
            if callable(item):
                self._do(item)
            else:
                incident, text, durable = item
                lines, one_is = batch.get(incident, ([], False))
                lines.append(text)
                batch[incident] = lines, durable or one_is
            if batch and self._inbox.empty():
                return batch
            item = self._inbox.get()
        self._last = True
        return batch


def line_of(happening: Happening) -> str:
    """Return an event as a line of its incident's file."""
    h = happening
    facts = h.facts[1:-1]  # without the braces; encoded once, for watchers too
    return (
        f'{{"sequence": {h.sequence}, "unix_s": {h.unix_s:.6f}, "monotonic_s": {h.monotonic_s:.6f}, '
        f'"kind": {_quoted(h.kind)}, "incident": {_quoted(h.incident)}{", " if facts else ""}{facts}}}\n'
    )


_quoted = functools.lru_cache(json.dumps)


def _append(folder: Path, name: str, data: bytes, durable: bool) -> None:
    """Append all of ``data``, or nothing where the disk lets us truncate: half a line would corrupt the next one."""
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
            if not size and now in (0, written):  # an empty file would hide the whole file in the run directory
                (folder / name).unlink()
        raise
    finally:
        os.close(handle)
