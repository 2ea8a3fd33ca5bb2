"""A loader that keeps its place gives the batches that were due next, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.conftest import quick, survives
from ttp.testing import kit


@pytest.mark.needs("torchdata")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("env", [{}, {"LOADER": "nodes"}], ids=["workers", "nodes"])
@pytest.mark.parametrize(("_name", "kills"), quick([kit.Kill("backward", 1), kit.Kill("stepped", 0, after=7)], 1))
def test_batches_of_workers_come_in_their_order(
    _name: str, kills: list[kit.Kill], env: dict[str, str], tmp_path: Path
) -> None:
    survives(kit.Job("tests.frameworks.loader_program", kills, steps=14, env=env), tmp_path)  # seven batches: an epoch
