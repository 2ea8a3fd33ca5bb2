"""A loop with Accelerate: accumulation, scalers, split batches, its loaders and registered objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forking import ForkedPython
from ttp.errors import ConfigError
from ttp.testing import kit

pytestmark = [pytest.mark.needs("accelerate", "torchdata"), pytest.mark.timeout(600)]
PROGRAM = "tests.frameworks.accelerate_program"


FLAT = SimpleNamespace(fsdp_version=1, use_orig_params=False)
KILLS = [kit.Kill("backward", rank=1), kit.Kill("stepped", rank=0, after=3)]


@pytest.mark.parametrize(
    "loop", ["scaler", *(pytest.param(loop, marks=pytest.mark.slow) for loop in ("", "bf16", "split"))]
)
def test_it_is_killed_and_ends_with_its_bits(loop: str, tmp_path: Path) -> None:
    found = kit.run(kit.Job(PROGRAM, KILLS, steps=12, env={"LOOP": loop}), tmp_path, start=ForkedPython)
    print(found)
    found.check()


def test_a_shard_that_has_a_replica_costs_no_step(tmp_path: Path) -> None:
    job = kit.Job(PROGRAM, KILLS, world_size=4, steps=12, env={"LOOP": "hsdp"})
    found = kit.run(job, tmp_path, start=ForkedPython)
    print(found)
    found.check()


@pytest.mark.parametrize("loop", ["fsdp1", "fsdp2"])
def test_shards_come_back_from_their_copies(loop: str, tmp_path: Path) -> None:
    kills = [kit.Kill("in_step", rank=0, after=5), kit.Kill("stepped", rank=1, after=5)]
    job = kit.Job(PROGRAM, kills, steps=12, env={"LOOP": loop, "TTP_BUDDY_EVERY": "2"}, may_lose=3)
    found = kit.run(job, tmp_path, start=ForkedPython)
    print(found)
    found.check()


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
