"""Loops of Lightning Fabric and engines of pytorch-ignite: ttp sees an own loop in them, as docs/frameworks.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.conftest import quick, survives
from ttp.testing import kit

KILLS = [
    kit.Kill("backward", rank=1),
    kit.Kill("in_step", rank=0),
    kit.Kill("evaluation", rank=1, after=0),
    kit.Kill("stepped", rank=0),
    kit.Kill("saved", rank=1, after=0),
]
pytestmark = pytest.mark.timeout(600)


@pytest.mark.needs("lightning")
@pytest.mark.parametrize(("precision", "kills"), [*quick(KILLS, 1, 2), *quick(KILLS, name="bf16-mixed")])
def test_fabric(precision: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    survives(kit.Job("tests.frameworks.fabric_program", kills, steps=12, env={"LOOP": precision}), tmp_path)


@pytest.mark.needs("ignite")
@pytest.mark.parametrize(("_name", "kills"), quick([*KILLS, kit.Kill("iteration", rank=0)], 1, 2))
def test_ignite(_name: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    survives(kit.Job("tests.frameworks.ignite_program", kills, steps=25), tmp_path)
