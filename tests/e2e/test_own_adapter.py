"""The adapter that CONTRIBUTING.md walks through: a rank is killed, and the job ends with the right bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forking import ForkedPython
from ttp.store.catalog import newest_whole

FOLDER = Path(__file__).parents[2] / "examples" / "own_adapter"
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
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
    flags = ["--nproc-per-node", "2", "--max-restarts", "1"]
    script = [str(FOLDER / "train_numpy.py"), "--save-dir", str(tmp_path), "--steps", str(STEPS), "--kill", "20"]
    launcher = ForkedPython("ttp", ["run", *flags, *script], env, log := tmp_path / "log", cwd=tmp_path)
    try:
        assert launcher.wait(170) == 0, log.read_text()
    finally:
        launcher.terminate()
    saved = int(newest_whole(tmp_path)[0].name.rpartition("_")[2])
    assert saved in (19, 20), "rank 0 may not have begun the update that rank 1 was through"
    assert f"rank 1 begins with version {saved}" in log.read_text()
    for rank in range(2):
        assert (np.load(tmp_path / f"final_{rank}.npy") == unbroken()).all()
