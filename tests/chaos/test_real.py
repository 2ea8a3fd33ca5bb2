"""Faults in real jobs, and the processes that are left when the injecting process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

PATIENCE_S = 200
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chaos"), pytest.mark.timeout(PATIENCE_S + 60)]
ONE_KILL = """
ranks_per_host = 2
steps = 6

[[fault]]
step = 2
phase = "backward"
who = "rank 0"
what = "kill"
"""
HELD_LONG = """
ranks_per_host = 2
steps = 6

[[fault]]
name = "paused"
step = 1
phase = "data"
who = "all"
what = "stop"
expect = "unhurt"

[[fault]]
after = "paused"
seconds = 600
who = "all"
what = "cont"
"""


def command(folder: Path, text: str, *flags: str) -> list[str]:
    script = folder / "chaos.toml"
    script.write_text(text)
    return [sys.executable, "-m", "ttp", "chaos", "--script", str(script), "--out", str(folder / "out"), *flags]


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "CHAOS_", "TORCHELASTIC"))}


def run(folder: Path, text: str, *flags: str) -> list[dict[str, Any]]:
    """Return the runs' results; asserts that there are no findings."""
    done = subprocess.run(
        command(folder, text, "--json", *flags),
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def test_a_rank_is_killed_and_all_is_checked(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    (only,) = run(tmp_path, ONE_KILL, "--report", str(page))
    assert (only["outcome"], only["version"], only["lost_steps"]) == ("saved", 2, 0)
    assert only["faults"] == ["kill rank 0"] and not only["missed"]
    assert "**1.000**" in page.read_text()


def test_this_machine_as_the_only_host(tmp_path: Path) -> None:
    (only,) = run(tmp_path, ONE_KILL, "--plain")
    assert only["outcome"] == "saved"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_it_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    """Stopped ranks cannot end by themselves, so the kernel has to end them."""
    chaos = subprocess.Popen(command(tmp_path, HELD_LONG), env=clean_environment(), stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(stopped(tmp_path)) == 2, PATIENCE_S / 2)
        chaos.send_signal(how)
        chaos.wait(60)
        until(lambda: not ours(tmp_path), PATIENCE_S / 2)
    finally:
        for process in ours(tmp_path):
            with contextlib.suppress(psutil.Error):
                process.kill()
        chaos.kill()
        chaos.wait()


def ours(folder: Path) -> list[psutil.Process]:
    """Return the processes of jobs below ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("CHAOS_DIR", "").startswith(str(folder)):
                found.append(process)
    return found


def stopped(folder: Path) -> list[psutil.Process]:
    return [process for process in ours(folder) if process.status() == psutil.STATUS_STOPPED]
