"""torchtitan's Trainer: killed in each phase of a step, a job ends with the bits of the unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.conftest import MAY_LOSE, quick, survives
from ttp.testing import kit

pytestmark = [pytest.mark.needs("torchtitan", "spmd_types"), pytest.mark.timeout(600)]


KILLS = [kit.Kill("backward", rank=3), kit.Kill("in_step", rank=0), kit.Kill("stepped", rank=2, after=2)]


@pytest.mark.parametrize(("_name", "kills"), quick(KILLS, 1))
def test_it_is_killed_and_ends_with_its_bits(_name: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    survives(kit.Job("tests.frameworks.titan_program", kills, world_size=4, steps=8 if len(kills) > 1 else 4), tmp_path)


@pytest.mark.slow
def test_shards_without_replicas_come_back_from_their_copies(tmp_path: Path) -> None:
    kills = [kit.Kill("in_step", rank=1, after=5)]
    env = {"PROGRAM_SHARDS": "2", "TTP_BUDDY_EVERY": "2"}
    survives(kit.Job("tests.frameworks.titan_program", kills, env=env, may_lose=MAY_LOSE), tmp_path)
