"""Real kills in every layout, with every kind of optimizer, at every point of a step: saved by the others, resumed bit
for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron.jobs import DP4, EP2_DP2, KILLED_AT, PP2_DP2, TP2_DP2, VIRTUAL, Job
from tests.adapters.megatron.nursery import Nursery

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]

PLAIN_EP2 = {"ep": 2, "experts": True, "distributed": False}
"""All four ranks have the same dense parameters, two of them the same experts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dead", "phase", "saved"),
    [
        pytest.param(DP4, [0], "begin", 3, id="dp4-rank0"),
        pytest.param(DP4, [2, 1], "reduced", 3, id="dp4-one-per-shard"),
        pytest.param(DP4, [0, 1], "reduced", 3, id="dp4-whole-instance"),
        pytest.param(DP4, [3], "post_step0", 4, id="dp4-updated"),
        pytest.param(TP2_DP2, [0], "pre_step0", 3, id="tp2-rank0-before-the-barrier"),
        pytest.param(PP2_DP2, [3], "post_step0", 4, id="pp2-updated"),
        pytest.param(PP2_DP2, [0, 3], "begin", 3, id="pp2-one-per-stage"),
        pytest.param(VIRTUAL, [1], "reduced", 3, id="interleaved"),
        pytest.param(EP2_DP2, [0], "reduced", 3, id="experts-reduced"),
        pytest.param(EP2_DP2, [1], "post_step0", 4, id="experts-between-two-optimizers"),
        pytest.param(EP2_DP2, [1, 2], "post_step0", 4, id="experts-one-per-instance-between"),
        pytest.param(EP2_DP2, [2], "post_step1", 4, id="experts-updated"),
        pytest.param(PLAIN_EP2, [0, 3], "reduced", 3, id="experts-fp32-optimizer"),
        pytest.param({**PLAIN_EP2, "bf16": True}, [1], "post_step0", 4, id="experts-float16"),
        pytest.param({"distributed": False}, [1], "reduced", 4, id="fp32-optimizer-needs-no-barrier"),
        pytest.param({"distributed": False, "tp": 2}, [1], "reduced", 3, id="fp32-optimizer-tp2"),
        pytest.param({"distributed": False, "tp": 2, "bf16": True}, [1], "reduced", 3, id="float16-optimizer-tp2"),
        pytest.param({**DP4, "bf16": True}, [1], "post_step0", 4, id="bf16-dp4"),
        pytest.param({**TP2_DP2, "fp16_scaler": True}, [1], "reduced", 3, id="dynamic-loss-scale"),
        pytest.param({**DP4, "fp16_scaler": True, "overflows": [2, 4]}, [1], "reduced", 3, id="skipped-updates"),
        pytest.param({"distributed": False, "tp": 2, "torch_adam": True}, [1], "reduced", 3, id="torch-adam"),
        pytest.param({**TP2_DP2, "frozen": True}, [1], "reduced", 3, id="frozen-layers"),
        pytest.param({**DP4, "overlap": True}, [2], "reduced", 3, id="overlapped-gather"),
        pytest.param({**EP2_DP2, "tied": False, "bf16": True}, [2], "begin", 3, id="experts-bf16-untied"),
    ],
)
def test_every_layout_loses_no_step(
    nursery: Nursery, tmp_path: Path, shape: dict[str, Any], dead: list[int], phase: str, saved: int
) -> None:
    job = Job(nursery, tmp_path, shape)
    job.kill(dead, phase)
    assert job.versions() == [f"tft_saved_checkpoints-step_{saved}"]
    assert job.live(1) == [0] * 4, job.story()
    job.run_state("unhurt", steps=KILLED_AT)
    job.assert_resumed_as_unhurt()


def test_a_world_that_fails_says_so(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(tmp_path, "no_such_program", ranks=1) == [1]
    assert "no_such_program" in (tmp_path / "rank0.out").read_text()
    assert "RANK" not in os.environ


def test_samples_are_counted_as_megatron_counts_them(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(tmp_path, "growing_batches", ranks=1) == [0], (tmp_path / "rank0.out").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "phase"),
    [
        pytest.param(DP4, "reduced", id="dp4"),
        pytest.param(DP4, "post_step0", id="dp4-updated"),
        pytest.param(EP2_DP2, "post_step0", id="experts-half-way"),
    ],
)
def test_updates_can_be_undone(nursery: Nursery, tmp_path: Path, shape: dict[str, Any], phase: str) -> None:
    """There is no barrier before the update, so survivors may have made it or not when they are frozen."""
    job = Job(nursery, tmp_path, shape)
    job.kill([1], phase, undo="preimage")
    assert job.versions() in (["tft_saved_checkpoints-step_3"], ["tft_saved_checkpoints-step_4"])
    assert job.live(1, undo="preimage") == [0] * 4, job.story()
    job.run_state("unhurt", steps=KILLED_AT)
    job.assert_resumed_as_unhurt()
