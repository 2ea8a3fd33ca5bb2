"""torchtitan's containers and its checkpoint manager: HSDP, killed in the phases of a step, ends with its bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

pytestmark = [pytest.mark.needs("torchtitan", "spmd_types"), pytest.mark.timeout(600)]


def test_it_is_killed_and_ends_with_its_bits(tmp_path: Path) -> None:
    kills = [
        kit.Kill("backward", rank=3),
        kit.Kill("in_step", rank=0),
        kit.Kill("stepped", rank=2, after=2),
    ]
    job = kit.Job("tests.frameworks.titan_program", kills, world_size=4, steps=8)
    found = kit.run(job, tmp_path, start=ForkedPython)
    print(found)
    found.check()
