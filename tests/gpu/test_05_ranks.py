"""Four ranks on one device, over gloo: streams, events and deaths are real, only the collective is not NCCL's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import FAULTS, resumed_like_unbroken

HOST = pytest.param("cpu", marks=pytest.mark.slow, id="host")
DEVICE = pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")


@pytest.mark.timeout(420)
@pytest.mark.parametrize("device", [DEVICE, HOST])
@pytest.mark.parametrize("fault", FAULTS)
def test_replicas(tmp_path: Path, device: str, fault: str) -> None:
    problem = resumed_like_unbroken(tmp_path, device, "ddp", fault)
    assert not problem, problem


@pytest.mark.timeout(420)
@pytest.mark.parametrize("device", [DEVICE, HOST])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_shards_with_replicas(tmp_path: Path, device: str, fault: str) -> None:
    problem = resumed_like_unbroken(tmp_path, device, "hsdp", fault)
    if device == "cuda" and "does not run" in problem and "gloo" in problem.lower():
        pytest.skip("gloo of this torch does not reduce_scatter tensors of a device; see test_12_two_ranks_nccl.py")
    assert not problem, problem


@pytest.mark.gpu
@pytest.mark.timeout(420)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_shards_whose_barrier_is_on_the_stream(tmp_path: Path, fault: str) -> None:
    problem = resumed_like_unbroken(tmp_path, "cuda", "hsdp", fault, env={"TTP_STREAM_BARRIER": "1"})
    if "does not run" in problem and "gloo" in problem.lower():
        pytest.skip("gloo of this torch does not reduce_scatter tensors of a device; see test_12_two_ranks_nccl.py")
    assert not problem, problem
