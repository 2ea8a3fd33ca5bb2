"""The README's first command after installation, and the other examples."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

from tests.forking import ForkedPython
from tests.ports import free_port
from ttp.cli.main import main
from ttp.store.catalog import newest_whole

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENT = ["--limit-s", "500"]  # a run of four ranks on a busy machine is slow, not stuck


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}


def assert_nothing_lost(output: str, killed: str) -> None:
    lines = {tuple(line.split()[:3]) for line in output.splitlines()}
    for what in (("final", "weights"), ("optimizer", "state"), ("loss", "curve")):
        assert (*what, "identical") in lines, output
    assert ("lost", "steps", "0") in lines and ("killed", "rank", killed) in lines


class Launcher(ForkedPython):
    """``python -m MODULE`` for the demo, with its output line by line."""

    def __init__(self, command: list[str], *, stderr: IO[str], env: dict[str, str], **_: Any) -> None:
        self._output = Path(stderr.name).with_suffix(".out")
        self._output.touch()
        super().__init__(command[2], command[3:], env, self._output)

    @property
    def stdout(self) -> Iterator[str]:
        with self._output.open() as output:
            while self.poll() is None:
                yield from output
                time.sleep(0.01)
            yield from output


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("demo")
def test_the_demo_loses_no_step_and_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two ranks, which are forked; ``make demo`` has four."""
    monkeypatch.syspath_prepend(EXAMPLES)
    made, program = (importlib.import_module(name) for name in ("job", "demo"))
    monkeypatch.setattr(made, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Launcher}))
    arguments = ["--folder", str(tmp_path / "demo"), *PATIENT, "--ranks", "2", "--steps", "40"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    for name, value in {"RANK": "0", "SEED": "7", "GRPC_VERBOSITY": "NONE"}.items():
        monkeypatch.setenv(name, value)
    assert program.main() == 0, capsys.readouterr()
    assert_nothing_lost(capsys.readouterr().out, "0")
    assert main(["incidents", str(tmp_path / "demo" / "broken" / "checkpoints"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("demo")
def test_the_demo_as_a_user_starts_it_shows_why_its_job_failed(tmp_path: Path) -> None:
    """Nothing is forked here: its command, that of its launcher, and the rank, which leaves with 64, are a user's."""
    place = tmp_path / "demo" / "unbroken" / "checkpoints"
    place.parent.mkdir(parents=True)
    place.touch()
    arguments = ["--folder", str(tmp_path / "demo"), *PATIENT, "--ranks", "1", "--steps", "2", "--", "--seed", "3"]
    command = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1 and "$ ttp run --nproc-per-node 1" in done.stdout, done.stdout + done.stderr
    assert "train.py --steps 2" in done.stdout and "--seed 3\n" in done.stdout
    assert "the job ended with exit code 64" in done.stderr
    assert f"save_dir {place} cannot hold checkpoints" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("flags", ["--layout hsdp", "--layout hsdp --precision bf16", "--layout ddp --precision bf16"])
@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_gpt_in_every_layout_loses_no_step_and_no_bit(tmp_path: Path, flags: str, rank: str) -> None:
    arguments = ["--folder", str(tmp_path / "demo"), *PATIENT, "--example", "gpt", "--steps", "30", "--"]
    command = [sys.executable, str(EXAMPLES / "demo.py"), *arguments, *flags.split()]
    env = clean() | {"RANK": rank, "SEED": "7"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_nothing_lost(done.stdout, rank)


@pytest.mark.timeout(240)
def test_the_gpt_trains_on_a_text_of_the_users_own(tmp_path: Path) -> None:
    """With two ranks, without ttp. Launchers and faults are tested above."""
    (tmp_path / "text").write_bytes(b"abcd" * 20)
    sizes = {"steps": 12, "lr": 0.1, "layers": 1, "heads": 2, "width": 16, "context": 8, "batch": 4}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))] + ["--precision", "bf16"]
    place = ["--text", str(tmp_path / "text"), "--save-dir", str(tmp_path / "out")]
    env = clean() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program, logs = EXAMPLES / "gpt" / "train_gpt.py", [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [ForkedPython(program, small + place, env | {"RANK": str(rank)}, logs[rank]) for rank in range(2)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [log.read_text() for log in logs]
    finally:
        for process in ranks:
            process.kill()
    losses = [float(line.split()[-1]) for line in logs[0].read_text().splitlines() if line.startswith("step ")]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2  # there is nothing but four letters in turn
    assert json.loads((tmp_path / "out" / "result.json").read_text()).keys() >= {"weights", "optimizer", "losses"}


STEPS = 40


def unbroken() -> Any:
    """Return the final weights, computed here: the formula of ``Sgd.step`` on the sums of both ranks."""
    weights, moments = np.zeros(1000), np.zeros(1000)
    for step in range(STEPS):
        total = sum(np.random.default_rng([step, rank]).integers(-8, 9, size=1000).astype(float) for rank in range(2))
        moments = moments * 0.5 + total
        weights = weights - 0.125 * moments
    return weights


@pytest.mark.timeout(180)
def test_the_adapter_of_the_walk_loses_no_step_and_no_bit(tmp_path: Path) -> None:
    """That of CONTRIBUTING.md."""
    flags = ["--nproc-per-node", "2", "--max-restarts", "1"]
    script = [EXAMPLES / "own_adapter" / "train_numpy.py", "--save-dir", tmp_path, "--steps", STEPS, "--kill", 20]
    launcher = ForkedPython("ttp", ["run", *flags, *script], clean(), log := tmp_path / "log", cwd=tmp_path)
    try:
        assert launcher.wait(170) == 0, log.read_text()
    finally:
        launcher.terminate()
    saved = int(newest_whole(tmp_path)[0].name.rpartition("_")[2])
    assert saved in (19, 20), "rank 0 may not have begun the update that rank 1 was through"
    assert f"rank 1 begins with version {saved}" in log.read_text()
    for rank in range(2):
        assert (np.load(tmp_path / f"final_{rank}.npy") == unbroken()).all()
