"""Reads incident files, which ``ttp.controller.journal`` writes. Lines that a crash has torn are counted and left out.

Several controllers may have written to one file: a controller that takes over an incident begins with an ``opened``
line that has ``recovered``, counts its lines from the start, and may run on another host, whose monotonic clock cannot
be compared with that of the first.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.core.controller.evidence import EXPLAINS
from ttp.core.messages import FaultKind
from ttp.errors import EXIT_BAD_CONFIG, EXIT_SAVED, CheckpointError, ToldAs, strerror_of
from ttp.store.json_text import parse_json
from ttp.store.names import INCIDENTS
from ttp.store.plain_file import open_plain

SUFFIX = ".jsonl"

OF_OTHERS = frozenset({FaultKind.COLLECTIVE.value, FaultKind.SNAPSHOT.value})
"""Kinds of evidence that do not accuse their rank: a collective fails on the ranks that live."""

LINE_MAX = 16 << 20
"""Maximum length of a line in bytes. A plan names every shard of the job."""
FILE_MAX = 128 << 20
"""Maximum length of a file in bytes. Every rank answers at least once."""
TIME_MAX = 1e12
"""Upper limit of a valid time in seconds."""

_SURROGATE = re.compile(r"(?i)\\ud[89a-f]")
_HEAD = ("sequence", "unix_s", "monotonic_s", "kind", "incident")


@dataclass(frozen=True, slots=True)
class Line:
    """One recorded event of an incident.

    Args:
        kind: what happened, such as ``answer``.
        at_ms: milliseconds after the incident's first line.
        unix_s: wall time in seconds since 1970.
        monotonic_s: monotonic clock of the controller's host, in seconds.
        facts: the other fields of the event, which depend on its kind.
    """

    kind: str
    at_ms: float
    unix_s: float
    monotonic_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks whose answer this line records."""
        told = self.facts.get("ranks")
        return [rank for rank in told if isinstance(rank, int) and rank >= 0] if isinstance(told, list) else []


@dataclass(frozen=True, slots=True)
class IncidentLog:
    """The contents of one incident file.

    Args:
        id: the incident.
        path: its file.
        lines: in the order written.
        unreadable: number of lines that are no JSON objects; a crash leaves one at the end.
    """

    id: str
    path: Path
    lines: tuple[Line, ...]
    unreadable: int = 0

    def of(self, *kinds: str) -> Iterator[Line]:
        """Return the lines of these kinds."""
        return (line for line in self.lines if line.kind in kinds)

    def last(self, *kinds: str) -> Line | None:
        """Return the last line of one of these kinds; None: there is none."""
        return next((line for line in reversed(self.lines) if line.kind in kinds), None)

    @property
    def opened_unix_s(self) -> float:
        """Time at which the incident was opened, in seconds since 1970; 0 for an empty file."""
        return self.lines[0].unix_s if self.lines else 0.0

    @property
    def cause(self) -> str:
        """The text of the most telling evidence. Withdrawn evidence counts only if there is no other."""
        known = self._standing() or list({_accusation(line): line for line in self.of("evidence")}.values())
        if not known:
            return "no evidence was recorded"
        return str(min(known, key=_explains).facts.get("text", ""))

    @property
    def accusations(self) -> list[Line]:
        """The evidence that accuses its rank and was not withdrawn."""
        return [line for line in self._standing() if line.facts.get("evidence") not in OF_OTHERS]

    def accused_hosts(self) -> dict[str, list[Line]]:
        """Return the accusations by the host of the accused rank."""
        found: dict[str, list[Line]] = {}
        for line in self.accusations:
            host = line.facts.get("host")
            if isinstance(host, str) and host:
                found.setdefault(host, []).append(line)
        return found

    def _standing(self) -> list[Line]:
        """Return the newest evidence of each kind against each rank, without withdrawn evidence."""
        accused = {_accusation(line): line for line in self.of("evidence")}
        retracted = {_accusation(line) for line in self.of("retracted")}
        return [line for key, line in accused.items() if key not in retracted]

    @property
    def saved(self) -> bool:
        """True if nothing was lost: a checkpoint was committed, or there was one of this version already."""
        released = self.last("released")
        if self.last("held") is not None and self.last("committed", "durable") is None:
            return False  # in memory only, so far
        if released is not None and released.facts.get("exit_code") != EXIT_BAD_CONFIG:
            return released.facts.get("exit_code") == EXIT_SAVED
        return self.last("committed", "durable", "nothing_new") is not None

    @property
    def version(self) -> int | None:
        """The version that was saved or found on disk; None if none was."""
        line = self.last("committed", "durable", "nothing_new")
        version = line.facts.get("version") if line is not None else None
        return version if isinstance(version, int) else None

    @property
    def checkpoint(self) -> str:
        """Path of the committed checkpoint; empty without one."""
        line = self.last("committed", "durable")
        return str(line.facts.get("path", "")) if line is not None else ""

    @property
    def saved_after_ms(self) -> float | None:
        """Milliseconds from the opening to the last commit; None: nothing was committed."""
        line = self.last("committed", "durable")
        return line.at_ms if line is not None else None

    @property
    def outcome(self) -> str:
        """How the incident ended, in a few words."""
        line = self.last("released", "thawed")
        if line is None and self.last("abdicated") is not None:
            return "another controller leads the job"
        if line is None:
            return "closed" if self.last("closed") else "not over, or its controller was lost"
        if line.kind == "thawed":
            return f"training went on: {line.facts.get('reason', '')}"
        if line.facts.get("again") and (durable := self.last("durable")) is not None:
            version, after_s = durable.facts.get("version"), durable.at_ms / 1e3
            return f"saved in the shadow: version {version}, durable after {after_s:.1f} s"
        return f"exit {line.facts.get('exit_code')}: {line.facts.get('text', '')}"


def incident_files(directory: Path) -> list[Path]:
    """Return the incident files of a ``save_dir``, or of its ``incidents`` directory, newest first.

    Without such a directory there are none.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    inner = directory / INCIDENTS
    folder = directory
    try:
        folder = inner if inner.is_dir() else directory
        files = (p for p in folder.iterdir() if p.suffix == SUFFIX and p.is_file())  # glob hides what it may not list
        return sorted(files, key=_sort_key, reverse=True)
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot list {folder}: {problem.strerror or problem}") from None


def id_of(path: Path) -> str:
    """Return the id of the incident of a file, whose name may be any bytes."""
    return os.fsencode(path.stem).decode(errors="replace")


def _sort_key(path: Path) -> tuple[str, str, int, str]:
    """Return a key that sorts by time: in ``20261120-094512-10-3fa9`` the ``10`` is a number, and comes after ``9``."""
    day, _, rest = path.stem.partition("-")
    clock, _, rest = rest.partition("-")
    number = rest.partition("-")[0]
    return day, clock, int(number) if number.isdecimal() else 0, path.stem


def read_incident(path: Path) -> IncidentLog:
    """Read one incident file.

    Raises:
        CheckpointError: the file cannot be read at all.
    """
    with ToldAs(CheckpointError, f"cannot read {path}", OSError, reason=strerror_of):
        with open_plain(path) as raw, io.BufferedReader(raw) as file:
            return parse_incident(file, id_of(path), path)


def readable(files: Iterable[Path], complain: Callable[[str], object]) -> Iterator[IncidentLog]:
    """Read incident files; ``complain`` is called with the reason why one cannot be read."""
    for path in files:
        try:
            yield read_incident(path)
        except CheckpointError as problem:
            complain(str(problem))


def parse_incident(file: io.BufferedIOBase, incident: str, path: Path) -> IncidentLog:
    """Read the lines of one incident.

    Raises:
        OSError: the file cannot be read.
    """
    records = [_parse(line) for line in _lines(file) if line is None or line.strip()]
    whole = [record for record in records if record is not None]
    return IncidentLog(incident, path, tuple(_timed(whole)), len(records) - len(whole))


def _lines(file: io.BufferedIOBase) -> Iterator[bytes | None]:
    """Yield the lines of a file; ``None`` for a line that is longer than any that ttp writes.

    The rest of a file that is longer than any incident's is one ``None``, too.
    """
    size = 0
    while line := file.readline(LINE_MAX):
        size += len(line)
        whole = line.endswith(b"\n") or len(line) < LINE_MAX
        while not whole:
            rest = file.readline(LINE_MAX)
            size += len(rest)
            whole = rest.endswith(b"\n") or len(rest) < LINE_MAX
            line = b""
        yield line or None
        if size > FILE_MAX:
            yield None
            return


def _parse(line: bytes | None) -> dict[str, Any] | None:
    if line is None:
        return None
    text = line.decode("utf-8", errors="replace")
    try:
        record = parse_json(text)
        if _SURROGATE.search(text):  # half of a surrogate pair is not valid text, and JSON readers refuse it
            whole = json.dumps(record, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            record = parse_json(whole.decode("utf-16-le", errors="replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _timed(records: Iterable[dict[str, Any]]) -> Iterator[Line]:
    """Add the time since the opening: by the monotonic clock within a controller, by the wall clock between two."""
    start_unix_s: float | None = None
    offset_ms, began_s = 0.0, 0.0
    for record in records:
        unix_s, monotonic_s = _number(record, "unix_s"), _number(record, "monotonic_s")
        if start_unix_s is None:
            start_unix_s, began_s = unix_s, monotonic_s
        elif record["kind"] == "opened":
            offset_ms, began_s = max(0.0, (unix_s - start_unix_s) * 1e3), monotonic_s
        at_ms = offset_ms + (monotonic_s - began_s) * 1e3
        facts = {name: value for name, value in record.items() if name not in _HEAD}
        yield Line(record["kind"], round(at_ms, 3), unix_s, monotonic_s, facts)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and abs(value) < TIME_MAX else 0.0  # not so for NaN


def _accusation(line: Line) -> tuple[str, str]:
    """Return the rank and kind of an ``evidence`` line, or of the ``retracted`` line that withdraws it."""
    return str(line.facts.get("rank")), str(line.facts.get("evidence"))


def _explains(line: Line) -> int:
    kind = line.facts.get("evidence")
    return next((place for place, each in enumerate(EXPLAINS) if each.value == kind), len(EXPLAINS))
