"""Converts an incident to a trace for ui.perfetto.dev and chrome://tracing.

The format is that of the "Trace Event Format" document of Chromium: complete events (``X``), instants (``i``) and names
(``M``), times in microseconds after the incident's first sign. Each activity has a track of its own, so that no two
events of a track overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ttp.cli.incident_reader import IncidentLog, Line

Event = dict[str, Any]

CONTROLLER = 1_000_000
"""Process number of the controller in the trace. A rank has its number plus 1, because 0 is the idle process."""
STAGES, SIGNS = 1, 2
FROZEN, SAVING, TOLD = 1, 2, 3
BEGINS = {"opened": "freeze", "plan": "save", "commit": "commit", "committed": "saved", "replan": "freeze"}
"""The stage that begins with each kind of line."""
ENDS = ("released", "thawed", "closed")
_TRACKS = {FROZEN: "stands still", SAVING: "save and commit", TOLD: "observations"}
"""Names of the tracks of a rank."""


def trace_events(log: IncidentLog) -> dict[str, Any]:
    """Return the contents of the whole file, as an object for JSON."""
    events = [*_stages(log), *_ranks(log), *_signs(log)]
    ranks = sorted({event["pid"] for event in events} - {CONTROLLER})
    names = [_name(CONTROLLER, "controller", {STAGES: "stages", SIGNS: "signs"})]
    names += [_name(pid, f"rank {pid - 1}", _TRACKS) for pid in ranks]
    order = {"ph": "M", "pid": CONTROLLER, "name": "process_sort_index", "args": {"sort_index": -1}}
    told = {"incident": log.id, "cause": log.cause, "outcome": log.outcome, "opened_unix_s": log.opened_unix_s}
    everything = [order, *(event for group in names for event in group), *sorted(events, key=lambda e: e["ts"])]
    return {"displayTimeUnit": "ms", "otherData": told, "traceEvents": everything}


def trace_text(log: IncidentLog) -> str:
    """Return the trace as JSON. Non-ASCII characters are not escaped: Perfetto refuses the escapes of an emoji.

    Torch's error texts contain one.
    """
    return json.dumps(trace_events(log), ensure_ascii=False)


def _name(pid: int, name: str, threads: dict[int, str]) -> list[Event]:
    found: list[Event] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    return found + [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": text}}
        for tid, text in threads.items()
    ]


def _span(pid: int, tid: int, name: str, begin_ms: float, end_ms: float, facts: Any = None) -> Event:
    begin = max(0.0, begin_ms)
    length = max(0.0, end_ms - begin)
    place = {"ph": "X", "pid": pid, "tid": tid, "name": name, "args": dict(facts or {})}
    return place | {"ts": begin * 1e3, "dur": length * 1e3}


def _stages(log: IncidentLog) -> Iterator[Event]:
    marks = [(line.at_ms, BEGINS[line.kind], line.facts) for line in log.of(*BEGINS)]
    end = log.last(*ENDS) or (log.lines[-1] if log.lines else None)
    if end is not None:
        marks.append((end.at_ms, "", {}))
    for (begin_ms, name, facts), (end_ms, _, _) in pairwise(marks):
        yield _span(CONTROLLER, STAGES, name, begin_ms, end_ms, facts)


def _ranks(log: IncidentLog) -> Iterator[Event]:
    end_ms = log.lines[-1].at_ms if log.lines else 0.0
    stood: dict[int, float] = {}
    answers: dict[int, Line] = {}
    begun: dict[int, float] = {}
    for line in log.lines:
        rank = line.facts.get("rank")
        if line.kind == "plan":
            savers = line.facts.get("savers")
            begun |= {
                r: line.at_ms for r in (savers.values() if isinstance(savers, dict) else ()) if isinstance(r, int)
            }
        if line.kind == "answer":
            for one in line.ranks:
                stood.setdefault(one, line.at_ms)
                answers[one] = line
        if not isinstance(rank, int) or rank < 0:
            continue
        if line.kind == "commit":
            begun[rank] = line.at_ms
        elif line.kind in ("saved", "save_failed", "committed", "commit_failed") and rank in begun:
            yield _span(rank + 1, SAVING, line.kind, begun.pop(rank), line.at_ms, line.facts)
    for rank, line in answers.items():
        facts = {name: value for name, value in line.facts.items() if name != "ranks"}  # may be thousands
        yield _span(rank + 1, FROZEN, f"version {line.facts.get('version')}", stood[rank], end_ms, facts)


def _signs(log: IncidentLog) -> Iterator[Event]:
    for line in log.of("evidence", "retracted", "waits", "retry", "fallback", "restore", *ENDS):
        text = str(line.facts.get("text") or line.facts.get("reason") or "")
        name = f"{line.kind}: {text}" if text else line.kind
        rank = line.facts.get("rank")
        pid, tid = CONTROLLER, SIGNS
        if line.kind in ("evidence", "retracted") and isinstance(rank, int) and rank >= 0:
            pid, tid = rank + 1, TOLD
        at = max(0.0, line.at_ms) * 1e3
        yield {"ph": "i", "s": "p", "pid": pid, "tid": tid, "name": name, "ts": at, "args": dict(line.facts)}
