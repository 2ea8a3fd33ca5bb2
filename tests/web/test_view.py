"""The contents of the page: which ranks are late, who waits for what, and incidents."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.test_incidents import SAVED, write
from ttp.cli.incident_reader import read_incident
from ttp.cli.status import picture
from ttp.cli.trace_events import trace_text
from ttp.web.looks import Incidents, Progress
from ttp.web.story import LANES_MAX, story
from ttp.web.view import Pace, tell, view
from ttp.wire.v1 import controller_pb2 as pb


def status(stage: str, states: str, version: int = 8, **changes: Any) -> pb.GetStatusResponse:
    """Return a job whose ranks have these states: one letter each."""
    words = {"l": "live", "f": "frozen", "x": "lost", "m": "missing", "r": "released"}
    ranks = [
        pb.RankStatus(rank=r, host=f"n{r // 2}", pid=100 + r, version=version, state=words[s], silent_s=0.1)
        for r, s in enumerate(states)
    ]
    now = pb.GetStatusResponse(stage=stage, run_id="job", world_size=len(states), ranks=ranks, incarnation=1)
    now.groups.extend([pb.ShardGroup(name="a", ranks=[0, 2]), pb.ShardGroup(name="b", ranks=[1, 3])])
    for name, value in changes.items():
        setattr(now, name, value)
    return now


def test_after_a_takeover_the_count_of_incidents_says_since_when() -> None:
    def shown(term: int) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(picture(status("training", "llll", term=term)))
        text: str = console.file.getvalue()  # type: ignore[attr-defined] # a StringIO
        return text

    assert "0 incidents since this controller took over" in shown(2) and "since" not in shown(1)


def test_who_waits_for_whom_while_a_job_forms() -> None:
    assert view(status("forming", "llml"), None)["waits"] == ["3 of 4 ranks joined; rank 2 not yet"]
    assert "launchers" in view(status("waiting", "rrxr"), None)["waits"][0]


def test_a_rank_is_late_when_others_were_ahead_of_it_for_some_time() -> None:
    now = status("training", "llll")
    now.ranks[3].version = 5
    assert view(now, None)["late"] == [], "its beat may be a second old"
    seen = view(now, None, Pace(passed=8))
    assert (seen["late"], seen["waits"]) == (
        [3],
        ["the others wait for rank 3: at version 5, while others have finished 8"],
    )
    now.ranks[3].silent_s = 12.0
    assert view(now, None)["waits"] == ["rank 3 on n1 has been silent for 12.0 s"]
    assert "no rank has finished a step for 42.0 s" in view(now, None, Pace(still_s=42))["waits"]


def test_pace_comes_from_what_was_seen_seconds_ago() -> None:
    progress, now = Progress(), status("training", "llll")
    assert progress.at(now, 10.0) == Pace(0, 0.0)
    for rank in now.ranks:
        rank.version = 9
    assert progress.at(now, 11.0) == Pace(0, 0.0) and progress.at(now, 13.5) == Pace(8, 2.5)
    assert progress.at(now, 14.5) == Pace(9, 3.5)
    now.incarnation = 2
    assert progress.at(now, 15.0) == Pace(0, 0.0), "a new launch begins where the last one was saved"


def test_the_thinnest_group_comes_first() -> None:
    shown = view(status("freezing", "flxf"), None)
    assert [(g["name"], g["living"], g["gone"]) for g in shown["groups"]] == [("a", 1, "2"), ("b", 2, "")]
    assert shown["waits"] == ["ranks 0,3 frozen; waiting for the answer of rank 1"]


@pytest.mark.parametrize(
    ("stage", "lines", "said"),
    [
        ("saving", 8, "all ranks wait for rank 0 to write version 12"),
        ("committing", 10, "all ranks wait for rank 0, "),
    ],
)
def test_who_writes_comes_from_the_incident(tmp_path: Path, stage: str, lines: int, said: str) -> None:
    log = read_incident(write(tmp_path, "one", SAVED[:lines]))
    now = status(stage, "fffx")
    now.last_incident.CopyFrom(pb.IncidentStatus(id="one", stage=stage, cause="?"))
    shown = view(now, log)
    assert shown["waits"][0].startswith(said)
    assert (shown["incident"]["dead"], shown["incident"]["cause"]) == ([3], "rank 3 was lost")
    assert shown["incident"]["good"] is None and shown["incident"]["open"]


def test_what_was_saved(tmp_path: Path) -> None:
    now = status("waiting", "rrrx")
    now.last_incident.CopyFrom(
        pb.IncidentStatus(id="one", stage="closed", cause="c", outcome="o", path="/x", version=12)
    )
    assert view(now, None)["incident"]["saved"] == "version 12", "where no file can be read"
    shown = view(now, read_incident(write(tmp_path, "one", SAVED)))["incident"]
    assert (shown["saved"], shown["good"]) == ("version 12, durable 12 ms after the first sign", True)
    assert view(now, read_incident(write(tmp_path, "two", SAVED)))["incident"]["told"] is False, "another incident"


def test_an_incident_has_a_lane_for_each_rank_that_matters(tmp_path: Path) -> None:
    lanes = story(read_incident(write(tmp_path, "one", SAVED)))["lanes"]
    assert [lane["label"] for lane in lanes] == ["rank 3", "rank 0", "rank 0 writes", "rank 1", "rank 2"]
    assert [span["kind"] for span in lanes[0]["spans"]] == ["lost"]
    assert [span["kind"] for span in lanes[2]["spans"]] == ["saved", "committed"]


@pytest.mark.parametrize("together", [1, 4096])
def test_four_thousand_ranks_share_lanes(tmp_path: Path, together: int) -> None:
    """Ranks with equal answers may be in one line of the file."""
    said = [list(range(4096))[first : first + together] for first in range(4, 4096, together)]
    answers = [(1.0 + r[0] / 1e3, "answer", {"ranks": r, "version": 12, "phase": "idle"}) for r in said]
    log = read_incident(write(tmp_path, "one", [*SAVED[:7], *answers, *SAVED[7:]]))
    assert len(trace_text(log)) < 4_000_000
    told = story(log)
    assert len(told["lanes"]) <= LANES_MAX + 4 and told["lanes"][-1]["label"] == f"{4096 - LANES_MAX + 4} ranks"
    assert len(json.dumps(told)) < 100_000


def test_incidents_of_two_places_are_one_list_and_are_read_once(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "save", "one", SAVED[:5])
    write(tmp_path / "run", "one", SAVED)
    found = Incidents(tmp_path / "save")
    found.belong_to("", tmp_path / "run")
    assert found.look() and [one["outcome"] for one in found.listed] == ["exit 75: saved version 12"]
    story_read = found.read("one")
    assert story_read is not None and len(story_read.lines) == len(SAVED)
    assert found.read("../one") is None and not found.look()
    monkeypatch.setattr("ttp.web.looks.read_incident", None)
    assert not found.look(), "nothing has changed: nothing is read"


def test_what_the_others_wait_for_in_each_stage_is_said(tmp_path: Path) -> None:
    """Nothing is said of a job in which nobody waits."""

    def waits(stage: str, states: str, story: Any = None, **changes: Any) -> list[str]:
        log = None if story is None else read_incident(write(tmp_path / stage, str(len(story)), story))
        now = status(stage, states, **changes)
        now.last_incident.id = "" if log is None else log.id
        found: list[str] = view(now, log)["waits"]
        return found

    undecided = [*SAVED[:4], (1.0, "waits", {"reason": "rank 1 may supply version 13"})]
    assert waits("freezing", "ffff", undecided) == ["no plan yet: rank 1 may supply version 13"]
    assert waits("saving", "ffff") == ["all ranks wait for the ranks that write"]
    assert waits("saving", "ffff", SAVED[:8]) == ["all ranks wait for rank 0 to write version 12"]
    assert waits("saving", "ffff", SAVED[:9]) == []
    assert waits("released", "frrr") == ["rank 0 has not left yet"]
    assert waits("saved", "llrr") == ["ranks 0-1 have not left yet"]
    assert waits("released", "rrrr") == [] and waits("forming", "llll") == []


def test_pauses_are_shown_by_what_the_ranks_do() -> None:
    now = status("training", "llll")
    for rank in (now.ranks[0], now.ranks[2]):
        rank.activity = "evaluation"
    assert view(now, None)["waits"] == ["ranks 0,2: evaluation"]


def test_what_became_of_an_incident_is_told(tmp_path: Path) -> None:
    """A checkpoint in memory is not yet saved; a false alarm ends well; an incident that is open has no end."""
    ends = {
        "held": [*SAVED[:8], (9.0, "held", {"version": 12})],
        "nothing_new": [*SAVED[:8], (9.0, "nothing_new", {"version": 12}), (10.0, "released", {"exit_code": 75})],
        "thawed": [*SAVED[:3], (9.0, "thawed", {"reason": "rank 3 came back"})],
    }
    told = {end: tell(read_incident(write(tmp_path, end, story))) for end, story in ends.items()}
    assert told["held"]["saved"] == "version 12 is held in memory, but not durable yet" and "good" not in told["held"]
    assert (told["nothing_new"]["saved"], told["nothing_new"]["good"]) == ("version 12 was already on disk", True)
    assert told["thawed"]["good"] is True and "saved" not in told["thawed"]
