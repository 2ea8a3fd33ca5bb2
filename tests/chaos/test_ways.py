"""How ranks came back after a fault, and whether a reason is logged if they could have come back faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.evidence import AT_S, FIRST, SECOND, Story, seen
from ttp.chaos.record import Evidence, Seen
from ttp.chaos.script import Script
from ttp.chaos.ways import way, way_findings, ways

KEEP = Script(1, 3, env=(("TTP_CONTINUITY", "keep"),))
BEFORE = {0: (10, True), 1: (11, True), 2: (12, True)}
COLD, ANEW = "restarts are cold: a reason", "ranks do not go on in their processes: a reason"


def evidence(after: dict[int, tuple[int, bool]], *events: Seen, reasons: tuple[str, ...] = ()) -> Evidence:
    """Return evidence of a failure: processes before and after it, and the events and reasons in between."""
    story = Story(script=KEEP)
    story.events = list(events or (seen("committed", AT_S + 0.05, version=5), released(again=True)))
    found = story.evidence()
    found.record.processes = {FIRST: dict(BEFORE), SECOND: after}
    found.record.reasons = list(reasons)
    return found


def released(*, again: bool, why: str = "") -> Seen:
    return seen("released", AT_S + 0.06, exit_code=75, again=again, why_not_again=why)


KEPT = {**BEFORE, 1: (21, True)}
FORKED = {rank: (20 + rank, True) for rank in range(3)}
STARTED = {rank: (20 + rank, False) for rank in range(3)}


@pytest.mark.parametrize(("after", "name"), [(KEPT, "kept"), (FORKED, "forked"), (STARTED, "started")])
def test_ways(after: dict[int, tuple[int, bool]], name: str) -> None:
    found = evidence(after, reasons=(ANEW,))
    assert way(found.record, SECOND) == name
    assert ways(found.record) == (name, ANEW)


def test_a_number_that_another_rank_had_is_another_process() -> None:
    assert way(evidence({0: (11, True), 1: (12, True), 2: (10, True)}).record, SECOND) == "forked"


COMMITTED = seen("committed", AT_S + 0.05, version=5)
GOOD = [
    evidence(KEPT),
    evidence(KEPT, replace(COMMITTED, kind="held"), released(again=True)),
    evidence(FORKED, COMMITTED, released(again=False, why="ranks go on only after deaths")),
    evidence(FORKED, reasons=(ANEW,)),
    evidence(STARTED, COMMITTED, released(again=False, why="no process to fork from is ready"), reasons=(COLD,)),
    replace(evidence(STARTED, COMMITTED, released(again=False, why="no process to fork from is ready")), cold=True),
]
BAD = [
    (evidence(KEPT, released(again=True), COMMITTED), "before a checkpoint was committed"),
    (evidence(KEPT, replace(COMMITTED, incident="another"), released(again=True)), "before a checkpoint was committed"),
    (evidence(FORKED, COMMITTED, released(again=False)), "the incident does not say why"),
    (evidence(FORKED), "no launcher logged why"),
    (evidence(STARTED, COMMITTED, released(again=False, why="x")), "as new interpreters, and no launcher logged why"),
]


@pytest.mark.parametrize("found", GOOD)
def test_whoever_looks_is_told_why(found: Evidence) -> None:
    assert list(way_findings(found)) == []


@pytest.mark.parametrize(("found", "text"), BAD)
def test_what_is_not_told_is_a_finding(found: Evidence, text: str) -> None:
    assert [text in finding for finding in way_findings(found)] == [True]


def test_a_job_that_is_about_something_else_has_no_findings() -> None:
    found = evidence(STARTED, COMMITTED)
    assert not list(way_findings(replace(found, script=Script(1, 3))))
