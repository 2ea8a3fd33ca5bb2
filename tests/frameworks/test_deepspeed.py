"""DeepSpeed's engine, ZeRO 0 to 2: killed in each phase of a step, a job ends with the bits of the unbroken one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forking import ForkedPython
from tests.frameworks.conftest import MAY_LOSE, survives
from ttp.errors import ConfigError
from ttp.testing import kit

pytestmark = [pytest.mark.needs("deepspeed"), pytest.mark.timeout(900)]
PROGRAM = "tests.frameworks.deepspeed_program"
KILLS = [kit.Kill("in_step", rank=0, after=11), kit.Kill("stepped", rank=1, after=10)]  # two steps for each update


def test_replicas_lose_no_step(tmp_path: Path) -> None:
    kills = [kit.Kill("backward", rank=1), kit.Kill("in_step", rank=0)]
    env = {"PROGRAM_STAGE": "0", "PROGRAM_TYPE": ""}
    survives(kit.Job(PROGRAM, kills, steps=6, env=env), tmp_path)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "bf16"), (2, "fp16"), (1, "")])
def test_partitions_come_back_from_their_copies(stage: int, dtype: str, tmp_path: Path) -> None:
    """A copy is made every two updates."""
    env = {"PROGRAM_STAGE": str(stage), "PROGRAM_TYPE": dtype, "TTP_BUDDY_EVERY": "2"}
    survives(kit.Job(PROGRAM, KILLS, steps=14, env=env, may_lose=MAY_LOSE), tmp_path)


@pytest.mark.parametrize("ranks", [3, 1])
def test_another_number_of_ranks_goes_on_with_the_same_weights_and_moments(ranks: int, tmp_path: Path) -> None:
    env = {"TTP_BUDDY_EVERY": "2"}
    job = kit.Job(PROGRAM, KILLS[:1], steps=8, env=env, may_lose=MAY_LOSE)
    found = survives(job, tmp_path / "two")
    version = found.rows[0].version
    assert version

    def whole(name: str, **job: Any) -> Any:
        kit.run(kit.Job(PROGRAM, (), steps=version, **job), tmp_path / name, start=ForkedPython)
        result = json.loads((tmp_path / name / "hurt" / "result0.json").read_text())
        return result["whole"], result["model"]

    other = whole("other", world_size=ranks, env={"PROGRAM_FROM": str(tmp_path / "two" / "hurt" / "checkpoints")})
    assert other == whole("unbroken")
    assert not list((tmp_path / "other" / "hurt").glob("reported*.log"))  # nothing was made again


@pytest.mark.parametrize(
    ("stage", "optimizer", "why"),
    [
        (3, {}, "not stage 3"),
        (0, {"optimizer": None}, "ZeRO 0 in half precision"),
        (1, {"single_partition_of_fp32_groups": [], "cpu_offload": True}, "without offloading"),
        (2, {"single_partition_of_fp32_groups": [], "round_robin_gradients": True}, "round_robin_gradients"),
    ],
)
def test_what_cannot_be_protected_is_refused(stage: int, optimizer: dict[str, Any], why: str) -> None:
    import ttp.deepspeed

    engine = SimpleNamespace(zero_optimization_stage=lambda: stage, optimizer=SimpleNamespace(**optimizer))
    with pytest.raises(ConfigError, match=why):
        ttp.deepspeed.protect(engine)
