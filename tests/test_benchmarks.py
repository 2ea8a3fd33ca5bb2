"""Every group of the benchmarks runs, small. What it measures is not looked at."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

benchmarks: Any = importlib.import_module("benchmarks.__main__")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", benchmarks.GROUPS)
def test_a_group_runs(name: str, tmp_path: Path) -> None:
    lacking = benchmarks.NEEDS[name]() if name in benchmarks.NEEDS else ""
    if lacking:
        pytest.skip(lacking)
    found = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(found)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(found.read_text())["results"]
    assert results and all(result["value"] == result["value"] and result["what"] for result in results)


def test_a_group_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nonsense", "--quick"])
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert ended.value.code == 2 and "no benchmark is called nonsense" in capsys.readouterr().err
