"""``ttp chaos`` as a command: wrong arguments are refused before any job is hurt."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.chaos.reading import read
from ttp.chaos.result import FILE
from ttp.cli.main import main


def test_drawn_scripts_are_written_and_nobody_is_hurt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--draw", "--runs", "30", "--seed", "1", "--out", str(tmp_path)]) == 0
    scripts = [read(path) for path in sorted(tmp_path.glob("*.toml"))]
    assert sum(len(script.runs) for script in scripts) == 30
    assert f"{len(scripts)} scripts" in capsys.readouterr().out


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
def test_bad_usage(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--draw", "--out", str(tmp_path / "out"), *arguments]) == 64
    assert said in capsys.readouterr().err


def test_another_campaign_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_text("")
    assert main(["chaos", "--plain", "--out", str(tmp_path)]) == 64
    assert "holds another campaign" in capsys.readouterr().err


def test_several_hosts_are_refused_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "chaos" / "two-hosts.toml"
    assert main(["chaos", "--plain", "--script", str(script), "--out", str(tmp_path / "out")]) == 64
    assert "needs several hosts" in capsys.readouterr().err
