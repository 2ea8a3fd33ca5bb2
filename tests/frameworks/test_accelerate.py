"""A loop with Accelerate: accumulation, scalers, split batches, its loaders and registered objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.frameworks.conftest import MAY_LOSE, quick, survives
from ttp.errors import ConfigError
from ttp.testing import kit

pytestmark = [pytest.mark.needs("accelerate", "torchdata"), pytest.mark.timeout(600)]
PROGRAM = "tests.frameworks.accelerate_program"


KILLS = [kit.Kill("backward", rank=1), kit.Kill("stepped", rank=0, after=3)]


COPIES = [kit.Kill("in_step", rank=0, after=5), kit.Kill("stepped", rank=1, after=5)]


@pytest.mark.parametrize(
    ("loop", "kills"),
    [
        *quick(KILLS, 1, name="scaler"),
        *quick(KILLS, 0, name="hsdp"),
        *quick(COPIES, 0, name="fsdp2"),
        *(case for loop in ("", "bf16", "split") for case in quick(KILLS, name=loop)),
        *quick(COPIES, name="fsdp1"),
    ],
)
def test_it_is_killed_and_ends_with_its_bits(loop: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    env, ranks = {"LOOP": loop, "TTP_BUDDY_EVERY": "2"}, 4 if loop == "hsdp" else 2
    lost = MAY_LOSE if kills[0] in COPIES else 0
    survives(kit.Job(PROGRAM, kills, ranks, steps=12, env=env, may_lose=lost), tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_processes": 2}, "the job has 1 ranks, and Accelerate trains on 2"),
        ({"distributed_type": SimpleNamespace(name="DEEPSPEED")}, "cannot protect DEEPSPEED"),
        (
            {"state": SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1, use_orig_params=False))},
            "have no names",
        ),
    ],
)
def test_what_cannot_be_protected_is_refused(changes: dict[str, Any], why: str) -> None:
    import ttp.accelerate

    plain = {"num_processes": 1, "distributed_type": None, "state": None, "scaler": None}
    with pytest.raises(ConfigError, match=why):
        ttp.accelerate.protect(SimpleNamespace(**plain | changes), None, None)
