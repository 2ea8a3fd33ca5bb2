"""Every group of the benchmarks runs, small. What it measures is not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).parents[1]


WITH_TORCH = ["steady", "buddy", "save", "gpu"]
"""Those that import it themselves; the others leave that to the ranks that they start."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_torch", [True, False])
def test_groups_run(with_torch: bool, tmp_path: Path) -> None:
    """Several in one process, as people run them: most of the time of a small one goes into imports."""
    names = [
        name for name in benchmarks.GROUPS if (name in WITH_TORCH) == with_torch and not (name == "gpu" and no_gpu())
    ]
    found = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *names, "--quick", "--json", str(found)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(found.read_text())["results"]
    assert all(row["value"] == row["value"] and row["what"] for row in rows)
    assert {row["group"] for row in rows} == set(names)


def no_gpu() -> bool:
    return bool(benchmarks.lacking("gpu"))


def test_a_group_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nonsense", "--quick"])
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert ended.value.code == 2 and "no benchmark is called nonsense" in capsys.readouterr().err
