"""The README's first command after installation, and the other examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import PYTHON_BIN
from tests.forking import ForkedPython
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def demo(folder: Path, *arguments: str, **env: str) -> set[tuple[str, ...]]:
    """Run the demo to its end and return the first three words of each of its lines."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
    patient = ["--limit-s", "500"]  # a run of four ranks on a busy machine is slow, not stuck
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--folder", str(folder), *patient, *arguments]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {tuple(line.split()[:3]) for line in done.stdout.splitlines()}


def assert_nothing_lost(lines: set[tuple[str, ...]], killed: str) -> None:
    for what in (("final", "weights"), ("optimizer", "state"), ("loss", "curve")):
        assert (*what, "identical") in lines, lines
    assert ("lost", "steps", "0") in lines and ("killed", "rank", killed) in lines


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("demo")
def test_the_demo_loses_no_step_and_no_bit(tmp_path: Path) -> None:
    """With two ranks; ``make demo`` has four."""
    lines = demo(tmp_path / "demo", "--ranks", "2", "--steps", "40", RANK="0", SEED="7")
    assert_nothing_lost(lines, "0")
    incidents = [str(PYTHON_BIN / "ttp"), "incidents", str(tmp_path / "demo" / "broken" / "checkpoints"), "--json"]
    listed = json.loads(subprocess.run(incidents, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert len(listed) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("flags", ["--layout hsdp", "--layout hsdp --precision bf16", "--layout ddp --precision bf16"])
@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_gpt_in_every_layout_loses_no_step_and_no_bit(tmp_path: Path, flags: str, rank: str) -> None:
    lines = demo(tmp_path / "demo", "--example", "gpt", "--steps", "30", "--", *flags.split(), RANK=rank, SEED="7")
    assert_nothing_lost(lines, rank)


@pytest.mark.timeout(240)
def test_the_gpt_trains_on_a_text_of_the_users_own(tmp_path: Path) -> None:
    """With two ranks, without ttp. Launchers and faults are tested above."""
    (tmp_path / "text").write_bytes(b"abcd" * 20)
    sizes = {"steps": 12, "lr": 0.1, "layers": 1, "heads": 2, "width": 16, "context": 8, "batch": 4}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))] + ["--precision", "bf16"]
    place = ["--text", str(tmp_path / "text"), "--save-dir", str(tmp_path / "out")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
    clean |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program, logs = EXAMPLES / "gpt" / "train_gpt.py", [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [ForkedPython(program, small + place, clean | {"RANK": str(rank)}, logs[rank]) for rank in range(2)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [log.read_text() for log in logs]
    finally:
        for process in ranks:
            process.kill()
    losses = [float(line.split()[-1]) for line in logs[0].read_text().splitlines() if line.startswith("step ")]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2  # there is nothing but four letters in turn
    assert json.loads((tmp_path / "out" / "result.json").read_text()).keys() >= {"weights", "optimizer", "losses"}
