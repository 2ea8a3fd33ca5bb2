"""The Trainer of Hugging Face: killed between its hooks, it ends with the bits, the log and the callbacks' states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

pytestmark = [pytest.mark.needs("transformers", "accelerate"), pytest.mark.timeout(600)]
PROGRAM = "tests.frameworks.hf_program"


def test_it_is_killed_in_a_step_and_behind_it(tmp_path: Path) -> None:
    kills = [
        kit.Kill("backward", rank=1),
        kit.Kill("on_log", rank=1),
        kit.Kill("on_evaluate", rank=0),
        kit.Kill("on_epoch_end", rank=1),
        kit.Kill("in_step", rank=0),
    ]
    found = kit.run(kit.Job(PROGRAM, kills, steps=16), tmp_path, start=ForkedPython)
    print(found)
    found.check()
