"""A real job of megatron-core, a real SIGKILL, a real controller: saved by the others, resumed bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import free_port

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]

STEPS = 5
KILLED_AT = 3  # updates that are finished by then
TP2_DP2 = {"tp": 2, "instances": 2}
DP4 = {"instances": 2}
PP2_DP2 = {"pp": 2, "instances": 2}
VIRTUAL = {"pp": 2, "virtual": 2, "instances": 2}
EP2_DP2 = {"ep": 2, "instances": 2, "experts": True}


class Job:
    """One job directory: a first life that ends in a kill, a second one that goes on, and one that was never hurt."""

    def __init__(self, nursery: Any, directory: Path, shape: dict[str, Any]) -> None:
        self.nursery, self.directory, self.shape = nursery, directory, shape

    def live(self, life: int, fault: dict[str, Any] | None = None, undo: str | None = None) -> list[int]:
        """Exit codes of a protected life."""
        env = {"TTP_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1", "TTP_OT": "60"}
        env |= {"TTP_RUN_DIR": str(self.directory / f"run{life}"), "TORCHELASTIC_RESTART_COUNT": str(life)}
        arguments = {"shape": self.shape, "steps": STEPS, "life": life, "fault": fault, "undo": undo}
        return list(self.nursery.run(self.directory / "job", "job", env=env, **arguments))

    def unhurt(self) -> list[dict[str, str]]:
        """What a life without ttp and without faults comes to."""
        codes = self.nursery.run(self.directory / "plain", "job", shape=self.shape, steps=STEPS)
        assert codes == [0] * 4, self.story("plain")
        return self.results("plain")

    def results(self, life: str) -> list[dict[str, str]]:
        return [json.loads((self.directory / life / f"result{rank}.json").read_text()) for rank in range(4)]

    def versions(self) -> list[str]:
        return [path.name for path in sorted((self.directory / "job" / "checkpoints").glob("tft_saved_*"))]

    def story(self, life: str = "job") -> str:
        outputs = sorted((self.directory / life).glob("rank*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in outputs)


def check(job: Job, dead: list[int], phase: str, saved: int, undo: str | None = None) -> None:
    codes = job.live(0, {"ranks": dead, "step": KILLED_AT, "phase": phase}, undo)
    assert codes == [-9 if rank in dead else 75 for rank in range(4)], job.story()
    assert job.versions() == [f"tft_saved_checkpoints-step_{saved}"]
    assert job.live(1, undo=undo) == [0] * 4, job.story()
    unhurt = job.unhurt()
    for rank, (resumed, never_hurt) in enumerate(zip(job.results("job"), unhurt, strict=True)):
        different = {name for name, value in resumed.items() if value != never_hurt[name]}
        assert not different, (rank, different)


def test_tensor_parallel_over_two_instances_loses_no_step(nursery: Any, tmp_path: Path) -> None:
    check(Job(nursery, tmp_path, TP2_DP2), [1], "reduced", KILLED_AT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dead", "phase", "saved"),
    [
        pytest.param(DP4, [0], "begin", 3, id="dp4-rank0"),
        pytest.param(DP4, [2, 1], "reduced", 3, id="dp4-one-per-shard"),
        pytest.param(DP4, [0, 1], "reduced", 3, id="dp4-whole-instance"),
        pytest.param(DP4, [3], "post_step0", 4, id="dp4-updated"),
        pytest.param(TP2_DP2, [0], "pre_step0", 3, id="tp2-rank0-behind-the-barrier"),
        pytest.param(PP2_DP2, [3], "post_step0", 4, id="pp2-updated"),
        pytest.param(PP2_DP2, [0, 3], "begin", 3, id="pp2-one-per-stage"),
        pytest.param(VIRTUAL, [1], "reduced", 3, id="interleaved"),
        pytest.param(EP2_DP2, [0], "reduced", 3, id="experts-reduced"),
        pytest.param(EP2_DP2, [1], "post_step0", 4, id="experts-between-two-optimizers"),
        pytest.param(EP2_DP2, [2], "post_step1", 4, id="experts-updated"),
        pytest.param({"distributed": False}, [1], "reduced", 3, id="fp32-optimizer"),
        pytest.param({"distributed": False, "tp": 2}, [1], "reduced", 3, id="fp32-optimizer-tp2"),
        pytest.param({"distributed": False, "tp": 2, "bf16": True}, [1], "reduced", 3, id="float16-optimizer-tp2"),
        pytest.param({**DP4, "bf16": True}, [1], "post_step0", 4, id="bf16-dp4"),
        pytest.param({**TP2_DP2, "fp16_scaler": True}, [1], "reduced", 3, id="dynamic-loss-scale"),
        pytest.param({**DP4, "overlap": True}, [2], "reduced", 3, id="overlapped-gather"),
        pytest.param({**EP2_DP2, "tied": False, "bf16": True}, [2], "begin", 3, id="experts-bf16-untied"),
    ],
)
def test_every_layout_loses_no_step(
    nursery: Any, tmp_path: Path, shape: dict[str, Any], dead: list[int], phase: str, saved: int
) -> None:
    check(Job(nursery, tmp_path, shape), dead, phase, saved)


def test_the_worlds_are_their_own(nursery: Any, tmp_path: Path) -> None:
    assert nursery.run(tmp_path, "no_such_program", ranks=1) == [1]
    assert "no_such_program" in (tmp_path / "rank0.out").read_text()
    assert "RANK" not in os.environ
