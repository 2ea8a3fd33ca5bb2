"""The report page that is written from the results of a campaign."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ttp.chaos.report import Occasion, by_phase, by_title, coverage, findings, manner, page, spread
from ttp.chaos.result import FILE, Result, read, write
from ttp.errors import ConfigError


def result(
    title: str = "kill a rank",
    phase: str = "data",
    outcome: str = "saved",
    *,
    expect: str = "saved",
    detect_ms: float | None = 2.0,
    problems: tuple[str, ...] = (),
    missed: tuple[str, ...] = (),
    lost: int = 0,
) -> Result:
    return Result(
        job=3, folder="job-003", title=title, phase=phase, step=4, faults=("kill rank 1",), world="1x3", launcher="ttp",
        expect=expect, outcome=outcome, findings=problems, missed=missed, version=5, lost_steps=lost,
        detect_ms=detect_ms, commit_ms=50.0, back_ms=4000.0,
    )  # fmt: skip


RESULTS = [
    result(),
    result(phase="backward", detect_ms=4.0),
    result(outcome="lost", detect_ms=None, problems=("2 finished steps are lost",), lost=2),
    result("pause a rank", outcome="unhurt", expect="unhurt", detect_ms=None),
    result("pause a rank", outcome="saved", expect="unhurt", problems=("a healthy job was restarted",)),
]


def test_coverage_counts_what_had_to_be_saved() -> None:
    assert coverage(RESULTS) == (2, 3)
    assert coverage([result(outcome="kept")]) == (1, 1)
    assert coverage([result(outcome="gone")]) == (0, 1)
    assert coverage([result(expect="any", outcome="gone")]) == (0, 0)


def test_outcomes_and_times_by_fault() -> None:
    lines = by_title(RESULTS).splitlines()
    assert lines[0].startswith("| fault | runs | saved | unhurt | lost | detected")
    assert lines[2].startswith("| kill a rank | 3 | 2 |  | 1 | 4 / 4 / 4 | 50 / 50 / 50 |")
    assert lines[3].startswith("| pause a rank | 2 | 1 | 1 |  | 2 / 2 / 2 |")
    assert lines[4].startswith("| **all others** | 5 | 3 | 1 | 1 |")


@pytest.mark.parametrize(
    ("faults", "name"),
    [
        (("kill rank 1", "kill controller"), "all others"),
        (("kill host 1",), "all silent hosts"),
        (("partition host 0", "heal host 0"), "all silent hosts"),
        (("stop controller", "kill rank 1", "cont controller"), "all that stand still"),
    ],
)
def test_what_is_noticed_alike_is_counted_together(faults: tuple[str, ...], name: str) -> None:
    assert manner(replace(result(), faults=faults)) == name


def test_phases_are_in_the_order_of_a_step() -> None:
    lines = by_phase([*RESULTS, result(phase="at plan")]).splitlines()
    assert lines[0] == "| fault | data | backward | at plan |"
    assert lines[2] == "| kill a rank | 1 saved, 1 lost | 1 saved | 1 saved |"


def test_findings_say_which_job_and_what() -> None:
    text = findings([*RESULTS, result(missed=("r1 second: there is no saver to kill",))])
    assert "- kill a rank, data, `job-003`: 2 finished steps are lost" in text
    assert "In 1 runs a later fault was not injected" in text
    assert findings([result()]) == "None."


def test_the_page_says_how_to_repeat_it_and_what_was_lost() -> None:
    text = page(RESULTS, Occasion("ttp chaos --runs 5 --seed 1", "2 cores", 300))
    assert "`ttp chaos --runs 5 --seed 1`" in text
    assert "5 runs in 1 jobs, 5 minutes" in text
    assert "| of these committed (**coverage**) | 2: **0.667** |" in text
    assert "| finished steps lost in them | 2 |" in text
    assert "| healthy jobs that were restarted | 1 of 2 |" in text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([None], ""),
        ([3.0], "3 / 3 / 3"),
        ([1.0, 2.0, 300.0], "2 / 300 / 300"),
        ([float(v) for v in range(1, 202)], "101 / 199 / 201"),
    ],
)
def test_spread(values: list[float | None], text: str) -> None:
    assert spread(values) == text


def test_results_are_read_back(tmp_path: Path) -> None:
    for one in RESULTS:
        write(tmp_path / FILE, one)
    assert read(tmp_path / FILE) == RESULTS
    (tmp_path / "other").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="does not hold the results"):
        read(tmp_path / "other")
