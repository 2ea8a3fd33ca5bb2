"""The main job, as the README's first command runs it after installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import PYTHON_BIN

DEMO = Path(__file__).parents[2] / "examples" / "digits" / "demo.py"


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ttp")
def test_the_demo_loses_no_step_and_no_bit(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
    env |= {"RANK": "0", "SEED": "7"}
    command = [sys.executable, str(DEMO), "--steps", "40", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {tuple(line.split()[:3]) for line in done.stdout.splitlines()}
    for what in (("final", "weights"), ("optimizer", "state"), ("loss", "curve")):
        assert (*what, "identical") in lines, done.stdout
    assert ("lost", "steps", "0") in lines and ("killed", "rank", "0") in lines
    incidents = [str(PYTHON_BIN / "ttp"), "incidents", str(tmp_path / "demo" / "broken" / "checkpoints"), "--json"]
    listed = json.loads(subprocess.run(incidents, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert len(listed) == 1
