"""Runs in an environment of its own: ``make frameworks``. Ranks are forked from a process that has imported the
frameworks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from ttp.testing import kit

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
forking.PRELOAD[-1:-1] = [
    name
    for name in (
        "lightning.pytorch",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "torchdata.stateful_dataloader",
    )
    if importlib.util.find_spec(name.partition(".")[0])
]
if importlib.util.find_spec("torchtitan"):
    forking.PRELOAD.insert(-1, "tests.frameworks.titan_on_cpu")


MAY_LOSE = 4
"""Steps that shards without replicas may lose if they are copied every two updates: one copy is left out if that before
it takes long, as it does on a busy machine."""


def quick(kills: Sequence[kit.Kill], *chosen: int, name: str = "") -> Any:
    """Return these of the kills for ``parametrize``; all of them with ``-m slow``."""
    few = pytest.param(name, [kills[number] for number in chosen], id=f"{name or 'job'}")
    every = pytest.param(name, kills, id=f"{name or 'job'}-all", marks=pytest.mark.slow)
    return [few, every] if chosen else [every]


def survives(job: kit.Job, directory: Path) -> Any:
    """Run a job with its faults and without them, print what became of it, and check that it ends with its bits."""
    found = kit.run(job, directory, start=forking.ForkedPython)
    print(found)
    found.check()
    return found


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("needs"):
        for package in mark.args:
            pytest.importorskip(package)
