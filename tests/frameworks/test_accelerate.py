"""A loop with Accelerate: accumulation, scalers, split batches, its loaders and registered objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

pytestmark = [pytest.mark.needs("accelerate", "torchdata"), pytest.mark.timeout(600)]
PROGRAM = "tests.frameworks.accelerate_program"


@pytest.mark.parametrize(
    "loop", ["scaler", *(pytest.param(loop, marks=pytest.mark.slow) for loop in ("", "bf16", "split"))]
)
def test_it_is_killed_and_ends_with_its_bits(loop: str, tmp_path: Path) -> None:
    kills = [kit.Kill("backward", rank=1), kit.Kill("stepped", rank=0, after=3)]
    found = kit.run(kit.Job(PROGRAM, kills, steps=12, env={"LOOP": loop}), tmp_path, start=ForkedPython)
    print(found)
    found.check()
