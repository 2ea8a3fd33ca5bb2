"""A checkpoint of one layout in another one, through ttp and without it: every element of every tensor is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.megatron.jobs import DP4, EP2_DP2, PP2_DP2, VIRTUAL, Job, assert_equal
from tests.adapters.megatron.nursery import Nursery

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400), pytest.mark.slow]


def killed(nursery: Nursery, directory: Path, shape: dict[str, Any]) -> tuple[Job, dict[str, torch.Tensor]]:
    """A job that was killed, and the state that it should have saved."""
    job = Job(nursery, directory, shape)
    job.kill([1], "reduced")
    return job, job.unhurt()


@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    [
        pytest.param(PP2_DP2, {**DP4, "layers": 4}, 4, id="pp2-to-pp1"),
        pytest.param(PP2_DP2, VIRTUAL, 4, id="to-interleaved"),
        pytest.param(DP4, {"tp": 2, "pp": 2}, 4, id="dp4-to-tp2-pp2"),
        pytest.param(DP4, {"tp": 2}, 2, id="four-ranks-to-two"),
        pytest.param(EP2_DP2, {"instances": 2, "experts": True}, 4, id="ep2-to-ep1"),
        pytest.param({**DP4, "bf16": True}, {"tp": 2, "bf16": True}, 4, id="bf16-dp4-to-tp2"),
    ],
)
def test_another_layout(
    nursery: Nursery, tmp_path: Path, source: dict[str, Any], target: dict[str, Any], ranks: int
) -> None:
    job, unhurt = killed(nursery, tmp_path, source)
    assert_equal(unhurt, job.state("other", target, ranks, ttp_from=str(job.save_dir)))
    if source.get("ep", 1) == target.get("ep", 1):  # else Megatron has one optimizer here and two there, and refuses
        assert_equal(unhurt, job.state("stock", target, ranks, stock_from=str(job.checkpoint)))


@pytest.mark.parametrize("bf16", [False, True])
def test_another_kind_of_optimizer(nursery: Nursery, tmp_path: Path, bf16: bool) -> None:
    job, unhurt = killed(nursery, tmp_path, {"instances": 2, "bf16": bf16})
    plain = job.state("plain", {"distributed": False, "bf16": bf16}, ttp_from=str(job.save_dir))
    assert_equal(unhurt, plain)
