"""Real kills with every kind of optimizer and other settings than those of ``test_matrix.py``: saved by the others,
resumed bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron.jobs import DP4, EP2_DP2, KILLED_AT, PP2_DP2, SCALED, TP2_DP2, VIRTUAL, Job
from tests.adapters.megatron.nursery import Nursery

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]

PLAIN_EP2 = {"ep": 2, "experts": True, "distributed": False}
"""All four ranks have the same dense parameters, two of them the same experts."""
IN_SEQUENCE = {"model": {"sequence_parallel": True}}
BALANCED = {"model": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}}
"""Megatron changes a buffer of the router in each step, before the update."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dead", "phase", "saved"),
    [
        pytest.param({**TP2_DP2, **IN_SEQUENCE}, [0], "pre_step0", 3, id="tp2-rank0-before-the-barrier"),
        pytest.param(VIRTUAL, [1], "reduced", 3, id="interleaved"),
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
        pytest.param({**DP4, "frozen_below": True}, [1], "reduced", 3, id="some-frozen-layers-of-a-kind"),
        pytest.param({**EP2_DP2, "frozen": True}, [1], "reduced", 3, id="frozen-experts"),
        pytest.param({**PP2_DP2, "frozen_below": True, "tied": False}, [1], "reduced", 3, id="a-frozen-stage"),
        pytest.param({**PLAIN_EP2, **SCALED}, [0], "reduced", 3, id="experts-with-states-of-their-own"),
        pytest.param({**DP4, "overlap": True}, [2], "reduced", 3, id="overlapped-gather"),
        pytest.param({**PP2_DP2, "tied": False, "mtp": True}, [1], "reduced", 3, id="multi-token-prediction"),
        pytest.param({**EP2_DP2, **BALANCED, "tied": False, "bf16": True}, [2], "begin", 3, id="experts-bf16-untied"),
    ],
)
def test_no_step_is_lost(
    nursery: Nursery, tmp_path: Path, shape: dict[str, Any], dead: list[int], phase: str, saved: int
) -> None:
    job = Job(nursery, tmp_path, shape)
    job.kill(dead, phase)
    assert job.versions() == [f"tft_saved_checkpoints-step_{saved}"]
    assert job.live(1) == [0] * 4, job.story()
    assert "its extra_state" not in job.story(), "Megatron's random streams are complete before the update"
    job.run_state("unhurt", steps=KILLED_AT)
    job.assert_resumed_as_unhurt()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["begin", "stepped"])
def test_what_megatron_clips_after_the_update_belongs_to_it(nursery: Nursery, tmp_path: Path, phase: str) -> None:
    """``install()`` declares the end of each step, which Megatron-LM's loop does not."""
    shape = {"distributed": False, "bf16": True, "model": {"qk_clip": True}}
    unbroken, job = (Job(nursery, tmp_path / name, shape) for name in ("unbroken", "killed"))
    assert unbroken.live(0, through="install") == [0] * 4, unbroken.story()
    job.kill([1], phase, through="install")
    assert job.live(1, through="install") == [0] * 4, job.story()
    for rank in range(4):
        for version, found in job.seen(rank).items():
            assert found == unbroken.seen(rank)[version], (rank, version)


def test_what_is_to_say_of_extra_states_is_told_once(nursery: Nursery, tmp_path: Path) -> None:
    """A checkpoint has it as it was before. The counters of Megatron's own loop are complete."""
    env = {"TTP_TOKEN": "a secret", "MASTER_ADDR": "127.0.0.1", "TTP_RUN_DIR": str(tmp_path / "run")}
    assert nursery.run(tmp_path, "counting", ranks=2, env=env, controller=True, steps=6) == [0, 0]
    told = [(tmp_path / f"rank{rank}.out").read_text() for rank in range(2)]
    assert [text.count("changes after optimizer.step()") for text in told] == [1, 0]
    assert "extra_state['late'] ('value') changes after" in told[0]
    assert all(text.count("a note on them") == 1 for text in told)


@pytest.mark.parametrize(
    ("what", "shape", "said"),
    [
        ("optimizer", {}, "optimizer_cpu_offload"),
        ("save_dir", {}, "save_dir"),
        ("experts", {"etp": 2, "experts": True}, "Make the two sizes equal"),
    ],
)
def test_what_is_wrong_on_one_rank_or_with_all_is_refused_on_all(
    nursery: Nursery, tmp_path: Path, what: str, shape: dict[str, Any], said: str
) -> None:
    env = {"TTP_PORT": "1", "TTP_TOKEN": "a secret", "MASTER_ADDR": "127.0.0.1", "TTP_RUN_DIR": str(tmp_path / "run")}
    assert nursery.run(tmp_path, "refused", ranks=2, env=env, what=what, shape=shape) == [64, 64]
    for rank in range(2):
        assert said in (tmp_path / f"rank{rank}.out").read_text()


def test_a_world_that_fails_says_so(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(tmp_path, "no_such_program", ranks=1) == [1]
    assert "no_such_program" in (tmp_path / "rank0.out").read_text()
    assert "RANK" not in os.environ


def test_samples_are_counted_as_megatron_counts_them(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(tmp_path, "growing_batches", ranks=1) == [0], (tmp_path / "rank0.out").read_text()
