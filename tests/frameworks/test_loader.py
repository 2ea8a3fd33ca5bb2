"""A loader that keeps its place is given back what it was about to give, in its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit


@pytest.mark.needs("torchdata")
@pytest.mark.timeout(600)
def test_batches_of_workers_come_in_their_order(tmp_path: Path) -> None:
    kills = [kit.Kill("backward", rank=1), kit.Kill("stepped", rank=0, after=7)]
    job = kit.Job("tests.frameworks.loader_program", kills, steps=14)  # seven batches make an epoch
    found = kit.run(job, tmp_path, start=ForkedPython)
    print(found)
    found.check()
