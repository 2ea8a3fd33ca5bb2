"""Compute the data of one incident for the page: stages and lanes of ranks for its picture, and a timeline."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Any

from ttp.cli.incident_reader import IncidentLog
from ttp.cli.incidents import describe
from ttp.cli.timeline import rows
from ttp.cli.trace_events import CONTROLLER, SAVING, STAGES, Event, trace_events
from ttp.core.layout import compact_ranks
from ttp.web.view import hurt, tell

LANES_MAX = 24
"""Largest number of lanes for single ranks. If there are more ranks, those with equal states share a lane."""
ROWS_MAX = 400
TEXT_MAX = 20_000
"""Largest number of characters of a line's details; a stack is shorter."""


def story(log: IncidentLog) -> dict[str, Any]:
    """Return the data of an incident, for JSON. Times are milliseconds after the first sign of the fault."""
    spans: dict[int, list[Event]] = defaultdict(list)
    for event in trace_events(log)["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
    end = log.last("released", "thawed") or log.last("committed") or (log.lines[-1] if log.lines else None)
    end_ms = max(1.0, end.at_ms if end is not None else 0.0)
    timeline = [
        {"at_ms": line.at_ms, "kind": line.kind, "text": text[:TEXT_MAX], "detail": _detail(line.facts.get("detail"))}
        for line, text in islice(rows(log), ROWS_MAX)
    ]
    return {
        **describe(log),
        **tell(log),
        "length_ms": end_ms,
        "stages": [_drawn(span) for span in spans[CONTROLLER] if span["tid"] == STAGES],
        "lanes": _lanes(log, spans, end_ms),
        "timeline": timeline,
        "more": max(0, len(log.lines) - ROWS_MAX) if len(timeline) == ROWS_MAX else 0,
    }


def _detail(value: object) -> str:
    return str(value)[:TEXT_MAX] if value else ""


def _drawn(span: Event, kind: str = "") -> dict[str, Any]:
    begin = span["ts"] / 1e3
    return {"kind": kind or span["name"], "text": span["name"], "begin": begin, "end": begin + span["dur"] / 1e3}


def _lanes(log: IncidentLog, spans: dict[int, list[Event]], end_ms: float) -> list[dict[str, Any]]:
    """Return the lanes: first of ranks that were hurt, then of ranks that wrote, then of the others."""
    dead = hurt(log)
    ranks = {pid - 1: found for pid, found in spans.items() if pid != CONTROLLER}
    writers = [rank for rank, found in ranks.items() if any(span["tid"] == SAVING for span in found)]
    order = list(dict.fromkeys([*dead, *sorted(writers), *sorted(ranks)]))
    own, rest = (order, []) if len(order) <= LANES_MAX else (order[: LANES_MAX - 4], order[LANES_MAX - 4 :])
    lanes = []
    for rank in own:
        found = ranks.get(rank, [])
        lanes.append(_lane(log, rank, [span for span in found if span["tid"] != SAVING], rank in dead, end_ms))
        if written := [_drawn(span) for span in found if span["tid"] == SAVING]:
            lanes.append({"label": f"rank {rank} writes", "ranks": str(rank), "spans": written})
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in rest:
        alike[ranks[rank][0]["name"] if ranks.get(rank) else "lost"].append(rank)
    for name, members in alike.items():
        begin = min((ranks[r][0]["ts"] / 1e3 for r in members if ranks.get(r)), default=0.0)
        text = f"{len(members)} ranks, the first of them: {name}"
        span = {"kind": "lost" if name == "lost" else "frozen", "text": text, "begin": begin, "end": end_ms}
        lanes.append({"label": f"{len(members)} ranks", "ranks": compact_ranks(members), "spans": [span]})
    return lanes


def _lane(log: IncidentLog, rank: int, found: list[Event], dead: bool, end_ms: float) -> dict[str, Any]:
    spans = [_drawn(span, "frozen") for span in found]
    if dead:
        line = next(line for line in log.of("evidence") if line.facts.get("rank") == rank)
        kind, text = str(line.facts.get("evidence")), str(line.facts.get("text"))[:TEXT_MAX]
        begin = min(line.at_ms, end_ms)
        spans = [{"kind": "lost", "text": f"{kind}: {text}", "begin": begin, "end": end_ms}, *spans]
    return {"label": f"rank {rank}", "ranks": str(rank), "spans": spans}
