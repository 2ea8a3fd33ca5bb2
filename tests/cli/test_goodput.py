"""``ttp goodput``: the histories of jobs, summed up."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ttp
from ttp.cli.goodput import PARTS
from ttp.store.history import FILE, line_of


def launch(at_s: float, *ends: tuple[str, float, dict[str, Any]], run_id: str = "job") -> str:
    begins = line_of("incarnation", at_s, {"run_id": run_id, "incarnation": 1})
    return begins + "".join(line_of(kind, when, facts) for kind, when, facts in ends)


def incident(place: Path, number: int, at_s: float, *lines: tuple[str, float, dict[str, Any]], **opened: Any) -> None:
    """Write a file of the journal; times are seconds after ``at_s``."""
    records = [("opened", 0.0, {"run_id": "job", **opened}), *lines]
    name = f"20261120-094512-{number}-abcd"
    text = "".join(
        json.dumps({"kind": kind, "unix_s": at_s + after, "monotonic_s": after, "incident": name, **facts}) + "\n"
        for kind, after, facts in records
    )
    (place / "incidents" / f"{name}.jsonl").write_text(text)


def history(place: Path, *launches: str) -> Path:
    """Write the record of these launches."""
    (place / "incidents").mkdir()
    (place / "incidents" / FILE).write_text("".join(launches))
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a job saved at 100 s, cut off at 200 s, then lost; with a false alarm and a save on request between."""
    story = launch(0.0, ("committed", 100.9, {"version": 7}), ("released", 101.0, {"exit_code": 75}))
    story += launch(131.0, ("restore", 135.0, {"version": 7}), ("released", 202.0, {"exit_code": 70}))
    began = [("formed", 304.0, {}), ("restore", 305.0, {"version": 7}), ("restored", 309.5, {"version": 7, "size": 8})]
    story += launch(302.0, *began, ("finished", 402.0, {"version": 20}))
    history(tmp_path, story, launch(1000.0, ("finished", 2000.0, {}), run_id="another"))
    answer = ("answer", 0.2, {"version": 7})
    plan, saved = ("plan", 0.25, {"version": 7}), ("committed", 0.9, {"version": 7})
    incident(tmp_path, 1, 100.0, answer, plan, saved, ("released", 1.0, {"exit_code": 75}))
    incident(tmp_path, 2, 140.0, ("answer", 0.1, {"version": 8}), ("thawed", 2.0, {"reason": "it came back"}))
    incident(tmp_path, 3, 150.0, ("thawed", 1.0, {"reason": "written"}), snapshot=True)
    incident(tmp_path, 4, 200.0, ("answer", 0.1, {"version": 9}), ("released", 2.0, {"exit_code": 70}))
    return tmp_path


Told = Callable[..., dict[str, Any]]


@pytest.fixture
def told(ttp: Ttp) -> Told:
    return lambda *argv: dict(ttp("goodput", *argv, "--json").json)


def test_what_the_time_went_into(place: Path, ttp: Ttp, told: Told) -> None:
    assert told(place, "--run-id", "job") == {
        "ratio": round(254.5 / 402.0, 4), "elapsed": 402.0, "joining": 6.0, "restoring": 5.5, "training": 254.5,
        "freezing": 5.25, "saving": 0.75, "down": 130.0, "launches": 3,
        "incidents": 2, "unrecorded": 0, "false_alarms": 1, "lost_steps": 2,
        "mttr": (31.0 + 102.0) / 2, "unreadable": 0, "clock_went_back": 0,
    }  # fmt: skip
    said = ttp("goodput", place, "--run-id", "job")
    first, _, third = said.out.splitlines()
    assert said.code == 0 and first.startswith("goodput 63.3% of") and first.endswith("in 3 launches")
    assert third.startswith("2 faults, 1 false alarm, 2 lost steps;")


WINDOWS = {
    "the beginning": ((0, 0.5), {"training": 0.5, "launches": 1, "incidents": 0}),
    "the first fault, saved": ((50, 115), {"training": 50.0, "freezing": 0.25, "saving": 0.75, "down": 14.0}),
    "nothing runs": ((110, 120), {"elapsed": 10.0, "down": 10.0, "launches": 0, "incidents": 0}),
    "a false alarm": ((133, 145), {"joining": 2.0, "training": 8.0, "freezing": 2.0, "false_alarms": 1}),
    "from the middle of an incident": ((201, 306), {"freezing": 1.0, "down": 100.0, "incidents": 0, "launches": 2}),
    "the second fault": ((190, 300), {"training": 10.0, "freezing": 2.0, "lost_steps": 2, "incidents": 1}),
    "the end": ((352, 1e12), {"elapsed": 50.0, "training": 50.0, "launches": 1, "lost_steps": 0, "ratio": 1.0}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_time(name: str, place: Path, told: Told) -> None:
    (since, until), wanted = WINDOWS[name]
    found = told(place, "--run-id", "job", "--since", since, "--until", until)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_windows_side_by_side_add_up(place: Path, told: Told) -> None:
    whole = told(place, "--run-id", "job")
    edges = [0, 100.5, 140.5, 200.1, 250, 304.5, 1e12]
    parts = [told(place, "--run-id", "job", "--since", a, "--until", b) for a, b in pairwise(edges)]
    for name in (*PARTS, "incidents", "false_alarms", "lost_steps", "unrecorded"):
        assert sum(part[name] for part in parts) == pytest.approx(whole[name]), name


def test_a_time_without_a_launch_is_said(place: Path, ttp: Ttp) -> None:
    nothing = ttp("goodput", place, "--since", "5000")
    assert nothing.code == 1 and "ran in that time" in nothing.err
    (place / "incidents" / FILE).unlink()
    nothing = ttp("goodput", place)
    assert nothing.code == 1 and "no launch is recorded" in nothing.err


def test_a_clock_that_was_set_back_is_said(tmp_path: Path, ttp: Ttp, told: Told) -> None:
    during = launch(5000.0, ("formed", 5002.0, {}), ("released", 100.0, {"exit_code": 75}))
    between = launch(101.0, ("released", 4101.0, {"exit_code": 75})) + launch(50.0, ("finished", 60.0, {}))
    found = told(history(tmp_path, during, between))
    assert (found["clock_went_back"], found["training"], found["down"]) == (1, 4000.0 + 10.0, 0.0)
    said = ttp("goodput", tmp_path)
    assert said.code == 0 and "the clock was set back during 1 launch: times are too short" in said.err


def restored(version: int, at_s: float) -> tuple[str, float, dict[str, Any]]:
    return "restored", at_s, {"version": version, "size": 8}


def released(after_s: float, code: int = 70) -> tuple[str, float, dict[str, Any]]:
    return "released", after_s, {"exit_code": code}


def test_steps_that_an_older_checkpoint_lacks_are_lost_when_it_is_restored(tmp_path: Path, told: Told) -> None:
    again = launch(100.0, restored(4, 105.0), ("finished", 200.0, {"version": 20}))
    history(tmp_path, launch(0.0, restored(9, 5.0), released(50.0, 75)), again)
    lost = [told(tmp_path, "--since", a, "--until", b)["lost_steps"] for a, b in ((0, 105), (105, 110))]
    assert lost == [0, 5]


def test_steps_that_an_earlier_job_has_saved_are_not_lost(tmp_path: Path, told: Told) -> None:
    history(tmp_path, launch(0.0, ("formed", 2.0, {}), restored(5000, 5.0), released(60.0)))
    incident(tmp_path, 1, 50.0, ("answer", 0.1, {"version": 5003}), released(2.0))
    assert told(tmp_path)["lost_steps"] == 3


def test_steps_are_lost_when_a_launch_begins_with_an_older_checkpoint(tmp_path: Path, told: Told) -> None:
    """The newest one was damaged, or moved away on purpose. Steps that are lost later count from the older one."""
    history(tmp_path, launch(0.0, released(60.0, 75)), launch(100.0, restored(600, 105.0), released(160.0)))
    incident(tmp_path, 1, 50.0, ("committed", 0.1, {"version": 900}), released(2.0, 75), newest=900)
    incident(tmp_path, 2, 150.0, released(2.0), newest=650)
    assert told(tmp_path)["lost_steps"] == (900 - 600) + (650 - 600)


def test_steps_are_lost_where_no_rank_is_left_to_answer(tmp_path: Path, told: Told) -> None:
    history(tmp_path, launch(0.0, released(60.0)))
    incident(tmp_path, 1, 50.0, released(2.0), newest=2900)
    assert told(tmp_path)["lost_steps"] == 2900


@pytest.mark.parametrize("earlier", [(), [("wrong", 59.0, {"text": "the disk is full"})]])
def test_a_fault_without_a_file_is_a_fault(
    earlier: list[tuple[str, float, dict[str, Any]]], tmp_path: Path, ttp: Ttp, told: Told
) -> None:
    """The disk was full: the file is in the run directory, if anywhere."""
    history(tmp_path, launch(0.0, *earlier, released(60.0)))
    incident(tmp_path, 1, 50.0, ("thawed", 2.0, {"reason": "asked for"}), snapshot=True)
    found = told(tmp_path)
    assert (found["incidents"], found["unrecorded"]) == (1, 1)
    for command, told_too in (
        (["goodput", tmp_path], "more steps may be lost"),
        (["incidents", tmp_path], "the incident that ended the last launch is not here"),
        (["incidents", tmp_path, "--last"], "the incident that ended the last launch is not here"),
    ):
        said = ttp(*command)
        assert said.code == 0 and told_too in said.err
    incident(tmp_path, 2, 55.0, released(5.0))
    assert told(tmp_path)["unrecorded"] == 0
    said = ttp("incidents", tmp_path)
    assert (said.code, said.err) == (0, "")


def test_a_launch_that_was_killed_whole_is_a_fault(tmp_path: Path, told: Told) -> None:
    """Power was cut, or everything got SIGKILL: nobody was left to record the end. An incident may have begun."""
    history(tmp_path, launch(0.0, ("formed", 2.0, {})), launch(100.0, ("finished", 200.0, {})))
    found = told(tmp_path)
    assert (found["incidents"], found["unrecorded"], found["mttr"]) == (1, 1, None)
    incident(tmp_path, 1, 20.0, ("answer", 0.1, {"version": 8}), ("thawed", 2.0, {"reason": "it came back"}), newest=8)
    incident(tmp_path, 2, 50.0, ("answer", 0.1, {"version": 40}), newest=39)
    found = told(tmp_path)
    assert (found["incidents"], found["unrecorded"], found["false_alarms"], found["lost_steps"]) == (1, 0, 1, 40)


def test_a_launch_that_was_cut_off_before_it_had_formed_loses_no_steps(tmp_path: Path, told: Told) -> None:
    found = told(history(tmp_path, launch(0.0), launch(100.0, ("finished", 200.0, {}))))
    assert (found["incidents"], found["unrecorded"], found["lost_steps"]) == (1, 0, 0)


def test_what_cannot_be_read_counts_as_nothing(place: Path, told: Told) -> None:
    before = told(place, "--run-id", "job")
    with (place / "incidents" / FILE).open("a") as log:
        log.write('{"kind": "released", "exit_co\n\n"garbage"\n')
    with (place / "incidents" / "20261120-094512-4-abcd.jsonl").open("a") as story:
        story.write('{"kind": "closed\x1b[31m')
    (place / "incidents" / "20261120-094512-5-abcd.jsonl").write_bytes(b"\0\xff[[")
    assert told(place, "--run-id", "job") == before | {"unreadable": 4}


def test_the_rest_of_a_line_in_a_long_history_could_be_read(
    place: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (place / "incidents" / FILE).stat().st_size
    monkeypatch.setattr("ttp.store.history.TAIL_BYTES", size - 20)
    found = told(place, "--run-id", "job")
    assert (found["launches"], found["unreadable"]) == (2, 0)
