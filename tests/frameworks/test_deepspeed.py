"""DeepSpeed's engine, ZeRO 0 and 2: killed in the phases of a step, it ends with its bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

pytestmark = [pytest.mark.needs("deepspeed"), pytest.mark.timeout(900)]
PROGRAM = "tests.frameworks.deepspeed_program"


def test_replicas_lose_no_step(tmp_path: Path) -> None:
    kills = [kit.Kill("backward", rank=1), kit.Kill("in_step", rank=0)]
    found = kit.run(kit.Job(PROGRAM, kills, steps=6, env={"PROGRAM_STAGE": "0"}), tmp_path, start=ForkedPython)
    print(found)
    found.check()


def test_partitions_come_back_from_their_copies(tmp_path: Path) -> None:
    kills = [kit.Kill("in_step", rank=0, after=5), kit.Kill("stepped", rank=1, after=4)]  # two steps for each update
    env = {"PROGRAM_STAGE": "2", "TTP_BUDDY_EVERY": "1"}
    found = kit.run(kit.Job(PROGRAM, kills, env=env), tmp_path, start=ForkedPython)
    print(found)
    assert not found.differences, f"{found}\n{found.story}"
    for row in found.rows:
        assert row.codes[row.kill.rank] == -9 and row.version is not None and row.lost <= 1, f"{found}\n{found.story}"
