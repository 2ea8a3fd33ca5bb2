"""``ttp chaos`` as a command: wrong arguments are refused before any job is hurt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.test_report import result
from tests.cli.conftest import Ttp, ttp
from ttp.chaos import runner, world
from ttp.chaos.reading import read
from ttp.chaos.result import FILE, Result
from ttp.chaos.script import Script
from ttp.cli import chaos

__all__ = ["ttp"]


def test_drawn_scripts_are_written_and_nobody_is_hurt(tmp_path: Path, ttp: Ttp) -> None:
    said = ttp("chaos", "--draw", "--runs", 30, "--seed", 1, "--out", tmp_path)
    scripts = [read(path) for path in sorted(tmp_path.glob("*.toml"))]
    assert sum(len(script.runs) for script in scripts) == 30
    assert said.code == 0 and f"{len(scripts)} scripts" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--script", "nowhere.toml"], "cannot read the script nowhere.toml"),
        (["--include", "hangs"], "did you mean 'hang'?"),
        (["--only", "99"], "there are"),
        (["--match", "meteor"], "no kind of run has this in its title"),
        (["--runs", "0"], "--runs"),
        (["--report", "results.md"], "--draw runs nothing"),
        (["--sed", "1"], "--sed"),
    ],
)
def test_bad_usage(arguments: list[str], said: str, tmp_path: Path, ttp: Ttp) -> None:
    refused = ttp("chaos", "--draw", "--out", tmp_path / "out", *arguments)
    assert refused.code == 64 and said in refused.err


TWO_HOSTS = Path(__file__).parents[2] / "examples" / "chaos" / "two-hosts.toml"


def test_another_campaign_is_not_overwritten_and_several_hosts_are_refused_where_there_is_one(
    tmp_path: Path, ttp: Ttp
) -> None:
    (tmp_path / FILE).write_text("")
    refused = ttp("chaos", "--plain", "--out", tmp_path)
    assert refused.code == 64 and "holds another campaign" in refused.err
    refused = ttp("chaos", "--plain", "--script", TWO_HOSTS, "--out", tmp_path / "out")
    assert refused.code == 64 and "needs several hosts" in refused.err


class Campaign:
    """Stands for the runner: tells these results without hurting a job, and notes what it was asked to run."""

    results: Sequence[Result] = ()
    asked: tuple[list[str], int, int]

    def __init__(self, folder: Path, tell: Callable[[Result], None], keep: bool) -> None:
        self._tell = tell

    def run(self, scripts: Sequence[Script], jobs: int, first: int) -> None:
        Campaign.asked = [run.title for script in scripts for run in script.runs], jobs, first
        for each in self.results:
            self._tell(each)


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> type[Campaign]:
    monkeypatch.setattr(runner, "Runner", Campaign)
    monkeypatch.setattr(
        Campaign, "results", [result(), result(outcome="lost", problems=("2 finished steps are lost",))]
    )
    return Campaign


def test_findings_are_told_and_are_the_exit_code(
    campaign: type[Campaign], tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is written after every run, and says how to repeat the campaign."""
    report = tmp_path / "report.md"
    drawn = ["--seed", "1", "--runs", "2", "--jobs", "2", "--match", "kill", "--include", "hang"]
    said = ttp("chaos", "--plain", *drawn, "--out", tmp_path / "one", "--report", report)
    assert said.code == 1 and "1/2" in said.err and "2 finished steps are lost" in said.err
    assert "1 of 2 states with a consistent checkpoint committed" in said.out and "1 run with findings" in said.out
    assert "ttp chaos --runs 2 --seed 1 --jobs 2 --include hang --match 'kill'" in report.read_text()
    monkeypatch.setattr(campaign, "results", [result()])
    said = ttp("chaos", "--plain", "--json", "--out", tmp_path / "two")
    (only,) = said.json
    assert (said.code, only["outcome"], only["findings"]) == (0, "saved", [])


def test_on_a_terminal_only_runs_with_findings_have_a_line(
    campaign: type[Campaign], ttp: Ttp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The progress bar stands for the others."""
    monkeypatch.setattr(chaos, "aside", lambda: Console(file=sys.stderr, force_terminal=True, width=200))
    said = ttp("chaos", "--plain", "--runs", 2, "--out", tmp_path / "out")
    assert said.code == 1 and "1/2  job-003" not in said.err and "2/2  job-003" in said.err


def test_one_job_of_a_campaign_or_a_script_can_be_run_alone(
    campaign: type[Campaign], tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the number that it had in the campaign."""
    monkeypatch.setattr(campaign, "results", [])
    drawn = ("chaos", "--plain", "--seed", 1, "--runs", 30)
    assert ttp(*drawn, "--out", tmp_path / "all").code == 0
    everything, _, _ = campaign.asked
    assert ttp(*drawn, "--only", 2, "--out", tmp_path / "one").code == 0
    assert campaign.asked[2] == 2 and 0 < len(campaign.asked[0]) < len(everything)
    assert ttp("chaos", "--draw", "--script", TWO_HOSTS, "--out", tmp_path / "script").code == 0
    assert [path.name for path in (tmp_path / "script").iterdir()] == ["job-000.toml"]


def test_where_namespaces_can_be_made_the_campaign_runs_in_its_own(
    campaign: type[Campaign], tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is that of the command inside."""
    monkeypatch.setattr(world, "obstacle", lambda: "")
    monkeypatch.setattr(world, "enter", lambda arguments: 1)
    assert ttp("chaos", "--out", tmp_path / "out").code == 1 and not (tmp_path / "out").exists()
    settled: list[bool] = []
    monkeypatch.setattr(world, "inside", lambda: True)
    monkeypatch.setattr(world, "settle", lambda: settled.append(True))
    monkeypatch.setattr(campaign, "results", [])
    assert ttp("chaos", "--out", tmp_path / "out", "--runs", 1).code == 0 and settled
