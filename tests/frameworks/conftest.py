"""In an environment of its own: ``make frameworks``. Ranks are forked from a process that has imported them."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests import forking

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


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("needs"):
        for package in mark.args:
            pytest.importorskip(package)
