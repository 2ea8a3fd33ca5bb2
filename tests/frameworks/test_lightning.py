"""PyTorch Lightning: killed between its hooks, it ends with the bits, the loops and the callbacks' states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

pytestmark = [pytest.mark.needs("lightning"), pytest.mark.timeout(900)]
PROGRAM = "tests.frameworks.lightning_program"

KILLS = {
    "automatic": [
        kit.Kill("forward", rank=0),
        kit.Kill("in_step", rank=0),
        kit.Kill("stepped", rank=1, after=0),
        kit.Kill("on_train_batch_end", rank=0),
        kit.Kill("validation", rank=1),
        kit.Kill("on_train_epoch_end", rank=0),
    ],
    "plateau": [
        kit.Kill("backward", rank=1, after=3),
        kit.Kill("validation", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
    "manual": [
        kit.Kill("backward", rank=0, after=4),  # of the judge: it has stepped once in this batch
        kit.Kill("in_step", rank=1, after=5),
        kit.Kill("on_train_batch_end", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
    "workers": [
        kit.Kill("forward", rank=1, after=2),
        kit.Kill("stepped", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
}


@pytest.mark.parametrize("kind", KILLS)
def test_it_is_killed_and_ends_with_its_bits(kind: str, tmp_path: Path) -> None:
    if kind == "workers":
        pytest.importorskip("torchdata")
    job = kit.Job(PROGRAM, KILLS[kind], env={"PROGRAM_KIND": kind})
    found = kit.run(job, tmp_path, start=ForkedPython)
    print(found)
    found.check()
