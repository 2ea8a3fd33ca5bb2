"""A checkpoint of one layout read in another one, by ttp and without it: every element of every tensor is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.megatron.jobs import DP4, EP2_DP2, PP2_DP2, TP2_DP2, VIRTUAL, Job, assert_equal, assert_whole
from tests.adapters.megatron.nursery import Nursery
from ttp.adapters.torch.convert.conversion import convert

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400), pytest.mark.slow]


def killed(nursery: Nursery, directory: Path, shape: dict[str, Any]) -> tuple[Job, dict[str, torch.Tensor]]:
    """Return a job that was killed, and the state that it should have saved."""
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


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(DP4, id="dp4"),
        pytest.param(PP2_DP2, id="pp2"),
        pytest.param(VIRTUAL, id="interleaved"),
        pytest.param(EP2_DP2, id="experts"),
        pytest.param({**TP2_DP2, "fp16_scaler": True, "overflows": [1]}, id="dynamic-loss-scale"),
        pytest.param({**DP4, "bf16": True}, id="bf16-dp4"),
        pytest.param({"distributed": False, "tp": 2}, id="fp32-optimizer"),
        pytest.param({"distributed": False, "tp": 2, "bf16": True}, id="float16-optimizer"),
        pytest.param({"distributed": False, "tp": 2, "torch_adam": True}, id="torch-adam"),
        pytest.param({**TP2_DP2, "frozen": True}, id="frozen-layers"),
    ],
)
def test_one_file_of_it(nursery: Nursery, tmp_path: Path, shape: dict[str, Any]) -> None:
    """The file has the whole state, with the names of the model."""
    job, unhurt = killed(nursery, tmp_path, shape)
    convert(job.checkpoint, tmp_path / "all.pt", "torch", watch=lambda _what, _total: lambda _count: None)
    assert_whole(unhurt, torch.load(tmp_path / "all.pt", weights_only=True))
