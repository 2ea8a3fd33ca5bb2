"""``ttp incidents --trace``: the events for a trace viewer."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ttp
from tests.cli.test_incidents import SAVED, write


@pytest.fixture
def trace(tmp_path: Path, ttp: Ttp) -> dict[str, Any]:
    story = [*SAVED[:9], (9.05, "replan", {"generation": 1, "lost_savers": [0]}), *SAVED[9:]]
    write(tmp_path, "one", story)
    ttp("incidents", tmp_path, "--last", "--trace", tmp_path / "out.json")
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


def spans(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def test_times_are_microseconds_and_no_two_of_a_track_overlap(trace: dict[str, Any]) -> None:
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i"}
    for track in spans(trace).values():
        for before, after in itertools.pairwise(track):
            assert before["ts"] >= 0 and before["ts"] + before["dur"] <= after["ts"] + 1e-6
    commit = next(e for e in trace["traceEvents"] if e["name"] == "commit" and e["ph"] == "X")
    assert (commit["ts"], commit["dur"]) == pytest.approx((9100, 2900), abs=20)


def test_controller_and_ranks_have_their_tracks(trace: dict[str, Any]) -> None:
    stages = [span["name"] for span in spans(trace)[1_000_000, 1]]
    assert stages == ["freeze", "save", "freeze", "commit", "saved"]
    assert [span["name"] for span in spans(trace)[1, 2]] == ["saved", "committed"]
    assert {pid for pid, tid in spans(trace) if tid == 1} == {1, 2, 3, 1_000_000}, "three ranks have answered"
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"controller", "rank 0", "rank 1", "rank 2", "rank 3"}
    signs = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    accused = {event["pid"] for event in trace["traceEvents"] if event["name"].startswith("evidence")}
    assert accused == {1, 4}, "what is said of a rank is on its own track"
    assert "evidence: rank 3 was lost" in signs and trace["otherData"]["outcome"] == "exit 75: saved version 12"


def test_facts_of_odd_kinds_do_no_harm_and_one_incident_is_wanted(tmp_path: Path, ttp: Ttp) -> None:
    odd: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "opened", {}),
        (1.0, "plan", {"savers": [1]}),
        (1.5, "saved", {"rank": 1}),
        (2.0, "answer", {"ranks": ["x"]}),
    ]
    write(tmp_path, "one", odd)
    assert ttp("incidents", tmp_path, "--last", "--trace", tmp_path / "out.json").code == 0
    refused = ttp("incidents", tmp_path, "--trace", tmp_path / "out.json")
    assert refused.code == 64 and "--last" in refused.err
    assert ttp("incidents", tmp_path, "--last", "--trace", tmp_path / "no" / "out.json").code == 64
